"""Generating text: a key/value cache that evicts keys that no later query can see, and the loop from logits to tokens.

slots     SlotAllocator: which slot holds which position; LookaheadCheck: no query lacks a key that the mask shows it
layers    the buffers of keys and values
cache     KVCache: keys and values of all layers; its pictures
models    from any model to its next-token logits
generate  the loop; sampling by temperature, top-k and top-p; token ids to text, never splitting a character
"""
