"""Random masks for the laws, each with an oracle that does not use lowtri: a Python function of one pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from lowtri import masks as lt

SIZE = 20  # the laws test positions below SIZE; arrays are shorter, so that positions past their end are tested too
ROWS = 2  # of every batched mask
HEADS = 2

Sees = Callable[[int, int, int, int], bool]  # (q, k, batch row, head) -> may q see k?


@dataclass(frozen=True)
class Case:
    mask: lt.Mask
    sees: Sees
    exact: bool = True  # formulas, lengths and keys have exact answers for tiles
    text: bool = True  # the repr can be read back

    def __repr__(self) -> str:
        return f"<{self.mask!r}>"

    @property
    def ends(self) -> bool:
        """Whether it raises for positions past its own: tables and trees."""
        return any(name in repr(self.mask) for name in ("table(", "tree("))

    def table(self, q: list[int], k: list[int]) -> np.ndarray:
        """m.batch + (len(q), len(k)), pair by pair."""
        batch = self.mask.batch
        out = np.zeros((*batch, len(q), len(k)), bool)
        for place in np.ndindex(batch):
            at_zero = (*place, 0, 0)  # without a batch, or without heads
            b, h = at_zero[:2]
            out[place] = [[i >= 0 and j >= 0 and self.sees(i, j, b, h) for j in k] for i in q]
        return out


small = st.integers(1, 12)


@st.composite
def formulas(draw: st.DrawFn) -> Case:
    n = draw(small)
    a = draw(st.integers(0, 8))
    b = draw(st.integers(0, 8))
    made = [
        Case(lt.full(), lambda q, k, *_: True),
        Case(lt.causal(), lambda q, k, *_: k <= q),
        Case(lt.window(n), lambda q, k, *_: q - n < k <= q),
        Case(lt.band(a, b), lambda q, k, *_: q - a <= k <= q + b),
        Case(lt.first(n), lambda q, k, *_: k < n),
        Case(lt.chunks(n), lambda q, k, *_: q // n == k // n),
        Case(lt.strided(n), lambda q, k, *_: (q - k) % n == 0),
    ]
    return draw(st.sampled_from(made))


def rows_of(entries: st.SearchStrategy) -> st.SearchStrategy[list]:
    """(N,) or (ROWS, N), N below SIZE."""
    return st.integers(1, SIZE - 4).flatmap(
        lambda n: st.one_of(
            st.lists(entries, min_size=n, max_size=n),
            st.lists(st.lists(entries, min_size=n, max_size=n), min_size=ROWS, max_size=ROWS),
        )
    )


def entry(rows: list, b: int, at: int):
    row = rows[b] if isinstance(rows[0], list) else rows
    return row[min(at, len(row) - 1)]


@st.composite
def array_masks(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(["ids", "both ids", "lengths", "cu_seqlens", "keys", "key lengths", "table", "hidden"]))
    if kind == "ids":
        ids = draw(rows_of(st.integers(-2, 3)))
        return Case(lt.documents(ids), lambda q, k, b, h: entry(ids, b, q) == entry(ids, b, k), exact=False, text=False)
    if kind == "both ids":
        ids = draw(st.lists(st.integers(0, 3), min_size=1, max_size=9))
        key_ids = draw(st.lists(st.integers(0, 3), min_size=1, max_size=9))
        made = lt.documents(ids, key_ids)
        return Case(made, lambda q, k, b, h: entry(ids, b, q) == entry(key_ids, b, k), exact=False, text=False)
    if kind in ("lengths", "cu_seqlens"):
        sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
        ids = [number for number, size in enumerate(sizes) for _ in range(size)]
        edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        given = {"lengths": sizes} if kind == "lengths" else {"cu_seqlens": edges}
        made = lt.documents(**given, open_end=True)  # calls of other lengths are accepted
        return Case(made, lambda q, k, b, h: entry(ids, b, q) == entry(ids, b, k))
    if kind == "keys":
        valid = draw(rows_of(st.booleans()))
        n = len(valid[0]) if isinstance(valid[0], list) else len(valid)
        return Case(lt.keys(valid), lambda q, k, b, h: k >= n or entry(valid, b, k), text=False)
    if kind == "key lengths":
        sizes = draw(st.lists(st.integers(0, SIZE), min_size=ROWS, max_size=ROWS))
        return Case(lt.keys(lengths=sizes), lambda q, k, b, h: k < sizes[b])
    lead = draw(st.sampled_from([(), (ROWS,), (ROWS, HEADS), (1, HEADS), (ROWS, 1)]))
    bools = np.random.default_rng(draw(st.integers(0, 99))).random((*lead, SIZE, SIZE)) < draw(
        st.sampled_from([0.1, 0.5, 0.9])
    )

    def sees(q: int, k: int, b: int, h: int) -> bool:
        table = bools
        leading = (b, h)
        for index in leading[: len(lead)]:
            table = table[min(index, len(table) - 1)]
        return bool(table[q, k]) == (kind == "table")

    return Case((lt.table if kind == "table" else lt.hidden)(bools), sees, text=False)


def even_keys(q, k):
    return (k % 2 == 0) | (q == k)


user_formula = st.just(Case(lt.where(even_keys), lambda q, k, *_: k % 2 == 0 or q == k, exact=False, text=False))


@st.composite
def within_documents(draw: st.DrawFn, inner: st.SearchStrategy[Case]) -> Case:
    """A mask within each document, by lengths or by ids of which none comes again."""
    one = draw(inner)
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    ids = [number for number, size in enumerate(sizes) for _ in range(size)]
    by_lengths = draw(st.booleans())
    given = {"lengths": sizes, "open_end": True} if by_lengths else {"ids": [5 - i for i in ids]}

    def sees(q: int, k: int, b: int, h: int) -> bool:
        of_q = entry(ids, b, q)
        of_k = entry(ids, b, k)
        start = ids.index(of_q)
        return of_q == of_k and one.sees(q - start, k - start, b, h)

    return Case(lt.documents(**given, inner=one.mask), sees, one.exact, one.text and by_lengths)


@st.composite
def trees(draw: st.DrawFn) -> Case:
    """Drafts up to the end of the positions that are tested: past them a tree raises."""
    inner = draw(formulas())
    start = draw(st.integers(0, SIZE - 1))
    parents = [draw(st.integers(-1, i - 1)) for i in range(SIZE - start)]

    def path(draft: int) -> list[int]:
        return [draft, *(path(parents[draft]) if parents[draft] >= 0 else [])]

    def sees(q: int, k: int, b: int, h: int) -> bool:
        if q < start:
            return k < start and inner.sees(q, k, b, h)
        above = path(q - start)
        at = start + len(above) - 1
        if k < start:
            return inner.sees(at, k, b, h)
        return k - start in above and inner.sees(at, start + len(path(k - start)) - 1, b, h)

    return Case(lt.tree(parents, start, inner.mask), sees, exact=False)


basic_masks = st.one_of(formulas(), array_masks(), user_formula, trees())
single_masks = st.one_of(
    basic_masks, within_documents(st.deferred(lambda: st.one_of(basic_masks, joined(basic_masks))))
)
exact_cases = st.one_of(formulas(), array_masks(), within_documents(st.one_of(formulas(), array_masks()))).filter(
    lambda case: case.exact
)


@st.composite
def joined(draw: st.DrawFn, inner: st.SearchStrategy[Case]) -> Case:
    one = draw(inner)
    sign = draw(st.sampled_from("&|-~"))
    if sign == "~":
        return Case(~one.mask, lambda *at: not one.sees(*at), one.exact, one.text)
    two = draw(inner)
    text = one.text and two.text
    if sign == "&":
        return Case(one.mask & two.mask, lambda *at: one.sees(*at) and two.sees(*at), False, text)
    if sign == "|":
        return Case(one.mask | two.mask, lambda *at: one.sees(*at) or two.sees(*at), False, text)
    return Case(one.mask - two.mask, lambda *at: one.sees(*at) and not two.sees(*at), False, text)


@st.composite
def by_head(draw: st.DrawFn, inner: st.SearchStrategy[Case]) -> Case:
    each = draw(st.lists(inner.filter(lambda case: len(case.mask.batch) < 2), min_size=HEADS, max_size=HEADS))

    def sees(q: int, k: int, b: int, h: int) -> bool:
        return each[h].sees(q, k, b, 0)

    return Case(lt.heads([one.mask for one in each]), sees, False, all(one.text for one in each))


flat = st.recursive(single_masks, joined, max_leaves=5)
cases = st.recursive(st.one_of(flat, flat, by_head(flat)), joined, max_leaves=2)
"""Any mask: with and without arrays, operators, batch rows, heads."""

text_cases = st.recursive(single_masks.filter(lambda case: case.text), joined, max_leaves=5)
"""Masks that can be written as a text."""
