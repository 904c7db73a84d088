"""FlexAttention called wrongly: errors name the argument and the fix, where torch's tracing would raise something else."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, and_masks

import lowtri
from lowtri.errors import CallError
from lowtri.integrations.flex import block_mask, create_block_mask, flex_attention
from lowtri.integrations.flex.masks import function_mask
from lowtri.integrations.function_mask import bounds_of, trace
from lowtri.masks.tile import Interval

Q, K = torch.ones(1, 2, 5, 8), torch.ones(1, 2, 7, 8)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


SCORES: dict[str, tuple[Any, str]] = {
    "a block mask": (
        create_block_mask(causal, None, None, 5, 7, device="cpu"),
        "score_mod is BlockMask. Fix: block_mask=",
    ),
    "a mask_mod": (causal, r"score_mod takes \(b.*called with \(score, b, h, q, k\)\. Fix: create_block_mask"),
    "text": ("causal", r"score_mod is str\. Fix: a function score_mod\(score, b, h, q, k\)"),
    "too many": (lambda s, b, h, q, k, x: s, r"score_mod takes .*Fix: score_mod\(score"),
    "no result": (lambda s, b, h, q, k: None, "score_mod gives NoneType. Fix: a tensor"),
    "a number": (lambda s, b, h, q, k: 0.0, "score_mod gives float. Fix: a tensor"),
    "a condition": (lambda s, b, h, q, k: q >= k, r"score_mod gives torch.bool.*Fix: torch.where"),
    "a branch": (lambda s, b, h, q, k: s if q > k else -s, r"score_mod reads the value(.|\n)*Fix: torch.where"),
}


@pytest.mark.parametrize("name", SCORES)
def test_score_mods(name):
    score_mod, words = SCORES[name]
    with pytest.raises(CallError, match=words):
        flex_attention(Q, K, K, score_mod)


MASKS: dict[str, tuple[Any, str]] = {
    "text": ("causal", "mask_mod is str. Fix: lowtri.integrations.flex.block_mask"),
    "a lowtri mask": (lowtri.causal(), "mask_mod is Band. Fix: lowtri.integrations.flex.block_mask"),
    "a table": (torch.ones(5, 7) > 0, r"mask_mod is Tensor\. Fix: a function mask_mod\(b, h, q, k\)"),
    "too few": (lambda b, q, k: q >= k, r"mask_mod takes \(b, q, k\).*Fix: mask_mod\(b, h, q, k\)"),
    "True": (lambda b, h, q, k: True, "mask_mod gives bool. Fix: a tensor"),
    "and": (lambda b, h, q, k: q >= k and k > 1, r"mask_mod reads the value(.|\n)*Fix: torch.where"),
    "a list": (lambda b, h, q, k: [0, 1, 2, 3, 4][q] >= k, r"mask_mod reads the value(.|\n)*tensors in place of lists"),
}


@pytest.mark.parametrize("name", MASKS)
def test_mask_mods(name):
    mask_mod, words = MASKS[name]
    with pytest.raises(CallError, match=words):
        create_block_mask(mask_mod, None, None, 5, 7, device="cpu")


def test_errors_of_the_function_are_its_own():
    with pytest.raises(ZeroDivisionError):
        flex_attention(Q, K, K, lambda s, b, h, q, k: s + 1 / 0)


@pytest.mark.parametrize("size", [0, -64, "128", None, (64, 64, 64), (64, 0)])
def test_block_sizes(size):
    with pytest.raises(CallError, match=r"BLOCK_SIZE is .*Fix: queries and keys in a block"):
        create_block_mask(causal, None, None, 5, 7, device="cpu", BLOCK_SIZE=size)


def test_devices():
    with pytest.raises(CallError, match=r"create_block_mask: torch cannot use the device 'no'.*Fix: device=\"cpu\""):
        create_block_mask(causal, None, None, 5, 7, device="no")
    with pytest.raises(CallError, match=r"block_mask: torch cannot use the device 'no'.*Fix: device=\"cpu\""):
        block_mask("causal", 5, device="no")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": "1"}, r"scale is str.*Fix: float\(scale\)"),
        ({"scale": torch.tensor(1.0, requires_grad=True)}, r"scale is Tensor.*Fix: float\(scale\)"),
        ({"return_aux": True}, r"return_aux is bool\. Fix: AuxRequest\(lse=True\)"),
        ({"return_aux": AuxRequest(max_scores=True)}, r"return_aux asks for max_scores, .*Fix: AuxRequest\(lse=True\)"),
        ({"return_aux": AuxRequest(lse=True), "return_lse": True}, "return_lse and return_aux exclude each other"),
        ({"query": torch.ones(1, 4, 5, 8)}, "4 query heads and 2 key heads. Fix: enable_gqa=True"),
        ({"query": Q[0]}, r"query \(2, 5, 8\).*Fix: x\[None\]"),
        ({"query": Q.expand(3, 2, 5, 8)}, "query has 3 batch rows and key 1"),
        ({"block_mask": "causal"}, r"block_mask is str.*\nFix: create_block_mask"),
        ({"block_mask": lowtri.causal()}, r"(.|\n)*flex.block_mask for a mask of lowtri"),
        ({"query": Q[..., :0], "key": K[..., :0]}, r"query is \(1, 2, 5, 0\).*Fix: the same head size"),
        ({"key": K[..., :4]}, r".*key \(1, 2, 7, 4\)\. Fix: the same head size"),
    ],
)
def test_numbers_and_sizes(options, words):
    with pytest.raises(CallError, match=f"flex_attention: {words}"):
        flex_attention(**{"query": Q, "key": K, "value": K, **options})


EDGES = torch.tensor([0, 20, 40, 60])


@pytest.mark.parametrize(
    "fn",
    [
        lambda b, h, q, k: (q * 0.1) * 10 == q,  # floats round
        lambda b, h, q, k: q * 2**60 >= k,  # int64 wraps between the ends of a tile
        lambda b, h, q, k: k <= q + torch.iinfo(torch.int64).max,
        lambda b, h, q, k: q.int() <= 2**62,  # compared as integers of 32 bits
        lambda b, h, q, k: q * torch.tensor(3, dtype=torch.uint8) >= k,
        lambda b, h, q, k: torch.searchsorted(EDGES, q, sorter=torch.arange(4)) > k,  # a tensor among named arguments
    ],
)
def test_what_a_trace_says_of_a_tile_holds_for_its_pairs(fn):
    traced, mask, n = trace(fn, "cpu"), function_mask(fn, (1, 1, 64, 64), "cpu"), 8
    assert traced is not None
    visible = mask(np.arange(64)[:, None], np.arange(64)[None])
    for q, k in np.ndindex(64 - n, 64 - n):
        edges = (Interval(np.array([i]), np.array([i + n - 1])) for i in (q, k))
        says, pairs = bounds_of(traced, *edges), visible[q : q + n, k : k + n]
        assert pairs.all() or not np.all(says.every)
        assert not pairs.any() or np.all(says.some)


@pytest.mark.parametrize(
    ("fn", "empty"),
    [
        (lambda b, h, q, k: (q >= k) * (q - k < 8), True),  # products, and the larger of two: conditions as numbers
        (lambda b, h, q, k: torch.minimum(q >= k, q - k < 8), True),
        (lambda b, h, q, k: EDGES[None][0, q // 20] == EDGES[None][0, k // 20], True),  # a number among the indices
        (lambda b, h, q, k: torch.where(q % 2 == 0, q >= k, k <= q), True),
        (lambda b, h, q, k: q + (2**63 - 20) >= k, False),  # Python's numbers may be greater than those of arrays
        (lambda b, h, q, k: torch.stack([q, k])[0] >= q.new_full((), 0), False),
    ],
)
def test_tiles_are_decided_without_evaluating_pairs(fn, empty):
    mask = function_mask(fn, (1, 1, 64, 64), "cpu")
    assert mask.batch == () and (mask.tile(0, 16, 40, 64) == lowtri.Tile.EMPTY) == empty


def test_numbers_read_from_lists_of_indices_decide_nothing():
    assert trace(lambda b, h, q, k: torch.tensor([q, k])[0] >= 0, "cpu") is None
    assert trace(lambda b, h, q, k: q.new_tensor([k])[0] >= 0, "cpu") is None
    assert trace(lambda b, h, q, k: torch.tensor([1, 2])[0] <= q, "cpu") is not None


class Reader:
    ids, n = torch.arange(64) // 20, 3

    def same(self, b, h, q, k):
        return (self.ids[q] == self.ids[k]) & (q - k < self.n)


@pytest.mark.parametrize("name", ["function", "both", "partial", "method"])
def test_a_trace_is_kept_and_knows_what_its_arrays_hold(name):
    reader, ids = Reader(), Reader.ids.clone()
    reader.ids, near = ids, partial(lambda n, b, h, q, k: q - k < n, 9)
    fn = {
        "function": lambda b, h, q, k: near(b, h, q, k) & (ids[q] == ids[k]),
        "both": and_masks(lambda b, h, q, k: q - k < 9, lambda b, h, q, k: ids[q] == ids[k]),
        "partial": partial(lambda n, b, h, q, k: (q - k < n) & (ids[q] == ids[k]), 9),
        "method": reader.same,
    }[name]
    first = trace(fn, "cpu")
    assert first is not None and trace(fn, "cpu") is first
    before = first.content()
    assert before == first.content() and None not in before
    ids.numpy()[:] = 0
    assert trace(fn, "cpu") is first and first.content() != before
    reader.n = 20
    assert (trace(fn, "cpu") is first) == (name != "method")
