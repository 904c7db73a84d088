"""What a kernel is made from: its record, its spec, its instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import lowtri
from lowtri.dispatch.prepared import PREPARED
from lowtri.errors import EngineError
from lowtri.kernels import spec, target
from lowtri.kernels.isa import Amx, Avx2, Avx512Bf16
from lowtri.masks.plan import TILE_Q
from lowtri.masks.tile import FULL
from lowtri.ops.arguments import describe

FEATURES = Avx512Bf16.features


def qkv(nq: int, nk: int, d: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, heads, n, d, generator=generator).to(dtype) for heads, n in ((4, nq), (2, nk), (2, nk))]


def test_kernels_and_plans_have_the_same_tiles() -> None:
    """The kernels repeat these numbers of the plan, so that they do not depend on its file."""
    from lowtri.kernels import tiles

    assert spec.QUERIES == TILE_Q and tiles.FULL == FULL


# The instruction set.


def test_the_best_instruction_set_is_the_default_and_others_can_be_named() -> None:
    def name(*arguments: Any) -> str:
        return target.instruction_set(*arguments).name

    def always(isa: str) -> bool:
        return True

    assert name(None, FEATURES, "x86_64") == "avx512-bf16"
    assert name(None, FEATURES - {"avx512bf16"}, "x86_64") == "avx512"
    assert name(None, FEATURES, "x86_64", always, "AuthenticAMD") == "avx512-bf16"
    assert name(None, FEATURES, "x86_64", always, "GenuineIntel") == "avx512", "its dot products of pairs are slower"
    assert name(None, FEATURES, "x86_64", lambda isa: isa != "avx512", "GenuineIntel") == "avx512-bf16"
    assert name(None, Amx.features, "x86_64", always, "GenuineIntel") == "amx"
    assert name(None, frozenset(), "aarch64") == "neon" and name(None, frozenset({"bf16"}), "aarch64") == "neon-bf16"
    assert name("neon", frozenset({"bf16"}), "arm64") == "neon"
    for wanted in ("avx512-bf16", "avx512", "avx2", "baseline"):
        assert name(wanted, FEATURES, "x86_64") == wanted
        assert name(wanted, FEATURES, "x86_64", always, "GenuineIntel") == wanted


def test_an_unsupported_instruction_set_raises() -> None:
    has = Avx2.features
    with pytest.raises(EngineError, match=r"which this CPU does not have\. It has: avx2, baseline, amx-emulated\."):
        target.instruction_set("avx512", has, "x86_64")
    with pytest.raises(EngineError, match="LOWTRI_ISA is 'avx3', which is no instruction set"):
        target.instruction_set("avx3", has, "x86_64")
    with pytest.raises(EngineError, match=r"of which the library has no kernels\. It has: baseline\."):
        target.instruction_set("avx2", has, "x86_64", lambda name: name == "baseline")
    assert target.instruction_set(None, FEATURES, "x86_64", lambda name: name in ("avx2", "baseline")).name == "avx2"


# How rows are read.

FAMILIES = [("forward", 130, 64), ("forward", 131, 96), ("decode", 1, 64), ("decode", 5, 32)]


@pytest.fixture(
    params=[pytest.param("bf16x2", marks=() if target.ISA.has_bf16_dot else pytest.mark.compiler), "widened"]
)
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Only this variant for bf16, whichever this CPU would use."""
    variants = [
        variant._replace(enabled=True)
        for variant in target.VARIANTS
        if variant.spec.dtype != "bfloat16" or variant.spec.operand == request.param
    ]
    monkeypatch.setattr(target, "VARIANTS", variants)
    PREPARED.clear()
    yield str(request.param)
    PREPARED.clear()


@pytest.mark.parametrize(("family", "nq", "d"), FAMILIES)
@pytest.mark.parametrize("mask", ["causal & window(40)", "full", "causal & (window(9) | first(3))"])
def test_bf16_is_as_exact_as_the_formula(rows: str, family: str, nq: int, d: int, mask: str) -> None:
    q, k, v = qkv(nq, 131, d, torch.bfloat16)
    call, _ = describe(q, k, v, mask)
    assert target.spec_of(family, "bfloat16", call.q, call.k, call.v).operand == rows
    d_output = qkv(nq, 131, d, torch.bfloat16, seed=1)[0]

    def results(engine: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_(nq > 16) for x in (q, k, v)]
        output = lowtri.attention(*leaves, mask, engine=engine, sinks=torch.ones(4, dtype=dtype))
        return [output.detach(), *(torch.autograd.grad(output, leaves, d_output.to(dtype)) if nq > 16 else ())]

    exact, plain, actual = (
        results(*way) for way in (("formula", torch.float64), ("formula", torch.bfloat16), ("cpu", torch.bfloat16))
    )
    for expected, usual, ours in zip(exact, plain, actual, strict=True):
        allowed = 2 * (usual.double() - expected).abs().max() + 4 * 2**-8 * max(1.0, float(expected.abs().max()))
        assert (ours.double() - expected).abs().max() <= allowed


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("nq", [1, 130])
def test_hidden_non_finite_values_have_no_effect_in_bf16(rows: str, nq: int, value: float) -> None:
    q, k, v = qkv(nq, 130, 64, torch.bfloat16)
    mask = lowtri.causal() & lowtri.keys(np.arange(130) != 70)
    expected = lowtri.attention(q, k, v, mask, engine="cpu")
    for array in (k, v):
        array[:, :, 70, 3] = value
    actual = lowtri.attention(q, k, v, mask, engine="cpu")
    # The non-finite path of decode sums in another order, and does not round weights.
    assert torch.equal(actual, expected) if nq > 16 else (actual - expected).abs().max() <= 2**-7
    assert not lowtri.attention(q, k, v, "causal", engine="cpu").isfinite().all()


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("nq", [1, 100])
def test_float16_is_read_without_a_copy(monkeypatch: pytest.MonkeyPatch, kind: str, nq: int) -> None:
    """With gaps between rows, and sizes that are not whole vectors: no tensor is cast."""
    from lowtri.backends.cpu import decode, forward, launch

    for module in (decode, forward, launch):
        monkeypatch.setattr(module, "to_dtype", lambda x, dtype: pytest.fail("a tensor was cast"))
    for d in (32, 36, 5):
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(nq, 100, d, torch.float16))
        arrays = [x.numpy() for x in (q, k, v)] if kind == "numpy" else [q, k, v]
        actual = torch.as_tensor(lowtri.attention(*arrays, "causal & window(30)", engine="cpu"))
        expected = lowtri.attention(q.double(), k.double(), v.double(), "causal & window(30)", engine="reference")
        assert actual.dtype == torch.float16 and (actual.double() - expected).abs().max() <= 2e-3
