"""Key tiles that a thread keeps for the next tiles of queries: those of another tile, head or run are converted anew."""

from __future__ import annotations

import pytest
import torch

import lowtri

DTYPES = [torch.bfloat16, torch.float16]
MASKS = ["causal", "causal & window(95)", "causal & documents(lengths=(97, 300, 193, 160))"]


def qkv(n: int, kv_heads: int, size: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, n, size, generator=generator).to(dtype) for heads in (2, kv_heads, kv_heads)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", [48, pytest.param(1040, marks=pytest.mark.not_emulated)])
def test_each_key_tile_has_its_own_numbers(dtype: torch.dtype, mask: str, size: int) -> None:
    """Rows of 1040 numbers leave fewer slots than there are key tiles. 750 keys: the last tile is shorter.

    The second run has other heads in the same slots; the third has the scratch memory and the tile numbers of the second.
    """
    for seed, kv_heads in enumerate((2, 1, 1)):
        q, k, v = qkv(750, kv_heads, size, dtype, seed)
        exact, plain = (
            lowtri.attention(*(x.to(kind) for x in (q, k, v)), mask, engine="formula")
            for kind in (torch.float64, dtype)
        )
        actual = lowtri.attention(q, k, v, mask, engine="cpu")
        assert (actual.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max()


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
