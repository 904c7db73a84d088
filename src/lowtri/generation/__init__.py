"""Generating text: a key/value cache that evicts what the mask hides for good, and the loop from logits to tokens.

slots      SlotAllocator: which slot holds the token at which position
missing    which appends would leave a query without a key that its mask shows
positions  positions as users pass them
buffers    the arrays of one layer, NumPy or torch
cache      KVCache: keys and values of all layers
sampling   from logits to one token: temperature, top-k, top-p
models     adapters from any model to next-token logits
text       token ids to text, never splitting a character
generate   the loop
"""
