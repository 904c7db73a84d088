"""Who may see whom: formulas over positions, and what follows from them. NumPy only.

mask       Mask: the call, the three-answer tile question, & | ~ -, dense and additive tables
joins      masks joined: the minimum, the maximum and the opposite of answers
formulas   causal, window, first, ...: one short formula each
held       keys, table, where, heads: what holds an array, a function, other masks
ids        documents: by their cuts, or by an id for each position
arguments  what the public doors take, checked
atoms      the public doors to the formulas
holders    the public doors to what is held
grammar    the texts of masks, read
text       a mask from text, and back
packed     a mask as a text and its arrays, for programs
patterns   the bits of partial tiles, equal ones stored once
plan       what kernels read: runs of tiles, and the bits of the partial ones
labels     labels of pictures, cut into tokens
panels     what a picture shows, before it is text or SVG
svg        the picture as a file
draw       the picture as text
"""

from lowtri.masks.atoms import band, causal, chunks, first, full, strided, window
from lowtri.masks.holders import documents, heads, hidden, keys, table, where
from lowtri.masks.mask import EMPTY, END, FULL, PARTIAL, Mask, Tile
from lowtri.masks.text import as_mask, mask

__all__ = [
    "EMPTY",
    "END",
    "FULL",
    "PARTIAL",
    "Mask",
    "Tile",
    "as_mask",
    "band",
    "causal",
    "chunks",
    "documents",
    "first",
    "full",
    "heads",
    "hidden",
    "keys",
    "mask",
    "strided",
    "table",
    "where",
    "window",
]
