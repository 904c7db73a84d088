"""Gradients: by finite differences in float64, for every input, every output and every engine that takes them; and twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import lowtri
from attention_cases import ENGINES, TRACELESS, able, draw, near, with_gradients
from lowtri import attention, causal, documents, first, full, heads, keys, table, window
from lowtri.backends.formula import tiles
from lowtri.dispatch.prepared import PREPARED

MASKS = {
    "causal": causal(),
    "full": full(),
    "window": causal() & (window(2) | first(1)),
    "rows that see nothing": table([[False] * 4, [True, False, True, False], [False] * 4, [True] * 4]),
    "by row and head": heads([window(1) & keys(lengths=[4, 2]), ~causal()]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 1.5, "scale": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0])},
    "bias by key": {"bias": torch.linspace(-1, 1, 4)},
    "bias by head": {"bias": torch.linspace(-1, 1, 32).reshape(1, 2, 4, 4)},
    "bias of one row, sinks, softcap": {
        "bias": torch.linspace(-1, 1, 8).reshape(2, 1, 4, 1),
        "sinks": torch.ones(2),
        "softcap": 3.0,
    },
}


def small(mask: Any, options: dict[str, Any]) -> tuple[list[torch.Tensor], list[str], dict[str, Any]]:
    """Leaves in float64 (q, k, v and what else has a gradient), the names of the others, and the plain options."""
    q, k, v = draw(hq=2, hkv=1, nq=4, nk=4, d=2, dv=3, dtype="float64", seed=3)
    named = {name: x.double() for name, x in options.items() if isinstance(x, torch.Tensor)}
    plain = {name: x for name, x in options.items() if name not in named}
    return [x.clone().requires_grad_() for x in (q, k, v, *named.values())], list(named), plain


def checked(engine: str, mask: Any, options: dict[str, Any], check: Any = gradcheck, **asked: bool) -> bool:
    leaves, names, plain = small(mask, options)

    def run(q: Any, k: Any, v: Any, *others: Any) -> Any:
        found = attention(q, k, v, mask, engine=engine, **dict(zip(names, others, strict=True)), **plain, **asked)
        if not asked:
            return found
        # A log-sum-exp of -inf has no differences to take; where it is finite it has.
        return tuple(x.masked_fill(x == -torch.inf, 0) for x in found)

    return check(run, leaves, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_finite_differences_of_the_output(mask, options):
    leaves, names, plain = small(MASKS[mask], OPTIONS[options])
    ran = able(*leaves[:3], MASKS[mask], **dict(zip(names, leaves[3:], strict=True)), **plain)
    for engine in ran:
        assert checked(engine, MASKS[mask], OPTIONS[options]), engine
    assert {"reference", "formula"} <= set(ran)


@pytest.mark.parametrize("options", ["plain", "bias of one row, sinks, softcap"])
@pytest.mark.parametrize("mask", ["causal", "rows that see nothing", "by row and head"])
@pytest.mark.parametrize("asked", [{"return_lse": True}, {"return_weights": True, "return_lse": True}], ids=str)
def test_finite_differences_of_weights_and_log_sum_exp(mask, options, asked):
    leaves, names, plain = small(MASKS[mask], OPTIONS[options])
    for engine in able(*leaves[:3], MASKS[mask], **dict(zip(names, leaves[3:], strict=True)), **plain, **asked):
        assert checked(engine, MASKS[mask], OPTIONS[options], **asked), engine


@pytest.mark.parametrize("options", ["plain", "bias of one row, sinks, softcap"])
@pytest.mark.parametrize("mask", ["causal", "rows that see nothing", "by row and head"])
def test_the_formula_can_be_differentiated_twice(mask, options):
    assert checked("formula", MASKS[mask], OPTIONS[options], gradgradcheck)


def test_the_formula_can_be_differentiated_twice_tile_by_tile(monkeypatch):
    """Two tiles of queries, the second computed again for its gradient, and for the gradient of that."""
    monkeypatch.setattr(tiles, "_SCORES_IN_TILE", 1)
    PREPARED.clear()
    q, k, v = (x.requires_grad_() for x in draw(b=1, hq=1, hkv=1, nq=66, nk=66, d=2, dv=1, dtype="float64"))

    def run(*x: Any) -> Any:
        return attention(*x, "window(3)", engine="formula")[:, :, 62:]

    assert gradcheck(run, (q, k, v), fast_mode=True) and gradgradcheck(run, (q, k, v), fast_mode=True)


def test_the_definition_refuses_a_second_derivative():
    q, k, v = (x.requires_grad_() for x in draw(nq=3, nk=3))
    out = attention(q, k, v, "causal", engine="reference")
    with pytest.raises(lowtri.EngineError, match=r'"reference" gives gradients once.*Fix: engine="formula"'):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_positions_and_gradients():
    """Queries and keys in any order, pads among them, differ from the sorted call by that order only."""
    order = torch.tensor([3, 0, 4, 1, 2])
    inputs = draw(nq=5, nk=5)
    mixed = tuple(x[:, :, order] for x in inputs)
    d_out = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(1))
    places = {"q_positions": order, "k_positions": order.numpy()}
    leaves = [x.clone().requires_grad_() for x in inputs]
    for engine in able(*leaves, "causal", **places):
        _, expected = with_gradients(engine, inputs, "causal", d_out)
        _, found = with_gradients(engine, mixed, "causal", d_out[:, :, order], **places)
        for e, f in zip(expected, found, strict=True):
            assert near(f, e[:, :, order], "float32"), engine
        pads = {"q_positions": [-1, 0, 1, 2, 3], "k_positions": [-1, 0, 1, 2, 3]}
        _, padded = with_gradients(engine, inputs, "causal", d_out, **pads)
        _, short = with_gradients(engine, tuple(x[:, :, 1:] for x in inputs), "causal", d_out[:, :, 1:])
        for e, f in zip(short, padded, strict=True):
            assert near(f[:, :, 1:], e, "float32") and not f[:, :, 0].any(), engine


def test_one_input_alone_asks_for_a_gradient():
    inputs = draw(nq=6, nk=6)
    named = {"bias": torch.zeros(6), "sinks": torch.zeros(4)}
    expected = with_gradients("formula", inputs, "causal", **named)[1]
    for i in range(5):
        leaves = [x.clone().requires_grad_(i == j) for j, x in enumerate((*inputs, *named.values()))]
        options = dict(zip(named, leaves[3:], strict=True))
        for engine in able(*leaves[:3], "causal", **options):
            out = attention(*leaves[:3], "causal", engine=engine, **options)
            assert near(torch.autograd.grad(out.sum(), leaves[i])[0], expected[i], "float32"), engine


def test_shared_inputs_add_up():
    """q = k = v = x: the gradient of x is the sum of three."""
    x = draw(hq=2, hkv=2, nq=6, nk=6, d=4, dv=4)[0]
    leaf = x.clone().requires_grad_()
    for engine in able(leaf, leaf, leaf, "causal"):
        parts = with_gradients(engine, (x, x, x), "causal")[1]
        whole = torch.autograd.grad(attention(leaf, leaf, leaf, "causal", engine=engine).sum(), leaf)[0]
        assert near(whole, sum(parts), "float32"), engine


def test_an_input_changed_in_place_is_noticed():
    """Between forward and backward: torch raises, instead of a gradient of what is no longer there."""
    for engine in able(*(x.requires_grad_() for x in draw(nq=4, nk=4)), "causal", among=TRACELESS):  # sdpa lets it pass
        q, k, v = (x.requires_grad_() for x in draw(nq=4, nk=4))
        base = k * 1
        out = attention(q, base, v, "causal", engine=engine)
        base.detach().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_documents_do_not_mix_in_gradients():
    """Packed documents: gradients are those of each document alone."""
    inputs = draw(nq=9, nk=9)
    d_out = torch.randn(2, 4, 9, 5, generator=torch.Generator().manual_seed(1))
    leaves = [x.clone().requires_grad_() for x in inputs]
    for engine in able(*leaves, causal() & documents(lengths=[4, 5])):
        packed = with_gradients(engine, inputs, causal() & documents(lengths=[4, 5]), d_out)[1]
        for part in (slice(0, 4), slice(4, 9)):
            alone = with_gradients(engine, tuple(x[:, :, part] for x in inputs), "causal", d_out[:, :, part])[1]
            assert all(near(p[:, :, part], a, "float32") for p, a in zip(packed, alone, strict=True)), engine


def test_no_gradient_is_dropped_in_silence():
    """auto takes an engine with gradients; one asked for by name either gives them or raises."""
    q, k, v = (x.requires_grad_() for x in draw())
    assert attention(q, k, v, "causal").requires_grad
    for engine in ENGINES:
        if engine in able(q, k, v, "causal"):
            assert attention(q, k, v, "causal", engine=engine).requires_grad, engine
        else:
            with pytest.raises(lowtri.EngineError, match="gradient"):
                attention(q, k, v, "causal", engine=engine)
    sinks = torch.zeros(4, requires_grad=True)
    bias = torch.zeros(9, requires_grad=True)
    plain = [x.detach() for x in (q, k, v)]
    assert (
        attention(*plain, "causal", sinks=sinks).requires_grad and attention(*plain, "causal", bias=bias).requires_grad
    )
    with torch.no_grad():
        assert not attention(q, k, v, "causal").requires_grad
    assert not np.isnan(attention(*plain, "causal").numpy()).any()
