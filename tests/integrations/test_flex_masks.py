"""FlexAttention's mask functions as masks: pairs as torch evaluates them, tile answers that are never wrong, block masks."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_mask, noop_mask, or_masks
from torch.nn.attention.flex_attention import create_block_mask as torchs

from backends.test_flex_block_mask import same_blocks
from lowtri.errors import CallError, MaskError
from lowtri.integrations.flex import block_mask, create_block_mask, flex_attention
from lowtri.integrations.flex.masks import function_mask, mask_of
from lowtri.integrations.function_mask import trace
from lowtri.masks import EMPTY, FULL, PARTIAL, causal, heads, strided, window
from lowtri.masks.mask import Mask

B, H, N = 2, 3, 200
IDS = torch.repeat_interleave(torch.arange(4), torch.tensor([10, 100, 50, 40]))
IDS_BY_ROW = torch.stack([IDS, IDS.flip(0)])
REACH = torch.tensor([5, 20, 150])
PREFIX = torch.tensor([40, 100])
TABLE = torch.rand(N, N, generator=torch.Generator().manual_seed(0)) < 0.3
BYTES = IDS.to(torch.uint8)
BIAS = torch.linspace(-1, 1, N)


def causal_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


DECIDED: dict[str, Callable[..., Any]] = {  # by the bounds of the graph
    "causal": causal_mod,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 64),
    "documents": lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k),
    "documents by row": lambda b, h, q, k: IDS_BY_ROW[b, q] == IDS_BY_ROW[b, k],
    "window by head": lambda b, h, q, k: (q >= k) & (q - k <= REACH[h]),
    "prefix": lambda b, h, q, k: (k <= PREFIX[b]) | (q >= k),
    "chunks": lambda b, h, q, k: (q // 32 == k // 32) & (q % 3 != 4),
    "distance": lambda b, h, q, k: torch.abs(q - k) < 30,
    "or": or_masks(causal_mod, lambda b, h, q, k: k < 20),
    "and not": and_masks(causal_mod, lambda b, h, q, k: ~(k < 20)),
    "where": lambda b, h, q, k: torch.where(q < 50, k < 10, k <= q),
    "clamped": lambda b, h, q, k: torch.maximum(q - 10, b) <= k,
    "products": lambda b, h, q, k: (q - 100) * (k - 100) >= 2 * h,
    "all": noop_mask,
}
EVALUATED: dict[str, Callable[..., Any]] = {  # pair by pair
    "table": lambda b, h, q, k: TABLE[q, k],
    "floats": lambda b, h, q, k: BIAS[q] >= BIAS[k],
    "bits": lambda b, h, q, k: (q & k) == 0,
    "bytes wrap": lambda b, h, q, k: BYTES[q] - BYTES[k] < 200,
    "casts wrap": lambda b, h, q, k: IDS.to(torch.uint8)[q] - (k // 60).to(torch.uint8) < 200,
    "other bools": lambda b, h, q, k: (((q > 30) + (k > 30)) == 1) | (q // 9).bool(),
    "true division": lambda b, h, q, k: q / 3 > k / 2,
    "square root": lambda b, h, q, k: torch.sqrt(q.float()) > k // 7,
}
MODS = DECIDED | EVALUATED


def pairs(mask: Mask, nq: int = N, nk: int = N) -> np.ndarray:
    """(B, H, nq, nk), with indices as positions."""
    q, k = np.arange(nq)[:, None], np.arange(nk)[None, :]
    return np.stack([np.stack([mask.for_row(b, h)(q, k) for h in range(H)]) for b in range(B)])


@pytest.mark.parametrize("name", MODS)
def test_pairs_are_those_of_torch(name: str) -> None:
    expected = create_mask(MODS[name], B, H, N, N, device="cpu").numpy()
    np.testing.assert_array_equal(pairs(function_mask(MODS[name], (B, H, N, N), "cpu")), expected)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(MODS)), st.data())
def test_tile_answers_are_never_wrong(name: str, data: st.DataObject) -> None:
    mask = function_mask(MODS[name], (B, H, N, N), "cpu")
    expected = create_mask(MODS[name], B, H, N, N, device="cpu").numpy()
    q, k = (sorted(data.draw(st.tuples(*[st.integers(0, N)] * 2))) for _ in "qk")
    for b, h in np.ndindex(B, H):
        tile, answer = expected[b, h, slice(*q), slice(*k)], mask.for_row(b, h).tile(*q, *k)
        if answer == EMPTY:
            assert not tile.any()
        elif answer == FULL:
            assert tile.all()


@pytest.mark.parametrize("name", DECIDED)
def test_known_operations_decide_tiles_without_evaluating_pairs(name: str) -> None:
    edges = np.arange(0, N + 1, 20)
    q0, q1, k0, k1 = edges[:-1, None], edges[1:, None], edges[None, :-1], edges[None, 1:]
    mask = function_mask(DECIDED[name], (B, H, N, N), "cpu")
    expected = create_mask(DECIDED[name], B, H, N, N, device="cpu").numpy()
    counts = expected.reshape(B, H, N // 20, 20, N // 20, 20).sum((3, 5))
    exact = np.where(counts == 0, EMPTY, np.where(counts == 400, FULL, PARTIAL))
    for b, h in np.ndindex(B, H):
        np.testing.assert_array_equal(mask.for_row(b, h).tile(q0, q1, k0, k1), exact[b, h])


@pytest.mark.parametrize("name", EVALUATED)
def test_other_operations_leave_tiles_undecided(name: str) -> None:
    mask = function_mask(EVALUATED[name], (B, H, N, N), "cpu").for_row(0, 0)
    assert mask.tile(0, 5, 0, 5) == mask.tile(0, N, 0, N) == PARTIAL


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("causal", ()),
        ("or", ()),
        ("documents by row", (B,)),
        ("window by head", (1, H)),
        ("products", (1, H)),
        ("all", ()),
    ],
)
def test_the_mask_differs_only_where_the_function_does(name: str, batch: tuple[int, ...]) -> None:
    assert function_mask(MODS[name], (B, H, N, N), "cpu").batch == batch


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("size", [64, (128, 64), (48, 100)])
def test_block_masks_are_those_of_torch(name: str, size: Any) -> None:
    arguments: dict[str, Any] = {"device": "cpu", "BLOCK_SIZE": size}
    same_blocks(create_block_mask(MODS[name], B, H, N, N, **arguments), torchs(MODS[name], B, H, N, N, **arguments))


def test_block_masks_without_full_blocks_and_without_sizes() -> None:
    for options in ({"separate_full_blocks": False}, {}):
        ours, theirs = (
            make(causal_mod, None, None, 300, 500, device="cpu", **options) for make in (create_block_mask, torchs)
        )
        same_blocks(ours, theirs)
        assert ours.mask_mod is causal_mod


@pytest.mark.parametrize("name", MODS)
def test_torch_s_block_mask_as_a_mask(name: str) -> None:
    blocks = torchs(MODS[name], B, H, N, N, device="cpu", BLOCK_SIZE=64)
    np.testing.assert_array_equal(
        pairs(mask_of(blocks, (B, H, N, N))), create_mask(MODS[name], B, H, N, N, device="cpu")
    )


def test_blocks_decide_what_the_function_does_not() -> None:
    """As in the kernels of FlexAttention: blocks that are not listed are hidden, and full ones are not evaluated."""
    counts, indices = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    blocks = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=64)
    np.testing.assert_array_equal(
        mask_of(blocks, (1, 1, 128, 128)).dense(128), np.kron([[0, 1], [1, 1]], np.ones((64, 64))) > 0
    )
    partial = torch.tensor([[[0, 1]]], dtype=torch.int32)
    blocks = BlockMask.from_kv_blocks(
        partial, indices, counts, indices, BLOCK_SIZE=64, mask_mod=lambda b, h, q, k: q < 70
    )
    expected = np.kron([[0, 1], [1, 1]], np.ones((64, 64))) > 0
    np.testing.assert_array_equal(mask_of(blocks, (1, 1, 128, 128)).dense(128), expected)


def test_there_and_back() -> None:
    for mask in (causal() & window(60), causal() & strided(3), heads(["causal", "window(9)", "full"])):
        back = mask_of(block_mask(mask, N), (B, H, N, N))
        np.testing.assert_array_equal(pairs(back), pairs(mask))


def test_a_block_mask_is_read_once_and_again_when_its_tensors_change() -> None:
    ids = torch.zeros(N, dtype=torch.int64)
    blocks = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, N, N, device="cpu")
    blocks.kv_num_blocks.fill_(2)  # all blocks partial: the function decides
    blocks.kv_indices[:] = torch.arange(2)
    blocks.full_kv_num_blocks.zero_()
    first = mask_of(blocks, (B, H, N, N))
    assert mask_of(blocks, (B, H, N, N)) is first and first.dense(N).all()
    ids[100:] = 1
    assert mask_of(blocks, (B, H, N, N)).dense(N).sum() == 2 * 100 * 100
    blocks.kv_num_blocks.zero_()
    assert not mask_of(blocks, (B, H, N, N)).dense(N).any()


reach = 4


def test_a_function_is_traced_again_when_a_variable_changes() -> None:
    """Also one of its module, and one that a function inside reads."""

    def near(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (lambda n: (q - k).abs() < n + reach)(own)

    global reach
    for of_function, of_module in ((3, 4), (3, 40), (30, 40)):
        own, reach = of_function, of_module
        expected = create_mask(near, 1, 1, N, N, device="cpu")[0, 0]
        np.testing.assert_array_equal(function_mask(near, (1, 1, N, N), "cpu").dense(N), expected)
        assert trace(near, "cpu") is trace(near, "cpu")
        same_blocks(create_block_mask(near, 1, 1, N, N, device="cpu"), torchs(near, 1, 1, N, N, device="cpu"))


def test_a_setting_of_a_module_may_change() -> None:
    settings_of_model = ModuleType("settings_of_model")

    def near(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < settings_of_model.reach

    for reach_now in (3, 50):
        settings_of_model.reach = reach_now  # type: ignore[attr-defined]
        found = function_mask(near, (1, 1, N, N), "cpu").dense(N)
        np.testing.assert_array_equal(found, np.subtract.outer(range(N), range(N)) < reach_now)


def test_functions_that_cannot_be_traced_are_evaluated() -> None:
    """Objects with __call__, and functions whose variables cannot be watched."""

    class Reach:
        n = 3

        def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
            return q - k < self.n

    near = Reach()
    for n in (3, 50):
        near.n = n
        np.testing.assert_array_equal(
            function_mask(near, (1, 1, N, N), "cpu").dense(N), np.subtract.outer(range(N), range(N)) < n
        )


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: create_block_mask(causal_mod, 0, 1, 8, 8, device="cpu"), MaskError, "B is 0"),
        (lambda: create_block_mask(causal_mod, 1, 1, 8.0, 8, device="cpu"), MaskError, r"Q_LEN is 8\.0"),
        (
            lambda: create_block_mask(causal_mod, 1, 1, 8, 8, device="cpu", compute_dq_write_order=True),
            CallError,
            r"compute_dq_write_order=True.*Fix: torch\.nn\.attention",
        ),
        (lambda: create_block_mask(lambda b, h, q, k: q - k, 1, 1, 8, 8, device="cpu"), MaskError, "must give bools"),
        (
            lambda: flex_attention(
                *[torch.zeros(1, 1, 9, 4)] * 3, block_mask=torchs(causal_mod, 1, 1, 8, 8, device="cpu")
            ),
            CallError,
            r"made for \(B, H, Q_LEN, KV_LEN\) = \(1, 1, 8, 8\), but the call has \(1, 1, 9, 9\)",
        ),
        (
            lambda: flex_attention(
                *[torch.zeros(2, 2, 8, 4)] * 3, block_mask=torchs(causal_mod, 3, 1, 8, 8, device="cpu")
            ),
            CallError,
            "B or H of 1 or None stand for any",
        ),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
