"""Key tiles that a thread keeps for the next tiles of queries: those of another tile, head or run are converted anew."""

from __future__ import annotations

import pytest
import torch

import lowtri
from lowtri.kernels import select
from lowtri.kernels.forward import KEYS
from lowtri.kernels.kept_values import kept_scratch

DTYPES = [torch.bfloat16, torch.float16]
MASKS = ["causal", "causal & window(95)", "causal & documents(lengths=(97, 300, 193, 160))"]


def qkv(n: int, kv_heads: int, dv: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((2, 32), (kv_heads, 32), (kv_heads, dv))
    return [torch.randn(1, heads, n, d, generator=generator).to(dtype) for heads, d in sizes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dv", [48, 1040])
def test_each_key_tile_has_its_own_values(dtype: torch.dtype, mask: str, dv: int) -> None:
    """Values of 1040 numbers leave fewer slots than there are key tiles. 750 keys: the last tile is shorter.

    The second run has other heads in the same slots; the third has the scratch memory and the tile numbers of the second.
    """
    for seed, kv_heads in enumerate((2, 1, 1)):
        q, k, v = qkv(750, kv_heads, dv, dtype, seed)
        exact, plain = (
            lowtri.attention(*(x.to(kind) for x in (q, k, v)), mask, engine="formula")
            for kind in (torch.float64, dtype)
        )
        actual = lowtri.attention(q, k, v, mask, engine="cpu")
        assert (actual.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max()


def test_large_values_have_fewer_slots() -> None:
    for rows in ("pairs", "widened"):
        spec = select.SPECS["forward", "bfloat16", rows]
        for dv in (48, 64, 128, 1040, 10**6):
            tile = KEYS * dv * spec.number_bytes // spec.per_word
            kept = kept_scratch(spec, KEYS, dv)["kept_values"]
            assert kept % tile == 0 and tile <= kept <= max(tile, 2**19)
            assert (kept // tile < 750 // KEYS) == (dv > 512)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_kept_values_that_are_hidden_have_no_effect(dtype: torch.dtype, value: float) -> None:
    """Keys next to those that a tile of queries sees are converted with them."""
    q, k, v = qkv(400, 2, 64, dtype, seed=0)
    expected = lowtri.attention(q, k, v, "causal & window(65)", engine="cpu")
    v[:, :, 200] = value
    actual = lowtri.attention(q, k, v, "causal & window(65)", engine="cpu")
    sees = (torch.arange(400) >= 200) & (torch.arange(400) < 265)
    assert torch.equal(actual[:, :, ~sees], expected[:, :, ~sees])
    assert not actual[:, :, sees].isfinite().any()
