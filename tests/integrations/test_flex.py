"""FlexAttention's own examples of masks and scores, forward and backward, against torch's eager FlexAttention in float64.

torch's public function raises for gradients on a CPU; its eager formula, which it runs in other places, can be differentiated.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

import lowtri
from lowtri.backends.formula import tiles
from lowtri.errors import CallError
from lowtri.integrations.flex import create_block_mask, flex_attention
from lowtri.integrations.flex_scores import read_score_mod

B, H, N, D = 2, 4, 150, 16

IDS = torch.repeat_interleave(torch.arange(3), torch.tensor([20, 80, 50]))
SOURCE = torch.Generator().manual_seed(0)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=SOURCE, dtype=torch.float64, requires_grad=True)


SLOPES, OF_DISTANCE, OF_PAIRS, GATE = numbers(H), numbers(H, 2 * N), numbers(N, N), numbers(1)

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
    "documents, capped": lambda s, b, h, q, k: torch.where(IDS[q] == IDS[k], 3 * torch.tanh(s / 3), -float("inf")),
}
BY_FORMULA: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "relative": (lambda s, b, h, q, k: s + (q - k), []),
    "alibi": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), [SLOPES]),
    "table of distances": (lambda s, b, h, q, k: s + OF_DISTANCE[h, q - k + N], [OF_DISTANCE]),
    "captured bias": (lambda s, b, h, q, k: s + OF_PAIRS[q, k], [OF_PAIRS]),
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
    out, lse, _ = math_attention(q, k, v, score_mod or module._identity, blocks.as_tuple(), D**-0.5, {})
    return out, lse * math.log(2)


def agree(score_mod: Any, mask_mod: Any, captured: list[Tensor]) -> None:
    """Output, log-sum-exp, and all gradients of both."""
    inputs = qkv()
    blocks = None if mask_mod is None else create_block_mask(mask_mod, B, H, N, N, device="cpu")
    ours = flex_attention(*inputs, score_mod, blocks, enable_gqa=True, return_lse=True)
    theirs = eager(*inputs, score_mod, blocks)
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


@pytest.mark.parametrize("name", BY_FORMULA)
def test_scores_by_the_tiled_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_SCORES_IN_TILE", 64 * N)  # three tiles instead of one
    score_mod, captured = BY_FORMULA[name]
    assert not read_score_mod(score_mod, (B, H, N, N), "cpu").in_kernel
    agree(score_mod, MASKS["documents"], captured)


@pytest.mark.parametrize("mask", ["none", "by row and head"])
@pytest.mark.parametrize("score", ["alibi", "gate"])
def test_scores_with_other_masks(mask: str, score: str) -> None:
    agree(BY_FORMULA[score][0], MASKS[mask], BY_FORMULA[score][1])


def test_the_public_function_of_torch_gives_the_same() -> None:
    q, k, v = (x.detach() for x in qkv(H))
    blocks = create_block_mask(MASKS["documents"], None, None, N, N, device="cpu")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # return_lse will be removed
        patch.setattr(
            module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True
        )  # the formula, without seconds of compiling
        theirs = module.flex_attention(q, k, v, IN_KERNEL["soft cap"], blocks, scale=0.3, return_lse=True)
    ours = flex_attention(q, k, v, IN_KERNEL["soft cap"], blocks, scale=0.3, return_lse=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


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


def test_more_keys_than_queries_count_indices_from_0() -> None:
    inputs = qkv(n=40)
    blocks = create_block_mask(MASKS["causal"], None, None, 40, N, device="cpu")
    for score_mod in (None, BY_FORMULA["alibi"][0]):
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


@pytest.mark.parametrize("score", [None, BY_FORMULA["alibi"][0]])
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
        for score_mod in (None, BY_FORMULA["relative"][0]):
            assert flex_attention(*inputs, score_mod, blocks, enable_gqa=True).dtype == torch.bfloat16


@pytest.mark.sweep
def test_the_memory_grows_with_the_tile() -> None:
    """The gradient of a captured parameter at 8,192 tokens: all scores of the 4 heads would be 1 GB in float32."""
    import resource
    import threading

    n, peak, done = 8192, [0], threading.Event()
    q, k, v = (torch.randn(1, 4, n, D, requires_grad=True) for _ in "qkv")
    slopes = torch.rand(4, requires_grad=True)
    blocks = create_block_mask(MASKS["causal"], None, None, n, n, device="cpu")
    pages, size = "/proc/self/statm", resource.getpagesize()

    def resident() -> int:
        with open(pages) as file:
            return int(file.read().split()[1]) * size

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], resident())

    before = resident()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        flex_attention(q, k, v, lambda s, b, h, q, k: s + slopes[h] * (k - q), blocks).square().sum().backward()
    finally:
        done.set()
        watcher.join()
    assert slopes.grad is not None and slopes.grad.isfinite().all()
    assert peak[0] - before < 600 * 2**20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_gqa": False}, "4 query heads and 2 key heads. Fix: enable_gqa=True"),
        ({"block_mask": "causal"}, r"block_mask is str.*\nFix: create_block_mask"),
        ({"block_mask": lowtri.causal()}, "flex.block_mask for a mask of lowtri"),
        ({"query": torch.zeros(H, N, D)}, r"query \(4, 150, 16\).*Fix: x\[None\]"),
        ({"query": torch.zeros(3, H, N, D)}, "query has 3 batch rows and key 2"),
        ({"return_aux": AuxRequest(max_scores=True)}, "max_scores is not computed. Fix: return_aux=AuxRequest"),
        ({"return_aux": AuxRequest(lse=True), "return_lse": True}, "exclude each other"),
    ],
)
def test_errors(options: dict[str, Any], words: str) -> None:
    q, k, v = qkv(dtype=torch.float32)
    with pytest.raises(CallError, match=words):
        flex_attention(**{"query": q, "key": k, "value": v, "enable_gqa": True, **options})
