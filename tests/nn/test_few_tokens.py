"""Compiled passes over the rows of a few tokens: the numbers of torch's operators, and torch's operators where they cannot read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtri.errors import EngineError
from lowtri.kernels import library
from lowtri.nn import Decoder, DecoderConfig, quantized
from lowtri.nn.quantized import FewTokensNorm, QuantizedLinear, compiled_row_ops

SPECIAL = (0.0, -0.0, 1e-38, -1e-42, 3e38, float("inf"), float("-inf"), float("nan"))


def with_torch(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The module's output by torch's operators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized, "_compiled", lambda: None)
        output: torch.Tensor = module(x)
    return output


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 70), st.integers(1, 40), st.sampled_from((None, *SPECIAL)), st.integers(0, 99))
def test_int8_gives_the_same_bits(rows: int, size: int, width: int, special: float | None, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    layer = QuantizedLinear(nn.Linear(size, width), "int8")
    x = torch.randn(2, rows, size, generator=source) * torch.logspace(-20, 20, rows)[:, None]
    if special is not None:
        x[0, 0, seed % size] = special
    assert compiled_row_ops(x) is not None
    torch.testing.assert_close(layer(x), with_torch(layer, x), rtol=0, atol=0, equal_nan=True)


# A mean of n squares is wrong by n / 2 units at most, its root by half of that; two products follow.
SUM_OF_64 = (64 / 4 + 2) * 2.0**-23


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 300), st.sampled_from((None, *SPECIAL)), st.integers(0, 99))
def test_the_norm_is_the_formula(rows: int, size: int, special: float | None, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    plain = nn.RMSNorm(size, 1e-5).requires_grad_(False)
    plain.weight.copy_(torch.randn(size, generator=source))
    norm, x = FewTokensNorm(plain), torch.randn(1, rows, size, generator=source) * torch.logspace(-9, 9, rows)[:, None]
    if special is not None:
        x[0, 0, seed % size] = special
    wide = x.double()
    squares = wide.square().sum(-1, keepdim=True).float().double()  # infinite beyond float32's range
    expected = wide / (squares / size + 1e-5).sqrt() * plain.weight.double()
    # The scale is rounded, its product with x, and that with the weight: half a unit each, and the epsilon is a float32 number.
    torch.testing.assert_close(norm(x).double(), expected, rtol=2.0 * 2.0**-23, atol=2.0**-148, equal_nan=True)


def test_the_norm_of_a_token_does_not_depend_on_how_many_come_with_it() -> None:
    norm, tokens = FewTokensNorm(nn.RMSNorm(64, 1e-5).requires_grad_(False)), 2**9 + 1
    for size in (1e-30, 1e-3, 1e18, 5e18, 1e20, 3e38):
        x = size * torch.randn(1, 64, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
        many = x.repeat(tokens, 1)
        assert compiled_row_ops(x) is not None and compiled_row_ops(many) is None
        torch.testing.assert_close(norm(x), norm(many)[:1], rtol=SUM_OF_64, atol=0)


def test_a_norm_without_a_weight_or_an_epsilon_takes_torchs_operators() -> None:
    x, norm = torch.randn(2, 8), FewTokensNorm(nn.RMSNorm(8).requires_grad_(False))
    torch.testing.assert_close(norm(x), nn.functional.rms_norm(x, (8,)))
    norm.weight = None
    torch.testing.assert_close(norm(x), nn.functional.rms_norm(x, (8,)))


REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "many numbers": lambda: torch.randn(2, 2**14, 8),
    "a strided view": lambda: torch.randn(2, 8, 3).mT,
    "float64": lambda: torch.randn(2, 3, 8, dtype=torch.float64),
    "bf16": lambda: torch.randn(2, 3, 8).bfloat16(),
    "no rows": lambda: torch.randn(2, 0, 8),
    "a negated view": lambda: torch._neg_view(torch.randn(2, 3, 8)),
    "zeros without memory": lambda: torch._efficientzerotensor(2, 3, 8),
    "no memory": lambda: torch.empty(2, 3, 8, device="meta"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_takes_torchs_operators(case: str) -> None:
    x, plain = REFUSED[case](), nn.RMSNorm(8, 1e-5).requires_grad_(False)
    plain.to(x.dtype)
    assert compiled_row_ops(x) is None
    expected = plain.to(x.device)(x)
    output = FewTokensNorm(plain)(x)
    assert output.device == x.device
    assert x.is_meta or torch.equal(output, expected)


def test_gradients_transforms_and_modes_take_torchs_operators() -> None:
    x, plain = torch.randn(2, 3, 8), nn.RMSNorm(8, 1e-5)
    norm, expected = FewTokensNorm(plain), plain(x)
    assert norm(x).grad_fn is not None
    plain.requires_grad_(False)
    assert norm(x.clone().requires_grad_()).grad_fn is not None
    torch.testing.assert_close(norm(x), expected, rtol=SUM_OF_64, atol=0)
    assert torch.equal(torch.func.vmap(norm)(x), expected)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert norm(mode.from_tensor(x)).shape == x.shape
    program = torch.export.export(norm, (x,)).module()
    assert torch.equal(program(x + 1), plain(x + 1))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        norm(torch.randn(2, 16))


def test_without_kernels_torchs_operators_run(monkeypatch: pytest.MonkeyPatch) -> None:
    x, layer = torch.randn(2, 3, 8), QuantizedLinear(nn.Linear(8, 5), "int8")
    expected = layer(x)

    def missing(symbol: str) -> None:
        raise EngineError(f"the kernel {symbol} is missing")

    monkeypatch.setattr(library, "code", missing)
    quantized._compiled.cache_clear()
    try:
        assert compiled_row_ops(x) is None
        assert torch.equal(layer(x), expected)
    finally:
        quantized._compiled.cache_clear()


def test_a_step_of_generation_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    compiled = quantized._compiled()

    class Counted:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(compiled, name)

    monkeypatch.setattr(quantized, "_compiled", Counted)
    model = Decoder(DecoderConfig(vocab_size=61, hidden_size=64, num_hidden_layers=3)).quantize("int8")
    cache = model.make_cache()
    for ids in (torch.arange(5)[None], torch.tensor([[7]])):
        calls.clear()
        model(ids, cache=cache, logits_to_keep=1)
        assert (calls.count("split"), calls.count("join"), calls.count("rms_norm")) == (13, 13, 7)
