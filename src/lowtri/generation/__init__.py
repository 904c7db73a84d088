"""Generating: the cache that asks the mask what is dead, and the loop from logits to tokens.

book      which slot holds the token of which place, and which slots are free again
missing   which appends would leave a query without a key that its mask shows
positions positions as users pass them
buffers   what the cache does with tensors, NumPy and torch
cache     KVCache: keys and values of all layers
sampling  from logits to one token: temperature, top-k, top-p
models    how to ask any model for the next logits
pieces    ids to text, never splitting a character
generate  the loop
"""
