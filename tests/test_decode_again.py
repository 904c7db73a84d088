"""A call that only its arrays tell from one before is launched as that one was: it must not be taken for one that it is not."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import lowtri
from lowtri.engines import decode

CAUSAL = lowtri.causal()


@pytest.fixture(autouse=True)
def _nothing_kept():
    decode._ready.clear()
    yield
    decode._ready.clear()


def cache(seed: int = 0, *, heads: int = 4, kv_heads: int = 2, nq: int = 1, nk: int = 300, d: int = 32, dv: int = 32):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((heads, nq, d), (kv_heads, nk, d), (kv_heads, nk, dv))
    return [torch.randn(2, *size, generator=generator) for size in sizes]


def counted(monkeypatch) -> list[object]:
    """What was launched again, as it happens."""
    runs: list[object] = []
    real = decode._Ready.run

    def run(self, *addresses):
        runs.append(self)
        real(self, *addresses)

    monkeypatch.setattr(decode._Ready, "run", run)
    return runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [{}, {"nq": 3, "dv": 64}, {"heads": 2, "nk": 1}], ids=str)
def test_other_arrays_give_what_they_would_have_given_alone(monkeypatch, dtype, sizes) -> None:
    runs, calls = counted(monkeypatch), [[x.to(dtype) for x in cache(seed, **sizes)] for seed in range(4)]
    alone = []
    mask = lowtri.full()
    for call in calls:
        decode._ready.clear()
        alone.append(lowtri.attention(*call, mask, engine="cpu"))
    decode._ready.clear()
    assert not runs
    for call, output in zip(calls, alone, strict=True):
        assert torch.equal(lowtri.attention(*call, mask, engine="cpu"), output)
    assert len(runs) == (3 if dtype == torch.float32 or decode._ready else 0)  # without pairs bf16 goes another road


def test_what_differs_is_looked_at_anew(monkeypatch) -> None:
    runs, (q, k, v) = counted(monkeypatch), cache()
    lowtri.attention(q, k, v, CAUSAL, engine="cpu")
    wide = torch.randn(2, 300, 2, 32).transpose(1, 2)  # the same shape, other steps
    others = (
        ((q, k, v, CAUSAL), {"scale": 0.5}),
        ((q, k, v, CAUSAL), {"softcap": 3.0}),
        ((q, k, v, CAUSAL), {"bias": torch.randn(300)}),
        ((q, k, v, CAUSAL), {"sinks": torch.randn(4)}),
        ((q, k, v, CAUSAL), {"q_positions": [5]}),
        ((q, k, v, CAUSAL), {"return_lse": True}),
        ((q, k, v, lowtri.window(20)), {}),
        ((q, wide, v, CAUSAL), {}),
        ((q, k, wide, CAUSAL), {}),
        ((q, k[:, :, 1:], v[:, :, 1:], CAUSAL), {}),
        ((q.double(), k.double(), v.double(), CAUSAL), {}),
        ((q[0], k[0], v[0], CAUSAL), {}),
    )
    for arrays, options in others:
        found = lowtri.attention(*arrays, engine="cpu", **options)
        right = lowtri.attention(*arrays, engine="reference", **options)
        torch.testing.assert_close(found, right, atol=1e-5, rtol=0)
    assert not runs
    lowtri.attention(q, k, v, CAUSAL, engine="cpu", scale=1 / math.sqrt(32))  # what it is by default
    assert len(runs) == 1


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's own attention under vmap
def test_gradients_and_transforms_take_their_own_road(monkeypatch) -> None:
    runs, (q, k, v) = counted(monkeypatch), cache()
    output = lowtri.attention(q, k, v, CAUSAL, engine="cpu")
    q.requires_grad_()
    (found,) = torch.autograd.grad(lowtri.attention(q, k, v, CAUSAL, engine="cpu").sum(), q)
    assert found.abs().sum() > 0
    many = torch.vmap(lambda q, k, v: lowtri.attention(q[None], k[None], v[None], CAUSAL)[0])(q.detach(), k, v)
    torch.testing.assert_close(many, output, atol=1e-5, rtol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lowtri.attention(q.detach(), k, v, CAUSAL).dtype == torch.bfloat16
    assert not runs


def test_the_engine_is_chosen_by_the_call_and_not_by_what_ran_before(monkeypatch) -> None:
    runs, small, large = counted(monkeypatch), cache(), cache(nk=9000)
    for call, again in ((small, 0), (large, 1)):
        decode._ready.clear()
        alone = lowtri.attention(*call, CAUSAL)
        decode._ready.clear()
        lowtri.attention(*call, CAUSAL, engine="cpu")
        runs.clear()
        assert torch.equal(lowtri.attention(*call, CAUSAL), alone)
        assert len(runs) == again
        runs.clear()
        lowtri.attention(*call, CAUSAL, engine="formula")
        with pytest.raises(lowtri.EngineError, match="there is no engine 'cp'"):
            lowtri.attention(*call, CAUSAL, engine="cp")
        assert not runs


def test_the_number_of_threads_may_change_between_calls(monkeypatch) -> None:
    runs, call, before = counted(monkeypatch), cache(nk=2000), torch.get_num_threads()
    try:
        outputs = []
        for threads in (1, 2, 1, 3):
            torch.set_num_threads(threads)
            outputs.append(lowtri.attention(*call, CAUSAL, engine="cpu"))
            assert [one.launch.threads for one in runs] == [1] * (threads == 1 and len(outputs) > 1)
            runs.clear()
        assert torch.equal(outputs[0], outputs[2])
    finally:
        torch.set_num_threads(before)


def test_eight_threads_at_once() -> None:
    calls = [cache(seed) for seed in range(8)]
    alone = [lowtri.attention(*call, CAUSAL, engine="cpu") for call in calls]

    def work(number: int) -> bool:
        return all(
            torch.equal(lowtri.attention(*calls[number], CAUSAL, engine="cpu"), alone[number]) for _ in range(50)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_only_the_newest_are_kept() -> None:
    for nk in range(100, 150):
        lowtri.attention(*cache(nk=nk), CAUSAL, engine="cpu")
    assert len(decode._ready) == decode._KEPT
