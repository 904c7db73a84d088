"""Dropout: which weights are dropped is one law for all engines; nothing but seed, row, head and positions changes it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import DTYPES, EPS, draw, on_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from subprocesses import printed
from torch.utils.checkpoint import checkpoint

import lowtri
from lowtri.ops import dropout

ENGINES = ("cpu", "formula", "reference")
MASKS: tuple[Any, ...] = (
    "full",
    "causal & window(40)",
    "causal & documents(lengths=[50, 90])",
    lowtri.causal() & lowtri.keys(lengths=[140, 77]),
)


def attention(*arguments: Any, seed: int = 5, **options: Any) -> Any:
    torch.manual_seed(seed)
    return lowtri.attention(*arguments, **options)


def pattern(nq: int, nk: int, mask: Any = "full", p: float = 0.4, b: int = 2, h: int = 3, **options: Any) -> Any:
    """Which weights the call keeps, (B, H, Nq, Nk): with equal scores and unit vectors as values the output is the weights."""
    q, k, v = torch.zeros(b, h, nq, 8), torch.zeros(b, h, nk, 8), torch.eye(nk).expand(b, h, nk, nk)
    return attention(q, k, v, mask, dropout=p, **options) != 0


def law(nq: int, nk: int, p: float = 0.4, b: int = 2, h: int = 3, seed: int = 5) -> Any:
    torch.manual_seed(seed)
    positions = np.arange(nk)[None]
    return dropout.kept(int(dropout.new_seed(False)), p, (b, h), positions[:, nk - nq :], positions)


# What is dropped.


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_every_engine_drops_what_the_law_says(engine: str) -> None:
    for nq, nk in ((1, 1), (1, 300), (7, 50), (64, 96), (65, 97), (200, 200)):
        assert np.array_equal(pattern(nq, nk, engine=engine), law(nq, nk)), (nq, nk)
    for p in (0.001, 0.5, 0.999):
        assert np.array_equal(pattern(130, 130, p=p, engine=engine), law(130, 130, p)), p


@pytest.mark.parametrize("engine", ENGINES)
def test_all_or_nothing(engine: str) -> None:
    q, k, v = draw(nq=70, nk=70)
    assert not attention(q, k, v, "causal", dropout=1.0, engine=engine).any()
    x = [t.requires_grad_() for t in (q, k, v)]
    grads = torch.autograd.grad(attention(*x, "causal", dropout=1.0, engine=engine).sum(), x)
    assert not any(grad.any() for grad in grads)
    whole = attention(q, k, v, "causal", engine=engine)
    assert torch.equal(attention(q, k, v, "causal", dropout=1e-13, engine=engine), whole)  # no draw is less


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_parts_of_a_sequence_drop_what_the_whole_does(data: Any) -> None:
    """Trimmed, padded, in any order, with other keys before: positions decide."""
    n = data.draw(st.integers(1, 150))
    engine = data.draw(st.sampled_from(["cpu", "formula"]))
    rows = np.array(data.draw(st.lists(st.integers(-1, n - 1), min_size=1, max_size=70)))
    columns = np.array(data.draw(st.lists(st.integers(-1, n - 1), min_size=1, max_size=120)))
    whole = pattern(n, n, b=1, h=2)
    q, k = torch.zeros(1, 2, len(rows), 8), torch.zeros(1, 2, len(columns), 8)
    v = torch.eye(len(columns)).expand(1, 2, -1, -1)
    positions = {"q_positions": rows, "k_positions": columns}
    part = attention(q, k, v, "full", dropout=0.4, engine=engine, **positions) != 0
    is_token = torch.from_numpy((rows >= 0)[:, None] & (columns >= 0))
    assert torch.equal(part, whole[:, :, rows][..., columns] & is_token)


def test_a_cache_drops_what_the_whole_sequence_does() -> None:
    n, whole = 40, pattern(40, 40, "causal", b=1, h=2)
    for t in range(n):
        q, k, v = torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, t + 1, 8), torch.eye(t + 1).expand(1, 2, -1, -1)
        assert torch.equal(attention(q, k, v, "causal", dropout=0.4) != 0, whole[:, :, t : t + 1, : t + 1])


def test_rows_with_positions_of_their_own() -> None:
    n = 70
    positions = np.stack([np.arange(n), np.r_[-np.ones(20, int), np.arange(n - 20)]])  # left padding
    kept = pattern(n, n, "causal", q_positions=positions, k_positions=positions)
    torch.manual_seed(5)
    expected = dropout.kept(int(dropout.new_seed(False)), 0.4, (2, 3), positions, positions)
    visible = (positions[:, None, :] <= positions[:, :, None]) & (positions >= 0)[:, None] & (positions >= 0)[..., None]
    assert np.array_equal(kept, expected & visible[:, None])


def test_threads_and_layouts_change_nothing() -> None:
    q, k, v = (x.requires_grad_() for x in draw(b=2, nq=300, nk=300, d=32, dv=32))

    def run() -> list[torch.Tensor]:
        out = attention(q, k, v, "causal", dropout=0.3)
        return [out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))]

    results = on_threads((1, 2, 3), run)
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0])
        assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(results[0], other, strict=True))
    moved = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(attention(*moved, "causal", dropout=0.3), results[0][0])


ON_ANOTHER = """
    import torch, lowtri
    from lowtri.kernels import target
    assert target.ISA.name == "baseline"
    n = 130
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        q, v = torch.zeros(2, 3, n, 32, dtype=dtype), torch.eye(n, dtype=dtype).expand(2, 3, n, n)
        torch.manual_seed(5)
        out = lowtri.attention(q, q, v, "full", dropout=0.4, engine="cpu")
        torch.manual_seed(5)
        assert torch.equal(out != 0, lowtri.attention(q, q, v, "full", dropout=0.4, engine="reference") != 0)
        x = [t.clone().requires_grad_() for t in torch.randn(3, 1, 2, n, 32, dtype=torch.float64).to(dtype)]
        grads = {}
        for engine in ("cpu", "reference"):
            torch.manual_seed(5)
            y = lowtri.attention(*x, "causal & window(40)", dropout=0.4, engine=engine)
            grads[engine] = [y.detach(), *torch.autograd.grad(y.sum(), x)]
        for one, two in zip(grads["cpu"], grads["reference"]):
            assert (one - two).abs().max() < 40 * torch.finfo(dtype).eps * two.abs().max().clamp(min=1)
    print("the same")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names an instruction set of x86-64")
def test_another_instruction_set_drops_the_same() -> None:
    assert printed("-c", ON_ANOTHER, LOWTRI_ISA="baseline") == "the same"


# Values and gradients.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", ["none", "softcap", "sinks", "bias"])
def test_outputs_and_gradients_are_those_of_the_definition(options: str, dtype: str) -> None:
    given: dict[str, Any] = {
        "none": {},
        "softcap": {"softcap": 3.0},
        "sinks": {"sinks": torch.linspace(-1, 1, 4)},
        "bias": {"bias": torch.randn(1, 4, 70, 140, generator=torch.Generator().manual_seed(1))},
    }[options]
    for seed, mask in enumerate(MASKS):
        x = [t.requires_grad_() for t in draw(nq=70, nk=140, d=32, dv=48, seed=seed, dtype=dtype)]
        leaves = [*x, *(t.clone().requires_grad_() for t in given.values() if isinstance(t, torch.Tensor))]
        others = dict(zip(given, leaves[3:], strict=True)) if leaves[3:] else given
        results = {}
        for engine in ENGINES:
            out = attention(*leaves[:3], mask, dropout=0.3, engine=engine, **others)
            d_out = torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype)
            results[engine] = [out.detach(), *torch.autograd.grad(out, leaves, d_out)]
        for engine in ("cpu", "formula"):
            for i, (one, exact) in enumerate(zip(results[engine], results["reference"], strict=True)):
                size = exact.abs().max().clamp(min=1)
                assert (one - exact).abs().max() < 32 * EPS[dtype] * size, (engine, mask, i)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_by_finite_differences(engine: str) -> None:
    q, k, v = (x.requires_grad_() for x in draw(b=1, hq=2, hkv=1, nq=4, nk=6, d=4, dv=3, dtype="float64"))

    def f(*x: torch.Tensor) -> torch.Tensor:
        return attention(*x, "causal & window(5)", dropout=0.4, engine=engine)

    assert torch.autograd.gradcheck(f, (q, k, v))
    assert torch.autograd.gradgradcheck(f, (q, k, v))


def test_queries_that_see_nothing_and_what_is_hidden() -> None:
    mask = lowtri.causal() & lowtri.keys(lengths=[140, 77]) & lowtri.window(30)
    x = draw(nq=140, nk=140, d=32, dv=32)
    results = []
    for garbage in (False, True):
        q, k, v = (t.clone() for t in x)
        if garbage:
            k[1, :, 77:], v[1, :, 77:] = torch.nan, torch.inf
        leaves = [t.requires_grad_() for t in (q, k, v)]
        for engine in ("cpu", "formula"):
            out = attention(*leaves, mask, dropout=0.3, engine=engine)
            assert not out[1, :, 120:].any() and out.isfinite().all()
            results.append([out.detach(), *torch.autograd.grad(out.sum(), leaves)])
    for other in results[1:]:
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(results[0], other, strict=True))


def test_weights_and_sums_are_those_before_dropout() -> None:
    q, k, v = draw(nq=130, nk=130)
    for engine in ENGINES:
        names = {"return_weights": True, "return_lse": True, "return_received": True}
        plain = lowtri.attention(q, k, v, "causal", engine=engine, **names)
        _, *others = lowtri.attention(q, k, v, "causal", engine=engine, dropout=0.5, **names)
        assert all(torch.equal(one, two) for one, two in zip(plain[1:], others, strict=True)), engine


# The seed.


def test_the_seed_is_drawn_from_torchs_generator() -> None:
    q, k, v = (x.requires_grad_() for x in draw(nq=130, nk=130))
    one, two = (attention(q, k, v, "causal", dropout=0.3) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, lowtri.attention(q, k, v, "causal", dropout=0.3))
    torch.manual_seed(5)
    with torch.random.fork_rng():
        assert torch.equal(one, lowtri.attention(q, k, v, "causal", dropout=0.3))
    assert torch.equal(one, lowtri.attention(q, k, v, "causal", dropout=0.3))
    exact = torch.autograd.grad(one.sum(), (q, k, v))
    torch.manual_seed(5)
    again = checkpoint(lambda *x: lowtri.attention(*x, "causal", dropout=0.3), q, k, v, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(exact, torch.autograd.grad(again.sum(), (q, k, v)), strict=True))


def test_arrays_draw_from_numpys_generator() -> None:
    q, k, v = (x.numpy() for x in draw(nq=70, nk=70))
    results = []
    for engine in ("cpu", "formula", "reference", "cpu"):
        np.random.seed(3)  # noqa: NPY002
        results.append(lowtri.attention(q, k, v, "causal", dropout=0.5, engine=engine))
    assert np.array_equal(results[0], results[3])
    assert all(np.allclose(results[0], x, atol=1e-5) for x in results)
    assert not np.array_equal(results[0], lowtri.attention(q, k, v, "causal", dropout=0.5))


def test_under_vmap_all_samples_share_what_is_dropped_or_differ_as_is_asked() -> None:
    q, v = torch.zeros(4, 2, 30, 8), torch.eye(30).expand(4, 2, 30, 30)

    def f(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return lowtri.attention(q, q, v, "full", dropout=0.5)

    same = torch.vmap(f, randomness="same")(q, v) != 0
    assert all(torch.equal(same[0], x) for x in same[1:])
    other = torch.vmap(f, randomness="different")(q, v) != 0
    assert not any(torch.equal(other[0], x) for x in other[1:])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(f)(q, v)


# Which engine.


def test_torchs_own_dropout_only_by_name() -> None:
    q, k, v = draw()
    choice = lowtri.which_engine(q, k, v, "causal", dropout=0.1)
    assert choice.engine == "cpu"
    assert choice.answers["sdpa"] == "only by name: its dropout draws other numbers"
    assert choice.answers["flex"] == "no: the tensors are on cpu"
    assert lowtri.attention(q, k, v, "causal", dropout=0.1, engine="sdpa").isfinite().all()
    meta = [x.to("meta") for x in (q, k, v)]
    assert "draws" not in lowtri.which_engine(*meta, "causal", dropout=0.1).answers["sdpa"]
