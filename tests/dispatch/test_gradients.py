"""Gradients: by finite differences in float64, for every input, every output and every engine that takes them; and twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import ENGINES, able, draw, near, with_gradients
from torch.autograd import gradcheck, gradgradcheck

import lowtri
from lowtri import attention, causal, first, full, heads, keys, table, window
from lowtri.backends import formula as tiles
from lowtri.backends.cpu.launch import Launch
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


# Masks and options by themselves; every combination is a sweep.
COMBINED = [
    (mask, option) if mask == "causal" or option == "plain" else pytest.param(mask, option, marks=pytest.mark.sweep)
    for mask in MASKS
    for option in OPTIONS
]


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

    # Along one random direction: every entry of a second derivative would be minutes.
    return check(run, leaves, atol=1e-6, rtol=1e-5, fast_mode=check is gradgradcheck)


@pytest.mark.parametrize(("mask", "options"), COMBINED)
def test_finite_differences_of_the_output(mask, options):
    leaves, names, plain = small(MASKS[mask], OPTIONS[options])
    ran = able(*leaves[:3], MASKS[mask], **dict(zip(names, leaves[3:], strict=True)), **plain)
    for engine in ran:
        assert checked(engine, MASKS[mask], OPTIONS[options]), engine
    assert {"reference", "formula"} <= set(ran)


@pytest.mark.parametrize("options", ["plain", "bias of one row, sinks, softcap"])
@pytest.mark.parametrize(
    "mask", ["causal", *(pytest.param(m, marks=pytest.mark.sweep) for m in MASKS if m != "causal")]
)
@pytest.mark.parametrize("asked", [{"return_lse": True}, {"return_weights": True, "return_lse": True}], ids=str)
def test_finite_differences_of_weights_and_log_sum_exp(mask, options, asked):
    leaves, names, plain = small(MASKS[mask], OPTIONS[options])
    for engine in able(*leaves[:3], MASKS[mask], **dict(zip(names, leaves[3:], strict=True)), **plain, **asked):
        assert checked(engine, MASKS[mask], OPTIONS[options], **asked), engine


@pytest.mark.parametrize(("mask", "options"), COMBINED)
def test_finite_differences_of_the_gradients(mask, options):
    """Every engine, of the output, and of what else is returned."""
    leaves, names, plain = small(MASKS[mask], OPTIONS[options])
    named = dict(zip(names, leaves[3:], strict=True))
    for engine in able(*leaves[:3], MASKS[mask], **named, **plain):
        assert checked(engine, MASKS[mask], OPTIONS[options], gradgradcheck), engine
    for engine in able(*leaves[:3], MASKS[mask], return_lse=True, **named, **plain):
        assert checked(engine, MASKS[mask], OPTIONS[options], gradgradcheck, return_lse=True), engine


def test_finite_differences_of_the_gradients_of_weights():
    options = OPTIONS["bias of one row, sinks, softcap"]
    for engine in ("formula", "reference"):
        assert checked(engine, MASKS["window"], options, gradgradcheck, return_weights=True, return_lse=True), engine


@pytest.mark.parametrize("n", [48, 512])
def test_a_gradient_of_a_gradient_misses_nothing(n):
    """q, k and v of one source, and an output whose own gradient needs none: attention has a part of its own in the second one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, n, 64, dtype=torch.float64, generator=generator, requires_grad=True)
    w = (torch.randn(64, 64, dtype=torch.float64, generator=generator) / 8).requires_grad_()

    def second(engine: str) -> torch.Tensor:
        q = x @ w
        (first_one,) = torch.autograd.grad(attention(q, q, q, "causal", engine=engine).sum(), x, create_graph=True)
        return torch.autograd.grad(first_one.square().mean(), w)[0]

    exact = second("formula")
    for engine in ("auto", *able(x, x, x, "causal")):
        assert torch.allclose(second(engine), exact, rtol=1e-9), engine


def test_a_gradient_of_a_gradient_through_what_others_depend_on():
    """k and v made of q: what reaches q through them is counted once."""
    q = draw(hq=2, hkv=2, nq=6, nk=6, d=4, dv=4, dtype="float64")[0].requires_grad_()

    def second(engine: str) -> torch.Tensor:
        k = q.sin()
        (first_one,) = torch.autograd.grad(
            attention(q, k, k * q, "causal", engine=engine).square().sum(), q, create_graph=True
        )
        return torch.autograd.grad(first_one.square().sum(), q)[0]

    for engine in ("auto", *able(q, q, q, "causal")):
        assert torch.allclose(second(engine), second("formula"), rtol=1e-9), engine


def test_a_transform_over_a_backward():
    """torch.vmap and torch.func over gradients of a graph that was recorded outside of them."""
    q, k, v = (x.requires_grad_() for x in draw(nq=6, nk=6, dtype="float64"))
    for engine in ("auto", *able(q, k, v, "causal")):
        out = attention(q, k, v, "causal", engine=engine)
        starts = torch.randn(3, *out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        many = torch.vmap(lambda d, out=out: torch.autograd.grad(out, q, d, retain_graph=True)[0])(starts)
        for found, start in zip(many, starts, strict=True):
            assert torch.allclose(found, torch.autograd.grad(out, q, start, retain_graph=True)[0]), engine


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, inside forward mode
def test_gradients_and_forward_mode_of_a_backward():
    """torch.func.grad and jvp of a backward, by the gradient of the output, over a graph that was recorded outside of them."""
    q, k, v = (x.requires_grad_() for x in draw(nq=6, nk=6, dtype="float64"))
    sinks = torch.ones(q.shape[1], dtype=torch.float64)  # no gradient is wanted of them
    for engine in ("auto", *able(q, k, v, "causal", sinks=sinks)):

        def run(q: Any, engine: str = engine) -> Any:
            return attention(q, k, v, "causal", engine=engine, sinks=sinks)

        out = run(q)
        start, along, of_q = (torch.randn(x.shape, dtype=x.dtype) for x in (out, out, q))

        def back(d: Any, record: bool = False, out: Any = out) -> Any:
            return torch.autograd.grad(out, (q, k, v), d, retain_graph=True, create_graph=record)

        found, expected = torch.func.jvp(back, (start,), (along,))[1], back(along)
        assert all(torch.allclose(a, b) and not a.requires_grad for a, b in zip(found, expected, strict=True)), engine
        found = torch.func.grad(lambda d, back=back, of_q=of_q: (back(d, True)[0] * of_q).sum())(along)
        assert torch.allclose(found, torch.autograd.functional.jvp(run, q, of_q)[1]), engine


def test_a_tensor_that_outlives_its_transform_is_a_constant():
    q, k, _ = draw(b=1, hq=2, hkv=2, nq=6, nk=6)
    kept: list[torch.Tensor] = []
    torch.func.grad(lambda x: kept.append(2 * x) or (x * x).sum())(q)
    k = k.requires_grad_()
    for engine in ("auto", *able(kept[0], k, k, "causal")):
        (expected,) = torch.autograd.grad(attention(2 * q, k, k, "causal", engine=engine).square().sum(), k)
        for _ in range(2):  # a graph of its own would be freed by the first
            k.grad = None
            attention(kept[0], k, k, "causal", engine=engine).square().sum().backward()
            assert k.grad is not None and near(k.grad, expected, "float32"), engine


def test_a_second_backward_over_one_graph():
    """retain_graph=True: the same gradients again."""
    q, k, v = (x.requires_grad_() for x in draw(nq=6, nk=6))
    for engine in able(q, k, v, "causal"):
        out = attention(q, k, v, "causal", engine=engine).sum()
        once, again = (torch.autograd.grad(out, (q, k, v), retain_graph=keep) for keep in (True, False))
        assert all(map(torch.equal, once, again)), engine
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out, q)


TRANSFORMED = {"two heads": {}, "groups": {"hq": 4, "hkv": 2}, "many tokens": {"b": 1, "nq": 70, "nk": 70}}


@pytest.mark.parametrize("tile", [1, 2**23])
@pytest.mark.parametrize("sizes", TRANSFORMED)
def test_many_gradients_at_once(sizes, tile, monkeypatch):
    """is_grads_batched, and jacobian(vectorize=True) above it, give what one gradient after the other gives."""
    monkeypatch.setattr(tiles, "_SCORES_IN_TILE", tile)
    PREPARED.clear()
    q, k, v = (x.requires_grad_() for x in draw(**{"hq": 2, "hkv": 2, **TRANSFORMED[sizes]}, dtype="float64"))
    for engine in ("auto", *able(q, k, v, "window(5)")):
        out = attention(q, k, v, "window(5)", engine=engine)
        starts = torch.randn(3, *out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for record in (False, True):
            found = torch.autograd.grad(
                out, (q, k, v), starts, is_grads_batched=True, retain_graph=True, create_graph=record
            )
            for i, start in enumerate(starts):
                one = torch.autograd.grad(out, (q, k, v), start, retain_graph=True)
                assert all(torch.allclose(f[i], o, atol=1e-12) for f, o in zip(found, one, strict=True)), engine
                if engine == "cpu" and not record:  # the kernel gives each of them
                    assert all(torch.equal(f[i], o) for f, o in zip(found, one, strict=True))
            assert all(f.requires_grad == record for f in found), engine

        def some(v: Any, engine: str = engine) -> Any:
            return attention(q, k, v, "window(5)", engine=engine)[:, :, -1].sum((0, 1))

        whole, by_row = (torch.autograd.functional.jacobian(some, v, vectorize=how) for how in (True, False))
        assert torch.allclose(whole, by_row, atol=1e-12), engine


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, inside forward mode
@pytest.mark.parametrize("options", ["plain", "softcap", "bias by head"])
def test_torchs_transforms(options):
    """Forward mode, vmap, and the transforms made of them, by auto and the formula; an engine that cannot says so."""
    (q, k, v, *others), names, plain = small(causal(), OPTIONS[options])
    q, k, v = q.detach(), k.detach(), v.detach()
    named = {**dict(zip(names, (x.detach() for x in others), strict=True)), **plain}
    ones = torch.ones_like(q)
    for engine in ("auto", "formula"):

        def run(q: Any, engine: str = engine) -> Any:
            return attention(q, k, v, "causal", engine=engine, **named)

        def total(q: Any, run: Any = run) -> Any:
            return run(q).square().sum()

        exact = torch.autograd.functional.jvp(run, q, ones)[1]
        assert torch.allclose(torch.func.jvp(run, (q,), (ones,))[1], exact), engine
        with torch.autograd.forward_ad.dual_level():
            dual = run(torch.autograd.forward_ad.make_dual(q, ones))
            assert torch.allclose(torch.autograd.forward_ad.unpack_dual(dual).tangent, exact), engine
        many = torch.stack([q, q + 1, -q])
        assert torch.allclose(torch.vmap(run)(many), torch.stack([run(x) for x in many])), engine
        assert torch.allclose(torch.vmap(torch.vmap(run))(many[None])[0], torch.vmap(run)(many)), engine
        slope = torch.autograd.functional.jacobian(total, q)
        assert torch.allclose(torch.func.grad(total)(q), slope) and torch.allclose(torch.func.jacfwd(total)(q), slope)
        hessian = torch.autograd.functional.hessian(total, q)
        assert torch.allclose(torch.func.hessian(total)(q), hessian), engine
        assert torch.allclose(torch.autograd.functional.hessian(total, q, vectorize=True), hessian), engine
    for engine in ("cpu", "sdpa", "reference"):
        if engine in able(q, k, v, "causal", **named):
            with pytest.raises(lowtri.EngineError, match=r"inside a transform|forward-mode"):
                torch.func.jvp(lambda q, e=engine: attention(q, k, v, "causal", engine=e, **named), (q,), (ones,))


def test_the_formula_can_be_differentiated_twice_tile_by_tile(monkeypatch):
    """Two tiles of queries, the second computed again for its gradient, and for the gradient of that."""
    monkeypatch.setattr(tiles, "_SCORES_IN_TILE", 1)
    PREPARED.clear()
    q, k, v = (x.requires_grad_() for x in draw(b=1, hq=1, hkv=1, nq=66, nk=66, d=2, dv=1, dtype="float64"))

    def run(*x: Any) -> Any:
        return attention(*x, "window(3)", engine="formula")[:, :, 62:]

    assert gradcheck(run, (q, k, v), fast_mode=True) and gradgradcheck(run, (q, k, v), fast_mode=True)


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


def test_an_input_changed_in_place_is_noticed():
    """Between forward and backward: torch raises, instead of a gradient of what is no longer there."""
    for engine in able(*(x.requires_grad_() for x in draw(nq=4, nk=4)), "causal"):
        q, k, v = (x.requires_grad_() for x in draw(nq=4, nk=4))
        base = k * 1
        out = attention(q, base, v, "causal", engine=engine)
        base.detach().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_no_gradient_is_dropped_in_silence():
    """auto takes an engine with gradients; one requested by name either gives them or raises."""
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
    assert attention(*plain, "causal", sinks=sinks).requires_grad
    assert attention(*plain, "causal", bias=bias).requires_grad
    with torch.no_grad():
        assert not attention(q, k, v, "causal").requires_grad
    assert not np.isnan(attention(*plain, "causal").numpy()).any()


def test_hooks_of_saved_tensors_may_change_their_layout():
    """Offloading and compression give the backward other strides than the forward had."""
    x = torch.randn(2, 64, 4, 96, generator=torch.Generator().manual_seed(0)).requires_grad_()
    q, k, v = x.transpose(1, 2).split(32, -1)
    for engine in ("auto", *able(q, k, v, "causal")):
        (expected,) = torch.autograd.grad(attention(q, k, v, "causal", engine=engine).square().sum(), x)
        for pack in (torch.clone, torch.Tensor.contiguous):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
                output = attention(q, k, v, "causal", engine=engine)
            (actual,) = torch.autograd.grad(output.square().sum(), x)
            assert near(actual, expected, "float32"), engine


def test_another_layout_of_saved_tensors_is_prepared_once(monkeypatch):
    prepared: list[str] = []
    init = Launch.__init__

    def counted(self: Launch, abi: Any, *others: Any, **options: Any) -> None:
        prepared.append(abi.name)
        init(self, abi, *others, **options)

    monkeypatch.setattr(Launch, "__init__", counted)
    PREPARED.clear()
    x = torch.randn(2, 20, 4, 96, generator=torch.Generator().manual_seed(0)).requires_grad_()
    q, k, v = x.transpose(1, 2).split(32, -1)
    expected = None
    for step in range(3):
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda saved: saved):
            output = attention(q, k, v, "causal", engine="cpu")
        (actual,) = torch.autograd.grad(output.square().sum(), x)
        expected = actual if expected is None else expected
        assert torch.equal(actual, expected) and len(prepared) == 2, (step, prepared)  # the forward and its gradients


def test_a_gradient_that_is_not_finite_of_a_query_without_keys_reaches_no_sink():
    q, k, v = (x.requires_grad_() for x in draw(b=1, hq=2, hkv=2, nq=20, nk=20))
    positions = torch.arange(20)
    blind = torch.where(positions == 5, -1, positions)
    d_output = torch.ones(1, 2, 20, v.shape[-1])
    d_output[:, :, 5] = torch.nan
    for engine in ("cpu", "formula", "reference"):
        sinks = torch.zeros(2, requires_grad=True)
        output = attention(q, k, v, "causal", q_positions=blind, k_positions=positions, sinks=sinks, engine=engine)
        for gradient in torch.autograd.grad(output, (q, k, v, sinks), d_output):
            assert gradient.isfinite().all(), engine


def test_a_returned_log_sum_exp_may_be_changed_in_place():
    q, k, v = (x.requires_grad_() for x in draw(nq=20, nk=20))
    (expected,) = torch.autograd.grad(attention(q, k, v, "causal", engine="cpu").sum(), q)
    output, lse = attention(q, k, v, "causal", engine="cpu", return_lse=True)
    with torch.no_grad():
        lse.fill_(0)
    assert near(torch.autograd.grad(output.sum(), q)[0], expected, "float32")
