"""The backends ``varlen`` and ``flex``: their choice for tensors on a GPU, without one, and their results.

On a machine without a GPU a described call is moved to one by name, which shows the choice and the reasons; torch's varlen attention
is replaced by its documented meaning; FlexAttention is compiled for the CPU, forward only. On a machine with a GPU, the same tests run
the kernels, with gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lowtri
from attention_cases import draw
from lowtri.backends import flex, varlen
from lowtri.backends.flex.compiled import score_mod_of, with_sinks
from lowtri.backends.varlen.packed import Packed
from lowtri.backends.varlen.segments import Segments, segments_of
from lowtri.dispatch.choose import choose, explain_choice
from lowtri.masks import band, causal, chunks, documents, first, full, heads, keys, strided, table, window
from lowtri.ops.call import Call, CallOptions, Inputs
from lowtri.ops.describe import describe
from random_masks import SIZE, Case, cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IDS = np.stack([np.repeat([0, 1, 2], [100, 28, 128]), np.repeat([0, 1], [200, 56])])


def described(
    mask: Any, *, n: int = 256, d: int = 16, dtype: str = "float16", device: str = DEVICE, **options: Any
) -> tuple[Call, Inputs]:
    """A call of (2, 4, n, d) against 2 key heads, and its inputs."""
    arrays = [x.to(device) for x in draw(nq=n, nk=n, d=d, dv=d, dtype=dtype)]
    return describe(*arrays, mask, CallOptions(**options))


def on_gpu(mask: Any, *, n: int = 4096, **options: Any) -> Call:
    """The description of a long call as if its tensors were on a GPU; no tensor of this size is made."""
    call, _ = described(mask, n=n, device="cpu", **options)
    return replace(call, device="cuda", opaque="q is a Tensor whose data does not lie in memory as it is")


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose GPU and packages run all backends."""
    monkeypatch.setattr(varlen, "_old_device", lambda: None)
    monkeypatch.setattr(flex, "find_spec", lambda name: name)


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(
    ("mask", "options", "expected"),
    [
        (causal(), {}, "sdpa"),  # is_causal
        (full(), {}, "sdpa"),  # no mask
        (causal() & documents(lengths=[1000, 96, 3000]), {}, "varlen"),
        (causal() & window(256), {}, "varlen"),
        (band(64, 64) & documents(lengths=[1000, 96, 3000]), {}, "varlen"),
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
    choice = explain_choice(call, name, None, by_name=False)
    assert name == expected, choice
    assert choice.answers[name] == f"yes: {choice.reason}"
    assert choice.answers["cpu"] == "no: the tensors are on cuda"


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(
    ("backend", "mask", "options", "reason"),
    [
        (varlen, causal() - window(3), {}, "a query sees no key"),
        (varlen, causal() & first(100), {}, "a key is seen by no query, or by two documents"),
        (varlen, causal() & (window(5) | first(1)), {}, "a query sees more than one range of keys"),
        (varlen, causal() | first(9), {}, "the ranges of keys are not those of documents with one window"),
        (varlen, heads(["causal", "causal", "full", "full"]), {}, "the mask differs by head"),
        (varlen, causal(), {"dtype": "float32"}, "its kernels have no float32"),
        (varlen, causal(), {"d": 12}, "its kernels take equal head sizes, multiples of 8 up to 256"),
        (varlen, causal(), {"softcap": 2.0}, "it has no softcap"),
        (varlen, causal(), {"bias": torch.zeros(1, dtype=torch.float16)}, "it has no bias"),
        (varlen, causal(), {"sinks": torch.zeros(4, dtype=torch.float16)}, "it has no sinks"),
        (varlen, causal(), {"return_lse": True}, "it does not return log-sum-exp"),
        (flex, causal(), {"dtype": "float64"}, "its kernels have no float64"),
        (flex, causal(), {"d": 8}, "its kernels take head sizes from 16 on"),
        (flex, causal(), {"return_weights": True}, "it does not return weights"),
        (flex, causal(), {"dropout": 0.5}, "it does not drop weights"),
    ],
)
def test_each_says_why_not(backend: Any, mask: Any, options: dict[str, Any], reason: str) -> None:
    assert backend.supports(on_gpu(mask, n=256, **options)) == reason


def test_other_devices_numpy_and_transforms() -> None:
    call = on_gpu(causal(), n=64)
    for backend in (varlen, flex):
        assert backend.supports(replace(call, device="cpu")) == "the tensors are on cpu"
        assert backend.supports(replace(call, device="meta")) == "the tensors are on meta"
        assert backend.supports(replace(call, is_numpy=True)) == "the arrays are NumPy's"
        assert "inside a transform" in (
            backend.supports(replace(call, transformation="inside a transform of torch.func")) or ""
        )
        assert backend.supports(replace(call, opaque="q is a FakeTensor or a view")) == "the tensors are fake"
    meta = torch.zeros(1, 1, 8, 16, device="meta")
    assert lowtri.which_engine(meta, meta, meta, "causal").answers["flex"] == "no: the tensors are on meta"


@pytest.mark.usefixtures("with_kernels")
def test_missing_packages_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "find_spec", lambda name: None)
    assert flex.supports(on_gpu(causal(), n=64)) == "triton is not installed"
    monkeypatch.setattr(varlen, "_torch_lacks", lambda: "this version of torch has no torch.nn.attention.varlen")
    assert varlen.supports(on_gpu(causal(), n=64)) == "this version of torch has no torch.nn.attention.varlen"


# Documents and a window from the ranges of a plan.


def shown_by(found: Segments, batch: int, nq: int, nk: int) -> np.ndarray:
    """(B, nq, nk): the pairs that segments show, segment by segment, as torch's varlen_attn documents them."""
    shown = np.zeros((batch * nq, batch * nk), bool)
    for q0, q1, k0, k1 in zip(found.queries[:-1], found.queries[1:], found.keys[:-1], found.keys[1:], strict=True):
        distance = np.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - np.arange(k1 - k0)[None, :]
        seen = np.ones(distance.shape, bool)
        if found.before >= 0:
            seen &= distance <= found.before
        if found.after >= 0:
            seen &= -distance <= found.after
        shown[q0:q1, k0:k1] = seen
    rows = shown.reshape(batch, nq, batch, nk)
    assert not any(rows[a, :, b].any() for a in range(batch) for b in range(batch) if a != b)
    return np.stack([rows[b, :, b] for b in range(batch)])


@settings(max_examples=50, deadline=None)
@given(cases, st.integers(1, SIZE), st.integers(1, SIZE), st.booleans())
def test_segments_show_the_pairs_of_the_mask_or_there_are_none(case: Case, nq: int, nk: int, by_row: bool) -> None:
    if case.mask.batch[1:] not in ((), (1,)):
        return
    q, k = torch.zeros(2, 1, nq, 8, dtype=torch.float16), torch.zeros(2, 1, nk, 8, dtype=torch.float16)
    positions = np.stack([np.arange(nq), np.arange(nq) + by_row])
    call, _ = describe(q, k, k, case.mask, CallOptions(q_positions=positions, k_positions=range(nk)))
    found = segments_of(call)
    if isinstance(found, Segments):
        expected = np.broadcast_to(call.visible()[:, 0], (2, nq, nk))
        np.testing.assert_array_equal(shown_by(found, 2, nq, nk), expected)


@pytest.mark.parametrize(
    ("mask", "segments", "before", "after"),
    [
        (causal(), 2, -1, 0),
        (full(), 2, -1, -1),
        (causal() & window(60), 2, 59, 0),
        (band(3, 5), 2, 3, 5),
        (documents(IDS), 5, -1, -1),
        (causal() & documents(IDS) & window(30), 5, 29, 0),
        (causal() & chunks(33), 16, -1, 0),
        (causal() & documents(lengths=[1] * 256), 512, -1, -1),
    ],
)
def test_documents_and_windows_are_recognised(mask: Any, segments: int, before: int, after: int) -> None:
    found = segments_of(described(mask)[0])
    assert isinstance(found, Segments)
    assert (len(found.queries) - 1, found.before, found.after) == (segments, before, after)


def by_documents(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, most_q: int, most_k: int, **options: Any
) -> Tensor:
    """The documented meaning of torch's varlen_attn, through one table of all pairs; q, k, v are (tokens, heads, size)."""
    found = Segments(cu_q.numpy().astype(np.int64), cu_k.numpy().astype(np.int64), *options["window_size"])
    assert (int(cu_q.diff().max()), int(cu_k.diff().max())) == (most_q, most_k)
    assert options.get("enable_gqa", False) or q.shape[1] == k.shape[1]
    shown = table(shown_by(found, 1, len(q), len(k))[0])
    heads_first = [x.transpose(0, 1) for x in (q, k, v)]
    return lowtri.attention(*heads_first, shown, scale=options["scale"], engine="reference").transpose(0, 1)


def test_varlen_is_passed_rows_documents_and_windows() -> None:
    """On a GPU torch's kernel, elsewhere its documented meaning; forward and backward."""
    function: Callable[..., Any] | None = None if DEVICE == "cuda" else by_documents
    for mask in (causal() & documents(IDS), causal() & window(30), band(9, 4) & chunks(64), documents(IDS)):
        call, inputs = described(mask, scale=0.3)
        assert varlen.why_not(call) is None
        leaves = Inputs(*(None if x is None else x.requires_grad_() for x in inputs))
        output = Packed(call, function).run(leaves).output
        exact = [x.detach().cpu().double().requires_grad_() for x in inputs[:3]]
        expected = lowtri.attention(*exact, mask, scale=0.3)
        assert output.shape == expected.shape and output.dtype == torch.float16
        d_output = torch.randn(expected.shape, dtype=torch.float64)
        grads = torch.autograd.grad(output, leaves[:3], d_output.to(output))
        torch.testing.assert_close(output.cpu().double(), expected, rtol=4e-3, atol=4e-3)
        for mine, other in zip(grads, torch.autograd.grad(expected, exact, d_output), strict=True):
            torch.testing.assert_close(mine.cpu().double(), other, rtol=1e-2, atol=2e-2)


# FlexAttention.


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
