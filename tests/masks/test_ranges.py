"""The ranges of keys that each query sees, and who sees and is seen at all, against the table of all pairs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from random_masks import SIZE, Case, cases

from lowtri.masks.plan import plan
from lowtri.masks.ranges import key_ranges, keys_seen, queries_that_see


@settings(max_examples=60, deadline=None)
@given(
    cases, st.integers(1, SIZE), st.integers(1, SIZE), st.integers(1, 3), st.sampled_from([4, 64]), st.integers(0, 99)
)
def test_ranges_are_those_of_the_table(case: Case, nq: int, nk: int, most: int, tile_k: int, seed: int) -> None:
    """For positions in any order, with some that hold no token."""
    source = np.random.default_rng(seed)
    q, k = (np.where(source.random(n) < 0.1, -1, source.permutation(SIZE)[:n]) for n in (nq, nk))
    p = plan(case.mask, q, k, tile_k=tile_k)
    tables = np.stack([p.dense(m) for m in range(len(p.mask_pairs))])
    edges = np.diff(np.pad(tables.astype(np.int8), ((0, 0), (0, 0), (1, 1))), axis=2)
    ranges = key_ranges(p, most)
    if (edges == 1).sum(axis=2).max() > most:
        assert ranges is None
    else:
        assert ranges is not None and ranges.shape == (most, 2, len(tables), nq)
        at = np.arange(nk)
        shown = [(at >= low[..., None]) & (at < high[..., None]) for low, high in ranges]
        np.testing.assert_array_equal(np.logical_or.reduce(shown), tables)
        assert sum(part.sum() for part in shown) == tables.sum(), "ranges do not overlap"
    np.testing.assert_array_equal(queries_that_see(p), tables.any(axis=2))
    np.testing.assert_array_equal(keys_seen(p), tables.any(axis=1))
