"""Which query may see which key: masks as formulas over positions, with their texts and plans. NumPy only.

Each file imports only from the files above it:

tile            positions, and the three answers for a tile
positions       the default positions of queries and keys
arrays          users' arrays and tensors as NumPy arrays, checked; frozen copies of them
mask            Mask: answers, tables, text, and the operators ``& | ~ -``
text            a mask from a text or from a user's argument; masks as texts with arrays
traced_lengths  masks of lengths in programs that are traced
formulas        causal, full, window, band, first, strided
array_masks     keys, table, hidden
label_masks     what compares labels: chunks, documents
tree            drafts that branch
custom_masks    where (a function of the user's), heads (a mask for each query head)
plan            what kernels read: runs of tiles, and the bits of the partial ones; the number of visible pairs
ranges          the ranges of keys that each query sees
"""

from lowtri.masks.array_masks import hidden, keys, table
from lowtri.masks.custom_masks import heads, where
from lowtri.masks.formulas import band, causal, first, full, strided, window
from lowtri.masks.label_masks import chunks, documents
from lowtri.masks.mask import Mask
from lowtri.masks.plan import is_causal, pairs
from lowtri.masks.text import as_mask, mask
from lowtri.masks.tile import EMPTY, FULL, PARTIAL, POSITION_MAX
from lowtri.masks.tile import TileAnswer as Tile
from lowtri.masks.tree import tree, tree_depths

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "POSITION_MAX",
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
    "tree",
    "tree_depths",
    "where",
    "window",
]

for _method in (pairs, is_causal):  # Mask declares them; the file that defines them imports it
    setattr(Mask, _method.__name__, _method)
