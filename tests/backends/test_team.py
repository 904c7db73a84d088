"""The number of threads that a call of the kernels runs on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import lowtri
from lowtri.backends import cpu
from lowtri.backends.cpu import launch
from lowtri.dispatch.prepared import PREPARED
from lowtri.ops.arguments import describe
from lowtri.ops.call import CallOptions

WORK_PER_THREAD = 2**20


@pytest.fixture(autouse=True)
def _grain_and_threads(monkeypatch: pytest.MonkeyPatch):
    """Four threads, and the work of each as users have it; all other tests run with another."""
    monkeypatch.setattr(launch, "WORK_PER_THREAD", WORK_PER_THREAD)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    PREPARED.clear()
    yield
    PREPARED.clear()
    torch.set_num_threads(before)


def prepared(nq: int, nk: int, mask: str = "causal", *, heads: int = 4, dtype=torch.float32, numpy: bool = False):
    q, k, v = (torch.zeros(1, h, n, 64, dtype=dtype) for h, n in ((heads, nq), (4, nk), (4, nk)))
    arrays = [x.numpy() for x in (q, k, v)] if numpy else [q, k, v]
    call, _ = describe(*arrays, mask, CallOptions())
    ready = cpu.prepare(replace(call, threads=4))
    return getattr(ready, "own", ready)  # of a decode call, at these keys


@pytest.mark.parametrize(
    ("nq", "nk", "mask", "how", "threads"),
    [
        (16, 16, "causal", {}, 1),
        (48, 48, "causal", {}, 1),
        (64, 64, "causal", {}, 2),  # 4 heads * 64 * 64 * 128
        (80, 80, "causal", {}, 3),
        (128, 128, "causal", {}, 4),
        (128, 128, "causal", {"numpy": True}, 1),  # threads that have to be started
        (512, 512, "causal", {"numpy": True}, 4),
        (16, 256, "causal", {}, 2),
        (640, 640, "strided(640)", {}, 4),  # few pairs, but tiles are computed whole
        (256, 256, "causal & chunks(64)", {}, 4),
        (1, 64, "causal", {}, 1),
        (1, 256, "causal", {}, 1),
        (1, 512, "causal", {}, 2),  # 4 heads * 512 * 128 * 4 bytes
        (1, 512, "causal", {"dtype": torch.bfloat16}, 1),
        (1, 8192, "causal", {}, 4),
        (1, 8192, "causal & window(64)", {}, 1),  # only the keys in the window are read
        (8, 256, "causal", {"heads": 32}, 4),  # few keys, and many queries that multiply them
    ],
)
def test_a_call_has_as_many_threads_as_its_work_is_worth(nq: int, nk: int, mask: str, how: dict, threads: int) -> None:
    assert prepared(nq, nk, mask, **how).launch.threads == threads


@pytest.mark.parametrize(("n", "forward", "backward"), [(16, 1, 1), (32, 1, 1), (48, 1, 2), (128, 4, 4)])
def test_gradients_multiply_more(n: int, forward: int, backward: int) -> None:
    x = torch.ones(1, 4, n, 64, requires_grad=True)
    lowtri.attention(x, x, x, "causal", engine="cpu").sum().backward()
    (ready,) = PREPARED.calls.values()
    (gradients,) = ready.prepared._gradients.values()
    assert (ready.prepared.launch.threads, gradients.launch.threads) == (forward, backward)


def test_a_window_counts_the_tiles_that_it_touches() -> None:
    x = torch.zeros(1, 1, 512, 64)
    for mask, tiles in (("full", 32), ("causal", 20), ("window(64)", 11)):  # of 64 x 128 pairs: each is a grain of work
        call = replace(describe(x, x, x, mask, CallOptions())[0], threads=64)
        assert launch.tile_threads("forward", call, call.plan()) == tiles


def test_a_call_that_sees_nothing_runs_on_one_thread() -> None:
    x = torch.zeros(1, 4, 512, 64)
    none = np.zeros((512, 512), bool)
    ready = cpu.prepare(describe(x, x, x, lowtri.table(none), CallOptions())[0])
    assert ready.launch.threads == 1
