"""attention_backward: the gradients of the whole call, from its output and log-sum-exp, for all keys and for parts of them."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from attention_cases import draw, near
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_masks import ROWS, SIZE, Case, cases

import lowtri
from lowtri import CallError, attention, attention_backward, causal, documents, where, window
from lowtri.dispatch import operators

ENGINES = ("cpu", "formula", "reference")


def exact(q, k, v, mask, d_output, d_lse, **options):
    """Output, log-sum-exp and gradients of the whole call by torch's autograd of the formula, in float64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    extra = {name: options[name].double().requires_grad_() for name in ("bias", "sinks") if name in options}
    output, lse = attention(*leaves, mask, return_lse=True, engine="formula", **{**options, **extra})
    results = [(output, d_output.double()), (lse, d_lse.double())]
    results = [(x, d) for x, d in results if x.requires_grad]
    seen = torch.isfinite(lse)
    total = sum(
        (torch.where(seen.reshape(seen.shape + (1,) * (x.ndim - seen.ndim)), x, 0) * d).sum() for x, d in results
    )
    return output.detach(), lse.detach(), torch.autograd.grad(total, [*leaves, *extra.values()], materialize_grads=True)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases, st.sampled_from(ENGINES), st.integers(0, 5))
def test_parts_of_the_keys_add_up_to_the_whole(case: Case, engine: str, parts: int) -> None:
    """With 0 parts the call has no keys at all."""
    n = SIZE - 4
    q, k, v = draw(b=ROWS, nq=n, nk=n, dtype="float64")
    d_output, d_lse = torch.randn(*q.shape[:3], v.shape[3], dtype=torch.float64), torch.randn(q.shape[:3]).double()
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    positions = np.arange(n)
    if parts == 0:
        k, v, positions = k[:, :, :0], v[:, :, :0], positions[:0]
    where_q = {"q_positions": np.arange(n)}
    heads = case.mask.batch[1:2] in ((), (1,), (4,))
    if not heads:
        q, d_output, d_lse, sinks = q[:, :2], d_output[:, :2], d_lse[:, :2], sinks.detach()[:2].requires_grad_()
    options = {"softcap": 3.0, **where_q}
    output, lse, grads = exact(
        q, k, v, case.mask, d_output, d_lse, sinks=sinks.detach(), k_positions=positions, **options
    )
    d_lse = d_lse.masked_fill(lse == -torch.inf, 0)
    cuts = np.linspace(0, len(positions), max(parts, 1) + 1).astype(int)
    total_q, total_k, total_v = torch.zeros_like(q), [], []
    engine = "formula" if parts == 0 else engine
    for number, (start, stop) in enumerate(pairwise(cuts)):
        part = attention_backward(
            d_output, d_lse, output, lse, q, k[:, :, start:stop], v[:, :, start:stop], case.mask,
            sinks=None if number else sinks, k_positions=positions[start:stop], engine=engine, **options,
        )  # fmt: skip
        total_q += part.q
        total_k.append(part.k)
        total_v.append(part.v)
        if number == 0:
            assert part.sinks is not None and near(part.sinks, grads[3], "float64", times=200)
    assert near(total_q, grads[0], "float64", times=200)
    assert near(torch.cat(total_k, 2), grads[1], "float64", times=200)
    assert near(torch.cat(total_v, 2), grads[2], "float64", times=200)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learned_bias_and_a_mask_of_a_function(engine: str, dtype: str) -> None:
    q, k, v = draw(nq=40, nk=40, d=16, dv=16, dtype=dtype)
    mask = causal() & where(lambda q, k: (q + k) % 3 > 0)
    bias = torch.randn(40, 40).to(q.dtype).requires_grad_()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    output, lse = attention(*leaves, mask, bias=bias, return_lse=True, engine=engine)
    d_output = torch.randn(output.shape).to(q.dtype)
    expected = torch.autograd.grad(output, [*leaves, bias], d_output)
    grads = attention_backward(d_output, None, output.detach(), lse.detach(), q, k, v, mask, bias=bias, engine=engine)
    assert grads.sinks is None
    for found, one in zip(grads[:4], expected, strict=True):
        assert found.dtype == q.dtype and near(found, one, dtype)
    constant = attention_backward(
        d_output, None, output.detach(), lse.detach(), q, k, v, mask, bias=bias.detach(), engine=engine
    )
    assert constant.bias is None and torch.equal(constant.q, grads.q)
    wide = attention_backward(
        d_output, None, output.detach(), lse.detach(), q, k, v, mask, bias=bias, engine=engine, wide=True
    )
    for found, one in zip(wide[:4], grads[:4], strict=True):
        assert found.dtype == torch.float32 and near(found.to(q.dtype), one, dtype)


def test_two_and_three_dimensions() -> None:
    for shape in ((9, 8), (2, 9, 8), (2, 1, 3, 9, 8)):
        q, k, v, d_output = torch.randn(4, *shape, dtype=torch.float64)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        output, lse = attention(*leaves, "causal", return_lse=True)
        expected = torch.autograd.grad(output, leaves, d_output)
        grads = attention_backward(d_output, None, output.detach(), lse.detach(), q, k, v, "causal")
        for found, one in zip(grads, expected, strict=False):
            assert found is not None and found.shape == shape and near(found, one, "float64", times=100)


def test_hidden_garbage_changes_nothing() -> None:
    q, k, v = draw(nq=64, nk=64, dtype="float64")
    mask = causal() & window(20) & documents(lengths=[30, 34])
    d_output = torch.randn(*q.shape[:3], v.shape[3], dtype=torch.float64)
    output, lse = attention(q, k, v, mask, return_lse=True)
    clean = attention_backward(d_output, None, output, lse, q, k, v, mask, q_positions=range(64), k_positions=range(64))
    part = slice(30, 64)  # the keys before it are of another document
    k[:, :, :30], v[:, :, :30] = torch.nan, torch.inf
    for engine in ENGINES:
        dirty = attention_backward(
            d_output[:, :, part], None, output[:, :, part], lse[:, :, part], q[:, :, part], k, v, mask,
            q_positions=range(30, 64), k_positions=range(64), engine=engine,
        )  # fmt: skip
        assert near(dirty.q, clean.q[:, :, part], "float64", times=100)
        assert near(dirty.k[:, :, part], clean.k[:, :, part], "float64", times=100) and not dirty.k[:, :, :30].any()


@pytest.mark.parametrize("engine", ["auto", "formula"])
def test_the_operator_without_keys_and_with_the_log_sum_exp(engine: str) -> None:
    """No score depends on any input, so the log-sum-exp has no gradient."""
    q, k, v = (x.requires_grad_() for x in draw(nk=0))
    text = f"return_lse; engine={engine}; q_positions; k_positions; mask=causal"
    output, lse = operators._attention(q, k, v, text, [torch.arange(9), torch.arange(0)], None, None)
    assert not output.any() and (lse == -torch.inf).all()
    grads = torch.autograd.grad([output, lse], [q, k, v], [torch.ones_like(output), torch.zeros_like(lse)])
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape] and not grads[0].any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d_output": torch.zeros(2, 4, 9, 6)}, r"d_output is \(2, 4, 9, 6\).*give \(2, 4, 9, 5\)"),
        ({"output": torch.zeros(2, 4, 8, 5)}, r"output is \(2, 4, 8, 5\)"),
        ({"lse": torch.zeros(2, 4, 9, 1)}, r"lse is \(2, 4, 9, 1\).*give \(2, 4, 9\)"),
        ({"d_lse": torch.zeros(2, 4)}, "d_lse"),
        ({"lse": np.zeros((2, 4, 9))}, r"lse is ndarray.*torch\.as_tensor"),
        ({"dropout": 0.1}, "dropout.*torch's own backward"),
        ({"mask": None}, "mask"),
    ],
)
def test_errors(change: dict, words: str) -> None:
    q, k, v = draw()
    given = {"d_output": torch.zeros(2, 4, 9, 5), "d_lse": None, "output": torch.zeros(2, 4, 9, 5)}
    given |= {"lse": torch.zeros(2, 4, 9), "q": q, "k": k, "v": v, "mask": "causal"}
    with pytest.raises((CallError, lowtri.MaskError)) as raised:
        attention_backward(**{**given, **change})
    assert re.search(words, str(raised.value), re.S), raised.value


def test_an_output_in_float64_serves_inputs_in_float32():
    q, k, v = draw(nq=20, nk=20)
    d_output, d_lse = torch.ones(*q.shape[:3], v.shape[-1]), torch.zeros(q.shape[:3])
    output, lse, expected = exact(q, k, v, "causal", d_output, d_lse)
    for engine in ENGINES:
        gradients = attention_backward(d_output.double(), None, output, lse, q, k, v, "causal", engine=engine)
        for actual, right in zip(gradients[:3], expected, strict=True):
            torch.testing.assert_close(actual.double(), right, atol=1e-5, rtol=1e-5)
