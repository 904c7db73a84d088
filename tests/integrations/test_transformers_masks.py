"""The mask functions of transformers as lowtri masks: the same pairs as its own tables, and no table on the way."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import masking_utils as theirs

import lowtri
from lowtri.errors import CallError
from lowtri.integrations.dense_mask import LazyMask
from lowtri.integrations.function_mask import FunctionMask
from lowtri.integrations.transformers import masks as transformers_masks
from lowtri.integrations.transformers.lazy import LazyMaskTensor
from lowtri.integrations.transformers.masks import RemappedMask, ShiftedMask, make_mask, read_function
from lowtri.masks import EMPTY, FULL, PARTIAL, causal, chunks, full, window
from lowtri.masks.arrays import FrozenArray
from lowtri.masks.plan import plan

ROWS, PLACES = 2, 14


def labels(draw: st.DrawFn, least: int = 0) -> torch.Tensor:
    row = st.lists(st.integers(least, 3), min_size=PLACES, max_size=PLACES)
    return torch.tensor(draw(st.lists(row, min_size=ROWS, max_size=ROWS)))


@st.composite
def functions(draw: st.DrawFn, depth: int = 2) -> Callable[..., Any]:
    """Mask functions as transformers builds them, joined by "and" and "or"."""
    kind = draw(
        st.sampled_from(("causal", "full", "newest", "around", "chunked", "padding", "packed", "blocks", "own", "join"))
    )
    n = draw(st.integers(1, 6))
    if kind == "join" and depth:
        parts = draw(st.lists(functions(depth=depth - 1), min_size=1, max_size=3))
        return draw(st.sampled_from((theirs.and_masks, theirs.or_masks)))(*parts)
    if kind == "packed":
        places = torch.cat([torch.arange(n), torch.arange(PLACES - n)]).expand(ROWS, -1)
        inner = draw(functions(depth=0))
        ids = theirs.find_packed_sequence_indices(places)
        ids = torch.zeros_like(places) if ids is None else ids
        packed = theirs.packed_sequence_mask_function(ids)
        return theirs.and_masks(packed, theirs.remap_positions_for_packed_sequence(inner, places))
    made = {
        "full": lambda: theirs.bidirectional_mask_function,
        "newest": lambda: theirs.sliding_window_overlay(n),
        "around": lambda: theirs.sliding_window_bidirectional_overlay(n),
        "chunked": lambda: theirs.chunked_overlay(n, torch.tensor([draw(st.integers(0, 9)) for _ in range(ROWS)])),
        "padding": lambda: theirs.padding_mask_function(labels(draw) > 0),
        "blocks": lambda: theirs.blockwise_overlay(labels(draw, -1)),
        "own": lambda: lambda b, h, q, k: (q + 2 * k + b) % (n + 1) > 0,
    }
    return made.get(kind, lambda: theirs.causal_mask_function)()


@settings(deadline=None, max_examples=150)
@given(fn=functions(), data=st.data())
def test_every_function_gives_the_pairs_that_transformers_gives(fn: Callable[..., Any], data: st.DataObject) -> None:
    k0, q0 = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 8))
    nq, nk = data.draw(st.integers(1, PLACES - q0)), data.draw(st.integers(1, PLACES - k0))
    valid = data.draw(
        st.none() | st.builds(lambda n: torch.arange(k0 + nk) >= torch.tensor([[n], [0]]), st.integers(0, 4))
    )
    if valid is not None and data.draw(st.booleans()):
        valid = valid[:, : data.draw(st.integers(1, k0 + nk))]  # shorter than the keys, as beside a static cache
    sizes: dict[str, Any] = {"batch_size": ROWS, "q_length": nq, "kv_length": nk, "q_offset": q0, "kv_offset": k0}
    sizes |= {"mask_function": fn, "attention_mask": valid, "use_vmap": data.draw(st.booleans())}
    expected = theirs.sdpa_mask(**sizes, allow_is_causal_skip=False)
    tensor = make_mask(**sizes)
    assert isinstance(tensor, LazyMaskTensor) and tensor.dtype == torch.bool
    assert tensor.shape == expected.shape
    assert torch.equal(tensor.materialize(), expected)
    assert tensor.lazy.nk == nk and tensor.lazy.nq == nq
    trimmed = tensor.lazy.trimmed  # what was cut off was seen by nobody
    assert (
        not tensor.lazy.table()[..., : trimmed.k0 - k0].any()
        and not tensor.lazy.table()[..., trimmed.k0 - k0 + trimmed.nk :].any()
    )


@settings(deadline=None, max_examples=80)
@given(fn=functions(), edges=st.lists(st.integers(0, PLACES), min_size=4, max_size=4))
def test_tiles_never_lie(fn: Callable[..., Any], edges: list[int]) -> None:
    mask = read_function(fn, ROWS)
    (q0, q1), (k0, k1) = sorted(edges[:2]), sorted(edges[2:])
    pairs = np.broadcast_to(mask.dense(PLACES), (ROWS, PLACES, PLACES))[:, q0:q1, k0:k1]
    answers = np.broadcast_to(mask.tile(q0, q1, k0, k1), (ROWS,))
    for answer, seen in zip(answers, pairs, strict=True):
        assert answer != EMPTY or not seen.any()
        assert answer != FULL or (seen.all() and seen.size)


KNOWN = {
    "causal": (theirs.causal_mask_function, causal()),
    "bidirectional": (theirs.bidirectional_mask_function, full()),
    "sliding": (theirs.sliding_window_causal_mask_function(4), window(4)),
    "sliding by a tensor": (theirs.sliding_window_causal_mask_function(torch.tensor(4)), window(4)),
    "sliding both ways": (theirs.sliding_window_bidirectional_mask_function(4), lowtri.band(4, 4)),
    "chunked": (theirs.chunked_causal_mask_function(4, torch.zeros(2, dtype=int)), chunks(4) & causal()),
    "chunked after pads": (theirs.chunked_overlay(4, torch.tensor([1, 4])), ShiftedMask(chunks(4), (3, 0))),
    "padding": (
        theirs.padding_mask_function(torch.tensor([[0, 1], [1, 1]])),
        lowtri.keys([[False, True], [True, True]]),
    ),
    "no padding": (theirs.padding_mask_function(torch.ones(2, 5)), full()),
    "packed": (theirs.packed_sequence_mask_function(torch.tensor([[0, 0, 1]])), lowtri.documents([0, 0, 1])),
    "blocks": (
        theirs.blockwise_overlay(torch.tensor([[-1, 0, 0]])),
        lowtri.documents([-1, 0, 0]) & lowtri.keys([False, True, True]),
    ),
    "remapped": (
        theirs.remap_positions_for_packed_sequence(theirs.causal_mask_function, torch.tensor([[0, 1, 0]])),
        RemappedMask(causal(), FrozenArray(np.array([0, 1, 0]))),
    ),
    "prefix": (theirs.or_masks(theirs.causal_mask_function, theirs.sliding_window_overlay(1)), None),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_functions_become_formulas(name: str) -> None:
    fn, expected = KNOWN[name]
    mask = read_function(fn, 2)
    assert "function(<" not in repr(mask)
    assert expected is None or mask == expected
    assert hash(mask) == hash(read_function(fn, 2))  # equal masks share one plan


def test_a_function_that_changed_its_meaning_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    def wider(sliding_window: int) -> Callable[..., Any]:
        def inner_mask(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
            return kv_idx >= q_idx - sliding_window  # one more than before

        return inner_mask

    def renamed(sliding_window: int) -> Callable[..., Any]:
        size = sliding_window
        return lambda b, h, q, k: k > q - size

    for other, sees in ((wider, 4), (renamed, 3)):
        monkeypatch.setattr(theirs, "sliding_window_overlay", other)
        transformers_masks._known.cache_clear()
        mask = read_function(other(3))
        assert isinstance(mask, FunctionMask) and mask.dense(9)[8].sum() == sees
    monkeypatch.undo()
    transformers_masks._known.cache_clear()


def test_unknown_functions_are_evaluated_only_in_tiles_that_other_masks_leave_open() -> None:
    asked: list[torch.Tensor] = []

    def own(b: Any, h: Any, q: Any, k: Any) -> Any:
        if q.ndim:  # not while it is traced
            asked.append(torch.stack(torch.broadcast_tensors(q, k)))
        return (q + k) % 3 > 0

    mask = read_function(theirs.and_masks(theirs.sliding_window_causal_mask_function(64), own))
    planned = plan(mask, np.arange(1024), np.arange(1024))
    pairs = torch.cat([x.flatten(1) for x in asked], 1)
    assert pairs.shape[1] < 1024 * 1024 / 4  # the tiles along the diagonal, and no others
    q, k = np.arange(1024)[:, None], np.arange(1024)
    assert np.array_equal(planned.dense(), (k <= q) & (k > q - 64) & ((q + k) % 3 > 0))


def test_unknown_functions_of_indices_decide_whole_tiles() -> None:
    """A prefix that grows by rows: neither the tiles below the diagonal nor those above are evaluated."""
    lengths, pairs = torch.tensor([1000, 3000]), 0

    def prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
        nonlocal pairs
        pairs += max(q.numel(), k.numel()) if q.ndim else 0
        return (k < lengths[b]) | (k <= q)

    mask = read_function(prefix, 2)
    assert mask.tile(0, 1000, 3000, 4096).tolist() == [EMPTY, EMPTY]
    assert mask.tile(0, 1000, 0, 3000).tolist() == [PARTIAL, FULL]
    planned = plan(mask, np.arange(4096), np.arange(4096))
    assert pairs < 2 * 4096 * 4096 / 16  # of two rows, the tiles at the boundary
    q, k = np.arange(4096)[:, None], np.arange(4096)
    tables = [(k < length) | (k <= q) for length in lengths.tolist()]
    assert np.array_equal(planned.dense(), tables[0])
    assert planned.mask_pairs == tuple(int(table.sum()) for table in tables)


def test_no_table_on_the_way() -> None:
    n = 1_000_000
    valid = torch.ones(2, n, dtype=torch.bool)
    valid[0, :5] = False
    tracemalloc.start()
    tensor = make_mask(2, n, n, mask_function=theirs.sliding_window_causal_mask_function(4096), attention_mask=valid)
    part = tensor[:, :, -3:, n - 10 :]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert tensor.shape == (2, 1, n, n) and part.shape == (2, 1, 3, 10)
    assert peak < 50 * n  # some copies of the padding, and nothing of n x n
    assert part.lazy.mask(n - 1, np.array([n - 4097, n - 4096])).tolist() == [[False, True], [False, True]]


def test_one_new_token_costs_no_table_over_the_cache() -> None:
    tracemalloc.start()
    tensor = make_mask(8, 1, 1_000_000, q_offset=999_999, mask_function=theirs.causal_mask_function)
    assert tensor.lazy.positions == {} and tensor.lazy.trimmed is tensor.lazy
    assert tracemalloc.get_traced_memory()[1] < 10_000
    tracemalloc.stop()


SEEN = LazyMask(causal(), 3, 4, 0, 7)
OPERATIONS: dict[str, tuple[Callable[[Any], Any], bool]] = {  # and whether it stays a mask without a table
    "queries": (lambda x: x[:, :, 1:3], True),
    "last query": (lambda x: x[:, :, -1:, :], True),
    "keys": (lambda x: x[..., :5], True),
    "rows": (lambda x: x[:1], True),
    "heads": (lambda x: x.expand(-1, 4, -1, -1), True),
    "detach": (lambda x: x.detach(), True),
    "clone": (lambda x: x.clone(), True),
    "to": (lambda x: x.to("cpu"), True),
    "bool": (lambda x: x.to(torch.bool), True),
    "every other": (lambda x: x[:, :, ::2], False),
    "one head": (lambda x: x[:, 0], False),
    "and": (lambda x: x & torch.ones(7, dtype=torch.bool), False),
    "not": (lambda x: ~x, False),
    "all": (lambda x: x.all(-1), False),
    "cat": (lambda x: torch.cat([x, x], -1), False),
    "pad": (lambda x: torch.nn.functional.pad(x, (0, 2)), False),
    "where": (lambda x: torch.where(x, 0.0, -1.0), False),
    "fill": (lambda x: torch.zeros(2, 1, 4, 7).masked_fill(x, 1.0), False),
    "long": (lambda x: x.long(), False),
    "repeat": (lambda x: x.repeat_interleave(2, 0), False),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_models_do_to_a_mask(name: str) -> None:
    operation, stays = OPERATIONS[name]
    tensor = LazyMaskTensor(SEEN, (2, 1, 4, 7), "cpu")
    expected, result = operation(tensor.materialize()), operation(tensor)
    assert isinstance(result, LazyMaskTensor) == stays
    assert torch.equal(result.materialize() if stays else result, expected)


def test_the_table_of_a_function_that_is_evaluated() -> None:
    def in_chunks(b: Any, h: Any, q: Any, k: Any) -> Any:  # torch.div of mapped places does not run inside an operation
        return torch.div(q, 4, rounding_mode="trunc") >= torch.div(k, 4, rounding_mode="trunc")

    both = theirs.and_masks(theirs.causal_mask_function, in_chunks)
    expected = theirs.sdpa_mask(2, 9, 9, mask_function=both, use_vmap=True, allow_is_causal_skip=False)
    assert torch.equal(~make_mask(2, 9, 9, mask_function=both, use_vmap=True), ~expected)


def test_a_mask_that_differs_by_row_keeps_its_rows() -> None:
    seen = LazyMask(lowtri.keys([[True, False], [True, True]]), 0, 2, 0, 2)
    tensor = LazyMaskTensor(seen, (2, 1, 2, 2), "cpu")
    assert torch.equal(tensor[1:], tensor.materialize()[1:])
    assert not isinstance(tensor[1:], LazyMaskTensor)


@pytest.mark.parametrize(
    "sum_", [lambda x, s: s + x, lambda x, s: s - x, lambda x, s: s.add_(x), lambda x, s: s + x.float()]
)
def test_adding_a_mask_to_scores_is_rejected(sum_: Callable[..., Any]) -> None:
    tensor = LazyMaskTensor(SEEN, (1, 1, 4, 7), "cpu")
    with pytest.raises(
        CallError,
        match=r"(?s)adds its boolean mask to the scores.*does not reach.*Fix: attn_implementation",
    ):
        sum_(tensor, torch.zeros(1, 4, 4, 7))


def test_repr() -> None:
    assert (
        repr(LazyMaskTensor(SEEN, (2, 1, 4, 7), "cpu"))
        == "LazyMaskTensor((2, 1, 4, 7), causal, queries from 3, keys from 0)"
    )
    assert repr(ShiftedMask(chunks(4), (1, 2))) == "shifted(chunks(4), [1, 2])"
    assert repr(read_function(len)) == "function(<len>)"
    assert repr(KNOWN["remapped"][1]).startswith("moved(causal, <3 int64")


def test_trimming_finds_both_ends() -> None:
    seen = LazyMask(window(16), 500, 1, 0, 1000)
    assert (seen.trimmed.k0, seen.trimmed.nk) == (485, 16)
    assert seen.trimmed.trimmed is seen.trimmed
    assert window(16).tile(500, 501, 485, 501) == FULL and window(16).tile(500, 501, 484, 501) == PARTIAL
    nothing = LazyMask(causal(), 2, 1, 5, 4)
    assert nothing.trimmed is nothing
