"""FlexAttention's own examples of masks and scores, forward and backward, against torch's eager FlexAttention in float64.

torch's public function raises for gradients on a CPU; its eager formula, which it runs in other places, can be differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from memory import peak_of_arrays
from torch import Tensor
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

import lowtri
from lowtri.backends import formula as tiles
from lowtri.errors import CallError
from lowtri.integrations.flex import create_block_mask, flex_attention
from lowtri.integrations.flex.scores import _at_all, _Steps, read_score_mod
from lowtri.integrations.function_mask import trace

B, H, N, D = 2, 4, 150, 16

IDS = torch.repeat_interleave(torch.arange(3), torch.tensor([20, 80, 50]))
SOURCE = torch.Generator().manual_seed(0)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=SOURCE, dtype=torch.float64, requires_grad=True)


SLOPES, OF_DISTANCE, OF_PAIRS, OF_HEADS, GATE = (
    numbers(H),
    numbers(H, 2 * N),
    numbers(N, N),
    numbers(H, N, N),
    numbers(1),
)

MASKS: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "causal": lambda b, h, q, k: q >= k,
    "sliding window": lambda b, h, q, k: (q >= k) & (q - k <= 30),
    "prefix": lambda b, h, q, k: (k < 40) | (q >= k),
    "documents": lambda b, h, q, k: (q >= k) & (IDS[q] == IDS[k]),
    "by row and head": lambda b, h, q, k: q - k >= 10 * h + 20 * b,  # some queries see no key
}
IN_KERNEL: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "identity": lambda s, b, h, q, k: s,
    "soft cap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    "soft cap, multiplied": lambda s, b, h, q, k: torch.tanh(s * 0.5) * 2.0,
    "tanh": lambda s, b, h, q, k: torch.tanh(s),
    "factor": lambda s, b, h, q, k: s * 1.5 / 0.3,
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "hidden": lambda s, b, h, q, k: torch.where(q < k, -float("inf"), s),
    "hidden by a tensor": lambda s, b, h, q, k: torch.where(q < k, torch.full_like(s, -float("inf")), s),
    "documents, capped": lambda s, b, h, q, k: torch.where(IDS[q] == IDS[k], 3 * torch.tanh(s / 3), -float("inf")),
}
BIASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "relative": (lambda s, b, h, q, k: s + (q - k), []),
    "alibi": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), [SLOPES]),
    "alibi both ways": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs().float(), [SLOPES]),
    "kerple": (lambda s, b, h, q, k: s - SLOPES[h] ** 2 * torch.log(1 + GATE[0] ** 2 * (q - k).abs()), [SLOPES, GATE]),
    "table of distances": (lambda s, b, h, q, k: s + OF_DISTANCE[h, q - k + N], [OF_DISTANCE]),
    "T5's ends": (lambda s, b, h, q, k: s + OF_DISTANCE[h][(q - k).clamp(-3, 3) + 3], [OF_DISTANCE]),
    "by row and head": (lambda s, b, h, q, k: s + SLOPES[h] * (b + 1) * (q - k), [SLOPES]),
    "captured bias": (lambda s, b, h, q, k: s + OF_PAIRS[q, k], [OF_PAIRS]),
    "captured bias, turned": (lambda s, b, h, q, k: s + OF_PAIRS[k, q], [OF_PAIRS]),
    "captured bias by head": (lambda s, b, h, q, k: s + OF_HEADS[h][q, k], [OF_HEADS]),
    "of keys": (lambda s, b, h, q, k: s + OF_PAIRS[b, k], [OF_PAIRS]),
    "of queries": (lambda s, b, h, q, k: s + OF_DISTANCE[h, q] * GATE[0], [OF_DISTANCE, GATE]),
    "two terms": (lambda s, b, h, q, k: s - OF_DISTANCE[h, q - k + N] + 0.5 * (k - q), [OF_DISTANCE]),
    "capped, then biased": (lambda s, b, h, q, k: 3 * torch.tanh(s / 3) + SLOPES[h] * (k - q), [SLOPES]),
    "biased, then doubled": (lambda s, b, h, q, k: 2 * (s * 0.5 + OF_DISTANCE[h, q - k + N]), [OF_DISTANCE]),
    "minus the score": (lambda s, b, h, q, k: SLOPES[h] - s, [SLOPES]),
    "hidden, then biased": (lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf) + GATE[0] * (q - k), [GATE]),
    "-inf added": (lambda s, b, h, q, k: s + torch.where(IDS[q] == IDS[k], 0.0, -math.inf), []),
    "bias or -inf added": (lambda s, b, h, q, k: s + torch.where(q < k, -math.inf, GATE[0] * (q - k)), [GATE]),
}
IN_ONE_INDEX = {  # torch's formula cannot differentiate indices one after another
    "T5's ends": lambda s, b, h, q, k: s + OF_DISTANCE[h, (q - k).clamp(-3, 3) + 3],
    "captured bias by head": lambda s, b, h, q, k: s + OF_HEADS[h, q, k],
}
BY_FORMULA: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "biased, then capped": (lambda s, b, h, q, k: torch.tanh(s + SLOPES[h] * (k - q)), [SLOPES]),
    "a table and a distance": (lambda s, b, h, q, k: s + OF_PAIRS[q, k] + GATE[0] * (q - k), [OF_PAIRS, GATE]),
    "minus a table": (lambda s, b, h, q, k: s - OF_PAIRS[q, k], [OF_PAIRS]),
    "one row of a table for two": (lambda s, b, h, q, k: s + OF_PAIRS[q // 2, k], [OF_PAIRS]),
    "diagonal of a table": (lambda s, b, h, q, k: s + OF_PAIRS[q, q] * (k > 3), [OF_PAIRS]),
    "products of indices": (lambda s, b, h, q, k: s + q * k * 1e-3, []),
    "fractions of indices": (lambda s, b, h, q, k: s + (q * 0.1 - k * 0.1), []),  # rounds at every index
    "gate": (lambda s, b, h, q, k: torch.where(q >= k, s * GATE[0] + b, -float("inf")), [GATE]),
    "learned cap": (lambda s, b, h, q, k: GATE[0] * torch.tanh(s / GATE[0]), [GATE]),
    "capped twice": (lambda s, b, h, q, k: torch.tanh(3 * torch.tanh(s)), []),
    "both sides": (lambda s, b, h, q, k: torch.where(q >= k, s, s / 2), []),
    "hidden by score": (lambda s, b, h, q, k: torch.where(s > -1, s, -float("inf")), []),
    "negative cap": (lambda s, b, h, q, k: -2 * torch.tanh(s), []),
}


def qkv(kv_heads: int = 2, n: int = N, dtype: torch.dtype = torch.float64, kv_rows: int = B) -> list[Tensor]:
    source = torch.Generator().manual_seed(1)
    shapes = ((B, H, n, D), (kv_rows, kv_heads, N, D), (kv_rows, kv_heads, N, D))
    return [torch.randn(x, generator=source, dtype=torch.float64).to(dtype).requires_grad_() for x in shapes]


def eager(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, blocks: BlockMask | None) -> tuple[Tensor, Tensor]:
    """torch's eager formula: output and log-sum-exp."""
    blocks = module._create_empty_block_mask(q, k) if blocks is None else blocks
    out, lse, _greatest = math_attention(q, k, v, score_mod or module._identity, blocks.as_tuple(), D**-0.5, {})
    return out, lse * math.log(2)


def agree(score_mod: Any, mask_mod: Any, captured: list[Tensor], torchs: Any = None) -> None:
    """Output, log-sum-exp, and all gradients of both; torch's formula with the function ``torchs``, if it is given."""
    inputs = qkv()
    blocks = None if mask_mod is None else create_block_mask(mask_mod, B, H, N, N, device="cpu")
    ours = flex_attention(*inputs, score_mod, blocks, enable_gqa=True, return_lse=True)
    theirs = eager(*inputs, torchs or score_mod, blocks)
    sees = theirs[1] > -math.inf
    leaves = [*inputs, *captured]
    d_out, d_lse = (torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype) for x in ours)
    grads = [
        torch.autograd.grad([out, lse.masked_fill(~sees, 0)], leaves, [d_out, d_lse * sees], allow_unused=True)
        for out, lse in (ours, theirs)
    ]
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    for x, mine, other in zip(leaves, *grads, strict=True):
        # Where a query sees nothing, torch's formula gives NaN gradients of the log-sum-exp; ours are 0.
        torch.testing.assert_close(mine, other.nan_to_num(0), rtol=1e-9, atol=1e-10, msg=str(x.shape))


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    agree(None, MASKS[name], [])


@pytest.mark.parametrize("name", IN_KERNEL)
def test_scores_that_the_kernels_compute(name: str) -> None:
    assert read_score_mod(IN_KERNEL[name], (B, H, N, N), "cpu").in_kernel
    agree(IN_KERNEL[name], MASKS["sliding window"], [])


@pytest.mark.parametrize("name", BIASES)
def test_biases_that_the_kernels_add(name: str) -> None:
    score_mod, captured = BIASES[name]
    read = read_score_mod(score_mod, (B, H, N, N), "cpu", torch.float64)
    assert read.in_kernel
    if read.bias is not None and "captured" not in name:  # no number for each pair
        bias = read.bias
        assert (bias.values if isinstance(bias, lowtri.DistanceBias) else bias).numel() < B * H * 2 * N
    agree(score_mod, MASKS["documents"], captured, IN_ONE_INDEX.get(name))


def test_a_captured_table_is_read_where_it_lies() -> None:
    for name in ("captured bias", "captured bias, turned"):
        read = read_score_mod(BIASES[name][0], (B, H, N - 9, N), "cpu", torch.float64)
        assert read.bias is not None and isinstance(read.bias, Tensor)
        assert read.bias.data_ptr() == OF_PAIRS.data_ptr() and read.bias.shape == (1, 1, N - 9, N)


@pytest.mark.parametrize("name", BY_FORMULA)
def test_scores_by_the_tiled_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_SCORES_IN_TILE", 64 * N)  # three tiles instead of one
    score_mod, captured = BY_FORMULA[name]
    assert not read_score_mod(score_mod, (B, H, N, N), "cpu").in_kernel
    agree(score_mod, MASKS["documents"], captured)


@pytest.mark.parametrize("mask", ["none", "by row and head"])
@pytest.mark.parametrize("score", ["alibi", "gate"])
def test_scores_with_other_masks(mask: str, score: str) -> None:
    score_mod, captured = {**BIASES, **BY_FORMULA}[score]
    agree(score_mod, MASKS[mask], captured)


def test_a_mask_in_the_score_is_a_mask() -> None:
    """So that hidden tiles are skipped, also where the formula computes the rest."""
    for name, score_mod in (("causal", IN_KERNEL["causal"]), ("gate", BY_FORMULA["gate"][0])):
        mask = read_score_mod(score_mod, (B, H, N, N), "cpu").mask
        assert mask is not None and mask.tile(0, 10, 10, 20) == lowtri.Tile.EMPTY, name
        assert mask is read_score_mod(score_mod, (B, H, N, N), "cpu").mask, "kept for the next call"


cap = 5.0


def test_a_function_of_a_variable_is_read_again() -> None:
    global cap
    inputs = [x.detach() for x in qkv()]

    def capped(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return cap * torch.tanh(s / cap)

    for cap in (5.0, 0.5):
        assert read_score_mod(capped, (B, H, N, N), "cpu").softcap == cap
        expected = lowtri.attention(*inputs, "full", softcap=cap)
        torch.testing.assert_close(flex_attention(*inputs, capped, enable_gqa=True), expected)


def test_a_function_with_hidden_state_is_compared_with_what_was_read() -> None:
    """A list may change without a trace of it; then the function itself runs."""
    state = [0.0]
    inputs = [x.detach() for x in qkv()]

    def shifted(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + state[0] * h if state[0] else s

    for state[0] in (0.0, 2.0):
        ours = flex_attention(*inputs, shifted, enable_gqa=True)
        torch.testing.assert_close(ours, eager(*inputs, shifted, None)[0], rtol=1e-9, atol=1e-11)


def test_what_changes_unseen_by_torch_is_read_again() -> None:
    """Memory that a captured tensor shares with NumPy changes without torch's counter of changes."""
    q = torch.randn(1, 4, 40, 16)
    slopes, factor = torch.rand(4), torch.tensor(2.0)
    for score_mod in (
        lambda s, b, h, i, j: s + slopes[h] * (j - i),
        lambda s, b, h, i, j: s + factor * (j - i),
        lambda s, b, h, i, j: s * float(factor),
    ):
        before = flex_attention(q, q, q, score_mod)
        slopes.numpy()[:] += 1
        factor.numpy()[...] += 1
        n = torch.arange(40)
        scores = score_mod(q @ q.mT / 4, None, torch.arange(4)[:, None, None], n[:, None], n)
        after, expected = flex_attention(q, q, q, score_mod), scores.softmax(-1) @ q
        assert not torch.allclose(before, after) and torch.allclose(after, expected, atol=1e-5)


TABLE, ROW, HALF = torch.randn(4, 81), torch.randn(40), torch.randn(4).bfloat16()
OF_NUMBERS: dict[
    str, Any
] = {  # of pairs, of distances, of keys; with types that are promoted as those of single numbers
    "slopes": lambda s, b, h, q, k: s + TABLE[h, 0] * (k - q),
    "half slopes": lambda s, b, h, q, k: s + HALF[h] * (k - q).abs(),
    "table of distances": lambda s, b, h, q, k: s + TABLE[h, q - k + 40],
    "row, then column": lambda s, b, h, q, k: s + TABLE[h][k],
    "keys": lambda s, b, h, q, k: s + ROW[k] / 3,
    "whole division": lambda s, b, h, q, k: s - (q - k) // 3 * 0.25,
    "chosen": lambda s, b, h, q, k: s + torch.where(k > 7, ROW[0], 2.0),
    "more than numbers": lambda s, b, h, q, k: s + ROW[:4].sum() * torch.stack([h, h])[0],
    "two": lambda s, b, h, q, k: s + ROW[k] - TABLE[h, 3] * 2 + b,
}


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_a_bias_is_that_of_single_numbers(name: str) -> None:
    """For all indices at once, by broadcasting or under torch.vmap, it has the numbers and the dtype of one index after another."""
    result = trace(OF_NUMBERS[name], "cpu", of_score=True)
    assert result is not None
    ranges = [torch.arange(n) for n in (2, 4, 5, 6)]
    for _, node in _Steps(result).terms:
        at_all = _at_all(node, ranges)
        each = [node.of_indices(*map(torch.tensor, index)) for index in np.ndindex(2, 4, 5, 6)]
        assert at_all.dtype == each[0].dtype
        torch.testing.assert_close(at_all.expand(2, 4, 5, 6).flatten(), torch.stack(each), rtol=0, atol=0)


def test_a_function_that_changes_its_scores_in_place_is_read_right() -> None:
    inputs = qkv(n=40)

    def doubled(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        score *= 2
        return score

    ours = flex_attention(*inputs, doubled, enable_gqa=True)
    expected = flex_attention(*inputs, lambda s, b, h, q, k: s * 2, enable_gqa=True)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


def test_more_keys_than_queries_count_indices_from_0() -> None:
    inputs = qkv(n=40)
    blocks = create_block_mask(MASKS["causal"], None, None, 40, N, device="cpu")
    for score_mod in (None, BIASES["alibi"][0], BY_FORMULA["gate"][0]):
        ours = flex_attention(*inputs, score_mod, blocks, enable_gqa=True)
        torch.testing.assert_close(ours, eager(*inputs, score_mod, blocks)[0], rtol=1e-9, atol=1e-11)


def test_one_row_of_keys_for_all_queries() -> None:
    inputs = qkv(kv_rows=1)
    blocks = create_block_mask(MASKS["by row and head"], B, H, N, N, device="cpu")
    ours, theirs = flex_attention(*inputs, None, blocks, enable_gqa=True), eager(*inputs, None, blocks)[0]
    grads = [torch.autograd.grad(x.square().sum(), inputs) for x in (ours, theirs)]
    torch.testing.assert_close([ours, *grads[0]], [theirs, *grads[1]], rtol=1e-9, atol=1e-10)


def test_results_by_request() -> None:
    inputs = [x.detach() for x in qkv()]
    output, lse = flex_attention(*inputs, enable_gqa=True, return_lse=True)
    alone, auxiliary = flex_attention(*inputs, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert torch.equal(output, alone) and torch.equal(lse, auxiliary.lse) and auxiliary.max_scores is None
    for options in ({"return_aux": AuxRequest()}, {"kernel_options": {"BLOCK_M": 64}}):
        found = flex_attention(*inputs, enable_gqa=True, **options)
        torch.testing.assert_close(found[0] if "return_aux" in options else found, output)


def test_one_row_of_keys_needs_a_block_mask_for_every_row() -> None:
    """As in torch, which takes a block mask of one row where keys and values have as many rows as the queries."""
    inputs = [x.detach() for x in qkv(kv_rows=1)]
    for rows in (None, 1):
        one = create_block_mask(lambda b, h, q, k: q >= k, rows, None, N, N, device="cpu")
        with pytest.raises(CallError, match=rf"query has {B} batch rows and key 1\.\nFix: .* made with B={B}"):
            flex_attention(*inputs, block_mask=one, enable_gqa=True)
        with pytest.raises(ValueError, match="block_mask and query to have the same batch size"):
            module.flex_attention(*inputs, block_mask=one, enable_gqa=True)
        expanded = [x.expand(B, -1, -1, -1) for x in inputs]
        assert flex_attention(*expanded, block_mask=one, enable_gqa=True).shape == inputs[0].shape


@pytest.mark.parametrize("score", [None, BIASES["alibi"][0], BY_FORMULA["learned cap"][0]])
def test_numbers_hidden_from_a_query_do_not_reach_it(score: Any) -> None:
    """Two documents, the second of NaN, forward and backward."""
    q, k, v = (x.detach() for x in qkv())
    blocks = create_block_mask(lambda b, h, q, k: (q < 70) == (k < 70), None, None, N, N, device="cpu")
    found = []
    for filler in (0.0, math.nan):
        inputs = [x.clone() for x in (q, k, v)]
        for x in inputs:
            x[:, :, 70:] = filler
            x.requires_grad_()
        output = flex_attention(*inputs, score, blocks, enable_gqa=True)[:, :, :70]
        grads = torch.autograd.grad(output.square().sum(), inputs)
        found.append([output, *(x[:, :, :70] for x in grads)])
    assert all(x.isfinite().all() for x in found[1])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)


def test_compiled_and_under_autocast() -> None:
    inputs = [x.detach() for x in qkv(dtype=torch.float32)]  # torch warns about gradients of tensors between two graphs
    blocks = create_block_mask(MASKS["causal"], None, None, N, N, device="cpu")
    expected = flex_attention(*inputs, None, blocks, enable_gqa=True)
    compiled = torch.compile(
        lambda q, k, v: flex_attention(q, k, v, None, blocks, enable_gqa=True) * 2, backend="eager"
    )
    torch.testing.assert_close(compiled(*inputs), expected * 2)
    torch.testing.assert_close(
        torch.compile(flex_attention, backend="eager")(*inputs, None, blocks, enable_gqa=True), expected
    )
    with torch.autocast("cpu", torch.bfloat16):
        for score_mod in (None, BIASES["relative"][0], BY_FORMULA["gate"][0]):
            assert flex_attention(*inputs, score_mod, blocks, enable_gqa=True).dtype == torch.bfloat16


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("n", "name", "most"),
    [(4096, "formula", 250), (16_384, "bias", 100)],  # one array of scores of the 4 heads has 268 MB, and 4 GB
)
def test_the_memory_grows_with_the_tile(n: int, name: str, most: int) -> None:
    """Forward and the gradient of a captured parameter; the kernels with a bias over distances, and the tiled formula."""
    slopes = torch.rand(4, requires_grad=True)
    functions: dict[str, Callable[..., Any]] = {
        "bias": lambda s, b, h, q, k: s + slopes[h] * (k - q),
        "formula": lambda s, b, h, q, k: s * slopes[h] + (k - q),
    }

    def run(n: int) -> None:
        q, k, v = (torch.randn(1, 4, n, D, requires_grad=True) for _ in "qkv")
        blocks = create_block_mask(MASKS["causal"], None, None, n, n, device="cpu")
        flex_attention(q, k, v, functions[name], blocks).square().sum().backward()

    run(2048)  # loads and compiles what it needs
    assert peak_of_arrays(lambda: run(n)) < most * 2**20
    assert slopes.grad is not None and slopes.grad.isfinite().all()
