"""The kernels under stress: many threads, interrupts, workers of a DataLoader."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attention_cases import on_threads
from memory import peak_of_process
from subprocesses import printed

import lowtri


def qkv(nq: int, nk: int, seed: int = 0, d: int = 32) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, n, d, generator=source) for heads, n in ((4, nq), (2, nk), (2, nk))]


def test_forward_backward_and_decoding_on_eight_python_threads() -> None:
    cases = [(qkv(1 if i % 2 else 100, 300, seed=i), ("causal", "causal & window(40)")[i % 3 == 0]) for i in range(8)]

    def run(i: int) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_(i % 4 < 2) for x in cases[i][0]]
        output = lowtri.attention(*leaves, cases[i][1], engine="cpu")
        return [output.detach(), *(torch.autograd.grad(output.sum(), leaves) if i % 4 < 2 else ())]

    def compare() -> None:
        alone = [run(i) for i in range(8)]
        with ThreadPoolExecutor(8) as pool:
            for actual, expected in zip(pool.map(run, [*range(8)] * 10), alone * 10, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))

    on_threads((2,), compare)


def test_in_the_workers_of_a_data_loader() -> None:
    code = """
        import torch, lowtri
        torch.set_num_threads(2)
        x = torch.randn(1, 4, 200, 32)
        mine = lowtri.attention(x, x, x, "causal", engine="cpu")  # starts this process's team before the fork

        class Rows(torch.utils.data.Dataset):
            def __len__(self): return 6
            def __getitem__(self, i): return lowtri.attention(x, x, x, "causal", engine="cpu")

        loader = torch.utils.data.DataLoader(Rows(), num_workers=2, batch_size=None, timeout=100)
        print(sum(torch.equal(row, mine) for row in loader))
    """
    assert printed("-c", code, OMP_NUM_THREADS="2") == "6"


INTERRUPTED = """
    import ctypes, os, signal, threading, time

    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "2"  # a team, also where the tests run with one thread
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes of a shell have no handler
    import numpy as np
    {imports}
    import lowtri
    from lowtri.backends.cpu import launch
    from lowtri.kernels import abi

    rng = np.random.default_rng(0)
    small, large = (
        [rng.normal(size=(1, 4, n, 64)).astype(np.float32) for _ in range(3)] for n in (64, {n})
    )
    {convert}
    right = lowtri.attention(*small, "full", engine="cpu")
    real, seen = launch.run_team, []

    def run_team(code, address, members):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.perf_counter()
        try:
            real(code, address, members)
        finally:
            record = np.frombuffer(ctypes.string_at(address, abi.FORWARD.dtype.itemsize), abi.FORWARD.dtype)[0]
            counts = record["next_task"]["count"] - record["tasks"], record["next_thread"]["count"]
            seen.append((time.perf_counter() - began, *counts))

    launch.run_team = run_team
    for _ in range(5):  # on a busy machine the signal may come before the kernel begins, or after it ends
        seen.clear()
        inside = True
        try:
            lowtri.attention(*large, "full", engine="cpu")
            inside = False
            time.sleep(0.5)
        except KeyboardInterrupt:
            if inside and seen and seen[0][0] > 0.05:
                # Each thread leaves with one number past the last task, so all are done.
                print("interrupted", seen[0][1] == seen[0][2])
                break
    launch.run_team = real
    again = lowtri.attention(*small, "full", engine="cpu")
    print(bool((np.asarray(again) == np.asarray(right)).all()))
"""


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_an_interrupt_is_raised_when_all_threads_are_done(library: str) -> None:
    """With torch the team is OpenMP's, with NumPy alone it is Python threads."""
    with_torch = library == "torch"
    imports = "import torch" if with_torch else ""
    convert = "small, large = ([torch.from_numpy(x) for x in each] for each in (small, large))" if with_torch else ""
    n = int(9000 / float(os.environ.get("TEST_SLOWNESS", 1)) ** 0.5)  # as long a call in an emulator
    program = INTERRUPTED.format(imports=imports, convert=convert, n=n)
    assert printed("-c", program, OMP_NUM_THREADS="2").split("\n") == ["interrupted True", "True"]


@pytest.mark.not_emulated  # the code that could leak is the same everywhere
def test_ten_thousand_calls_do_not_leak_memory() -> None:
    (q, k, v), leaves = qkv(1, 64), [x.requires_grad_() for x in qkv(32, 32, d=16)]

    def work(calls: int) -> int:
        for i in range(calls):
            lowtri.attention(q, k, v, "causal & window(9)", engine="cpu")
            if i % 10 == 0:
                lowtri.attention(*leaves, lowtri.causal(), engine="cpu").sum().backward()
        return peak_of_process()

    before = work(1000)
    assert work(10_000) - before < 8 * 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first", [0, 3, 16, 40])
def test_queries_with_large_scores_beside_others(first, dtype):
    # Large scores are rounded another way, for a vector of queries at a time; the other queries must not change.
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 150, 32).to(dtype) for _ in range(3))
    usual = lowtri.attention(q, k, v, "causal", engine="cpu")
    large = q.clone()
    large[..., first : first + 16, :] *= 2.0**24
    out = lowtri.attention(large, k, v, "causal", engine="cpu")
    others = torch.ones(150, dtype=torch.bool)
    others[first : first + 16] = False
    assert torch.equal(out[..., others, :], usual[..., others, :])
    exact = lowtri.attention(large.double(), k.double(), v.double(), "causal", engine="reference")
    plain = lowtri.attention(large, k, v, "causal", engine="formula")
    allowed = 2 * (plain.double() - exact).abs().max() + 2 * torch.finfo(dtype).eps * v.abs().max()
    assert (out.double() - exact).abs().max() <= allowed
