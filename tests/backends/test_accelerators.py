"""The backend ``flex``: its choice for tensors on a GPU, without one, and its results.

On a machine without a GPU a described call is moved to one by name, which shows the choice and the reasons, and FlexAttention is
compiled for the CPU, forward only. On a machine with a GPU, the same tests run its kernels, with gradients.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import draw
from torch import Tensor

import lowtri
from lowtri.backends import flex
from lowtri.backends.flex import score_mod_of, with_sinks
from lowtri.dispatch.choose import choose, explain_choice
from lowtri.masks import band, causal, documents, first, full, heads, keys, strided, window
from lowtri.ops.arguments import describe
from lowtri.ops.call import Call, CallOptions, Inputs

pytestmark = pytest.mark.not_emulated  # no kernel runs, and the choices depend on the version of torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def described(
    mask: Any, *, n: int = 256, d: int = 16, dtype: str = "float16", device: str = DEVICE, **options: Any
) -> tuple[Call, Inputs]:
    """A call of (2, 4, n, d) against 2 key heads, and its inputs."""
    arrays = [x.to(device) for x in draw(nq=n, nk=n, d=d, dv=d, dtype=dtype)]
    return describe(*arrays, mask, CallOptions(**options))


def on_gpu(mask: Any, *, n: int = 4096, **options: Any) -> Call:
    """The description of a long call as if its tensors were on a GPU; no tensor of this size is made."""
    call, _ = described(mask, n=n, device="cpu", **options)
    return replace(call, device="cuda", why_unreadable="q is a Tensor whose data does not lie in memory as it is")


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose packages run all backends."""
    monkeypatch.setattr(flex, "find_spec", lambda name: name)


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(
    ("mask", "options", "expected"),
    [
        (causal(), {}, "sdpa"),  # is_causal
        (full(), {}, "sdpa"),  # no mask
        (causal() & documents(lengths=[1000, 96, 3000]), {}, "flex"),
        (causal() & window(256), {}, "flex"),
        (band(64, 64) & documents(lengths=[1000, 96, 3000]), {}, "flex"),
        (causal() & (window(256) | first(4)), {}, "flex"),  # two ranges
        (causal() & documents(lengths=[1000, 96, 3000]), {"dtype": "float32"}, "flex"),
        (causal() & window(256), {"softcap": 30.0}, "flex"),
        (causal() & window(256), {"return_lse": True}, "flex"),
        (causal() & window(256), {"d": 20}, "flex"),
        (causal(), {"softcap": 30.0}, "flex"),
        (causal() & strided(3), {}, "flex"),
        (causal() & strided(3), {"dtype": "float64"}, "sdpa"),  # with a table
        (causal() & strided(3), {"dtype": "float64", "n": 8192}, "formula"),
        (causal() & strided(3), {"d": 8, "softcap": 2.0}, "formula"),
        (causal() & strided(3), {"n": 100}, "sdpa"),  # too short to compile for
        (causal() & window(4), {"n": 100, "softcap": 2.0}, "formula"),
    ],
)
def test_the_choice_on_a_gpu(mask: Any, options: dict[str, Any], expected: str) -> None:
    call = on_gpu(mask, **options)
    name = choose(call, "auto")
    choice = explain_choice(call, name, None, engine_was_named=False)
    assert name == expected, choice
    assert choice.answers[name] == f"yes: {choice.reason}"
    assert choice.answers["cpu"] == "no: the tensors are on cuda"


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(
    ("mask", "options", "reason"),
    [
        (causal(), {"dtype": "float64"}, "its kernels have no float64"),
        (causal(), {"d": 8}, "its kernels take head sizes from 16 on"),
        (causal(), {"return_weights": True}, "it does not return weights"),
        (causal(), {"dropout": 0.5}, "it does not drop weights"),
    ],
)
def test_it_says_why_not(mask: Any, options: dict[str, Any], reason: str) -> None:
    assert flex.supports(on_gpu(mask, n=256, **options)) == reason


def test_other_devices_numpy_and_transforms() -> None:
    call = on_gpu(causal(), n=64)
    assert flex.supports(replace(call, device="cpu")) == "the tensors are on cpu"
    assert flex.supports(replace(call, device="meta")) == "the tensors are on meta"
    transformed = replace(call, transformation="inside a transform of torch.func")
    assert "inside a transform" in (flex.supports(transformed) or "")
    assert flex.supports(replace(call, why_unreadable="q is a FakeTensor or a view")) == "the tensors are fake"
    meta = torch.zeros(1, 1, 8, 16, device="meta")
    assert lowtri.which_engine(meta, meta, meta, "causal").answers["flex"] == "no: the tensors are on meta"


@pytest.mark.usefixtures("with_kernels")
def test_missing_packages_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "find_spec", lambda name: None)
    assert flex.supports(on_gpu(causal(), n=64)) == "triton is not installed"


def test_the_score_function_of_softcap_and_bias() -> None:
    score, indices = torch.tensor(3.0), [torch.tensor(i) for i in (1, 2, 3, 4)]
    bias = torch.randn(2, 1, 5, 6)
    capped = 2 * torch.tanh(score / 2)
    assert score_mod_of(None, None) is None
    assert torch.equal(score_mod_of(2.0, None)(score, *indices), capped)
    assert torch.equal(score_mod_of(None, bias)(score, *indices), score + bias[1, 0, 3, 4])
    assert torch.equal(score_mod_of(2.0, bias[:, :, :1])(score, *indices), capped + bias[1, 0, 0, 4])


def test_sinks_are_added_to_the_result_without_them() -> None:
    inputs, sinks = draw(dtype="float64"), torch.randn(4, dtype=torch.float64)
    plain = lowtri.attention(*inputs, causal() - window(3), return_lse=True)
    expected = lowtri.attention(*inputs, causal() - window(3), sinks=sinks, return_lse=True)
    torch.testing.assert_close(with_sinks(*plain, sinks), expected)


@pytest.mark.sweep
def test_compiled_flex_attention() -> None:
    """With block masks, caps, biases, blind queries and hidden NaN; needs a C++ compiler, or a GPU.

    Masks with at most two ranges of keys for each query share one program.
    """
    n, dtype = 300, "float32"
    bias, sinks = torch.randn(1, 4, 1, n), torch.randn(4)
    few: list[tuple[Any, dict[str, Any]]] = [
        (causal(), {}),
        (causal() & window(60), {}),
        (causal() & documents(lengths=[100, 28, 172]), {}),
        (causal() | first(50), {}),
        (causal() & (window(60) | first(5)), {}),
        (causal() - window(30), {}),
    ]
    others: list[tuple[Any, dict[str, Any]]] = [
        (causal() & strided(3), {}),
        (causal(), {"softcap": 3.0, "bias": bias}),
    ]
    if DEVICE == "cuda":
        others += [
            (heads(["causal", "window(9)", "full", "causal"]), {}),
            (causal() - window(30), {"sinks": sinks, "return_lse": True}),  # torch has no log-sum-exp on a CPU
            (full(), {}),
        ]
    counted = torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's compiler
        for mask, options in [*few, *others]:
            moved = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
            call, inputs = described(mask, n=n, dtype=dtype, d=64, **moved)
            assert flex.why_not(call) in (None, "triton is not installed")
            with torch.set_grad_enabled(DEVICE == "cuda"):
                leaves = Inputs(*(None if x is None else x.requires_grad_(DEVICE == "cuda") for x in inputs))
                result = flex.prepare(call).run(leaves)
            exact = [x.detach().cpu().double().requires_grad_() for x in inputs[:3]]
            wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in options.items()}
            expected, lse = lowtri.attention(*exact, mask, engine="formula", **{**wide, "return_lse": True})
            torch.testing.assert_close(result.output.cpu().double(), expected, rtol=0, atol=2e-5)
            if result.lse is not None:
                torch.testing.assert_close(result.lse.cpu().double(), lse, rtol=0, atol=2e-5)
            if DEVICE == "cuda":
                d_output = torch.randn(expected.shape, dtype=torch.float64)
                grads = torch.autograd.grad(result.output, leaves[:3], d_output.to(result.output))
                for mine, other in zip(grads, torch.autograd.grad(expected, exact, d_output), strict=True):
                    torch.testing.assert_close(mine.cpu().double(), other, rtol=0, atol=2e-4)
            if (mask, options) == few[0]:
                programs = counted["unique_graphs"]
            elif (mask, options) in few:
                assert counted["unique_graphs"] == programs
        call, inputs = described(causal() & keys(lengths=[300, 170]), n=n, dtype=dtype, d=64)
        for x in inputs[1:3]:
            x.data[1, :, 170:] = torch.nan
        with torch.no_grad():
            assert flex.prepare(call).run(inputs).output.isfinite().all()
