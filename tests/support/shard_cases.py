"""Random masks for shards: those of ``random_masks``, in sizes of some hundred tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from random_masks import ROWS, Case, by_head, joined

from lowtri import masks as lt

LONGEST = 700

_size = st.integers(1, LONGEST)


def _case(mask: lt.Mask) -> Case:
    return Case(mask, lambda q, k, b, h: mask.for_row(b, h)(q, k), exact=False, text=False)


@st.composite
def _array_masks(draw: st.DrawFn) -> lt.Mask:
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    rows = draw(st.sampled_from([(), (ROWS,)]))
    kind = draw(st.sampled_from(["ids", "lengths", "keys", "key lengths", "table"]))
    if kind == "ids":
        return lt.documents(np.sort(rng.integers(0, 5, (*rows, LONGEST)), axis=-1))
    if kind == "lengths":
        return lt.documents(lengths=rng.integers(1, 300, 4), open_end=True)
    if kind == "keys":
        return lt.keys(np.repeat(rng.random((*rows, LONGEST // 50)) < 0.7, 50, axis=-1))
    if kind == "key lengths":
        return lt.keys(lengths=rng.integers(0, LONGEST, ROWS))
    return lt.table(rng.random((LONGEST, LONGEST)) < draw(st.sampled_from([0.0005, 0.5])))


_formulas = st.one_of(
    st.just(lt.full()),
    st.just(lt.causal()),
    _size.map(lt.window),
    st.builds(lt.band, _size, _size),
    _size.map(lt.first),
    _size.map(lt.chunks),
    st.integers(1, 90).map(lt.strided),
)
_single = st.one_of(_formulas, _formulas, _array_masks(), st.just(lt.where(lambda q, k: (k % 100 < 5) | (q == k))))
_flat = st.recursive(_single.map(_case), joined, max_leaves=4)
shard_masks = st.one_of(_flat, _flat, by_head(_flat)).map(lambda case: case.mask)
"""Masks of every kind, with and without batch rows and heads, for at most LONGEST tokens."""
