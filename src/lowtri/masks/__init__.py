"""Which query may see which key: masks as formulas over positions, with their texts, plans and pictures. NumPy only.

Each file imports only from the files above it:

tile          positions, and the three answers for a tile
arrays        users' arrays and tensors as NumPy arrays, checked; frozen copies of them
mask          Mask: answers, tables, text, and the operators ``& | ~ -``
text          a mask from a text or from a user's argument; masks as texts with arrays
formulas      causal, full, window, band, first, strided
array_masks   keys, table, hidden
label_masks   what compares labels: chunks, documents
tree          drafts that branch
custom_masks  where (a function of the user's), heads (a mask for each query head)
plan          what kernels read: runs of tiles, and the bits of the partial ones; the number of visible pairs;
              the ranges of keys that each query sees
picture       pictures of masks as text and as SVG, and how many positions show a mask
"""

from lowtri.masks.array_masks import hidden, keys, table
from lowtri.masks.custom_masks import heads, where
from lowtri.masks.formulas import band, causal, first, full, strided, window
from lowtri.masks.label_masks import chunks, documents
from lowtri.masks.mask import Mask
from lowtri.masks.picture import draw, save, shown_as_html, shown_as_svg
from lowtri.masks.plan import is_causal, pairs
from lowtri.masks.text import as_mask, mask
from lowtri.masks.tile import EMPTY, FULL, PARTIAL, POSITION_MAX, Tile
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

for _method in (pairs, is_causal, draw, save):  # Mask declares them; the files that define them import it
    setattr(Mask, _method.__name__, _method)
for _name, _shown in (("_repr_svg_", shown_as_svg), ("_repr_html_", shown_as_html)):  # what notebooks show
    setattr(Mask, _name, _shown)
