"""Attention weights as pictures.

Each file imports only from the files above it:

reading  weights of any size, pooled to a picture's cells
text     the pooled weights as text
svg      the pooled weights as SVG
show     show(): the overview of all heads, and one of them
"""
