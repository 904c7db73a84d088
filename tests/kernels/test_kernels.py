"""The CPU kernels beyond the contracts that every engine keeps: instruction sets, threads, forks, and the cache of code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import is_contract_precise
from subprocesses import printed

import lowtri
from lowtri.backends.cpu import launch
from lowtri.kernels import abi

COMPARED = """
    import torch, lowtri
    from lowtri.kernels import target
    torch.manual_seed(0)
    worst = 0.0
    for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):  # a digit of the greatest number there
        for nq, nk, d in ((70, 70, 32), (1, 300, 32), (130, 200, 48)):
            x = [torch.randn(1, h, n, d).to(dtype).requires_grad_() for h, n in ((4, nq), (2, nk), (2, nk))]
            results = {}
            for engine in ("cpu", "reference"):
                output = lowtri.attention(*x, "causal & window(40)", engine=engine)
                with torch.no_grad():
                    repeated = lowtri.attention(*x, "causal & window(40)", engine=engine)
                results[engine] = (output, repeated, *torch.autograd.grad(output.sum(), x))
            for a, b in zip(results["cpu"], results["reference"]):
                assert (a - b).abs().max() <= allowed * b.abs().max().clamp(min=1), (target.ISA.name, dtype, nq)
    print(target.ISA.name)
"""


def qkv(n: int = 200, d: int = 32, heads: int = 2, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, n, d, generator=generator) for _ in range(3)]


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["avx2", "baseline"])
def test_smaller_instruction_sets_compute_the_same(name: str) -> None:
    assert printed("-c", COMPARED, LOWTRI_ISA=name) == name


def test_numpy_without_torch_runs_on_python_threads() -> None:
    code = """
        import sys, numpy as np, lowtri
        from lowtri.kernels import threads
        real, members = threads._python_team, []
        threads._python_team = lambda code, record, count: (members.append(count), real(code, record, count))
        x = np.random.default_rng(0).normal(size=(1, 4, 600, 32)).astype(np.float32)
        output = lowtri.attention(x, x, x, "causal", engine="cpu")
        assert "torch" not in sys.modules
        print(members, abs(output - lowtri.attention(x, x, x, "causal", engine="reference")).max() < 1e-5)
    """
    assert printed("-c", code, OMP_NUM_THREADS="2") == "[2] True"


def test_decoding_under_a_window_reads_the_keys_in_it(monkeypatch) -> None:
    seen, real = [], launch.Launch.run_at

    def run_at(self, prepared, *addresses):
        numbers = np.frombuffer(bytes(abi.DECODE.run_format.size) + prepared, abi.DECODE.dtype)
        seen.append(tuple(int(numbers[name][0]) for name in ("first_key", "nk", "visible")))
        return real(self, prepared, *addresses)

    monkeypatch.setattr(launch.Launch, "run_at", run_at)
    q, k, v = (x[:, :, -n:] for x, n in zip(qkv(n=500), (1, 500, 500), strict=True))
    for mask in ("causal & window(100)", "causal & (window(100) | first(4))"):
        output = lowtri.attention(q, k, v, mask, engine="cpu")
        assert is_contract_precise(output, q, k, v, mask)
    assert [x[:2] for x in seen] == [(400, 100), (0, 500)]
    assert not seen[0][2] and seen[1][2]


def test_a_window_over_many_queries_needs_little_memory() -> None:
    """65,536 queries: scores written out would take 17 GB."""
    q, k, v = (x.numpy() for x in qkv(n=65_536, d=16, heads=1))
    output = lowtri.attention(q, k, v, "causal & window(64)", engine="cpu")
    last = (q[:, :, -8:], k[:, :, -128:], v[:, :, -128:])
    assert is_contract_precise(output[:, :, -8:], *last, "causal & window(64)")


@pytest.mark.parametrize("size", [1e4, 1e7, 1e10, 1e15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_huge_scores_give_the_mean_of_equals_and_gradients_that_are_numbers(dtype: torch.dtype, size: float) -> None:
    x = torch.full((1, 2, 200, 64), size, dtype=dtype).requires_grad_()
    v = torch.ones(1, 2, 200, 64, dtype=dtype).requires_grad_()
    for sign in (1, -1):
        output = lowtri.attention(sign * x, x, v, "causal", engine="cpu")
        assert (output - 1).abs().max() <= 2 * torch.finfo(dtype).eps
        assert all(torch.isfinite(d).all() for d in torch.autograd.grad(output.sum(), (x, v)))
        one = lowtri.attention(sign * x[:, :, :1].detach(), x.detach(), v.detach(), "full", engine="cpu")
        assert (one - 1).abs().max() <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("nq", [1, 7, 40], ids=["one query", "few", "a tile"])
@pytest.mark.parametrize("mean", [0, 10])
def test_long_sums_lose_no_more_digits_than_the_plain_formula(nq: int, mean: float) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 8, n, 64, generator=generator) for n in (nq, 8192, 8192))
    v += mean
    exact = torch.softmax(q.double() @ k.double().mT / 8, -1) @ v.double()
    plain = torch.softmax(q @ k.mT / 8, -1) @ v

    def error(x: torch.Tensor) -> float:
        return float((x.double() - exact).pow(2).mean().sqrt())

    assert error(lowtri.attention(q, k, v, "full", engine="cpu")) <= 2 * error(plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e8])
def test_keys_of_other_queries_do_not_change_a_bit(dtype: torch.dtype, poison: float) -> None:
    q, k, v = (x.to(dtype) for x in qkv(118, 64, 1))

    def early(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:  # queries that never see key 60
        return lowtri.attention(q, k, v, "window(17)", engine="cpu")[:, :, :60]

    expected = early(k, v)
    for place in (0, 1):
        arrays = [k.clone(), v.clone()]
        arrays[place][0, 0, 60, 3] = poison
        assert torch.equal(early(*arrays), expected)
