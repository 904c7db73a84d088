"""A child process that is forked while other threads of its parent compute: it computes, too, and waits for nobody."""

from __future__ import annotations

import pytest
from subprocesses import printed

FORK = """
import os, signal, sys, threading, time, warnings
import numpy as np
import torch
import lowtri

warnings.simplefilter("ignore")  # newer Pythons warn of every fork beside threads


def forked(act):
    \"\"\"The exit code of a child that runs `act`; minus 14 if it waits for more than some seconds.\"\"\"
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            os._exit(0 if act() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""

A_LOCK_IS_HELD = """
from lowtri.dispatch.prepared import PREPARED

x = torch.randn(1, 2, 40, 16)
expected = [lowtri.attention(x, x, x, mask) for mask in ("causal", "window(3)")]
held, done = threading.Event(), threading.Event()


def hold():
    with PREPARED._lock:
        held.set()
        done.wait()


thread = threading.Thread(target=hold)
thread.start()
held.wait()
y = torch.randn(1, 2, 41, 16)  # a new signature
print(forked(lambda: all(
    torch.equal(lowtri.attention(x, x, x, mask), output) for mask, output in zip(("causal", "window(3)"), expected)
) and lowtri.attention(y, y, y, "causal").shape == y.shape and len(PREPARED) == 3))
done.set()
thread.join()
print(len(PREPARED))
"""

A_PROPERTY_IS_COMPUTED = """
from functools import cached_property
from lowtri.masks import array_masks

name, kind = next(
    (name, kind) for kind in vars(array_masks).values() if isinstance(kind, type)
    for name, value in vars(kind).items() if isinstance(value, cached_property)
)
computed, done = threading.Event(), threading.Event()
mine = vars(kind)[name]
real = mine.func


def slow(self):
    if threading.current_thread() is not threading.main_thread():
        computed.set()
        done.wait()
    return 5


mine.func = slow
thread = threading.Thread(target=lambda: mine.__get__(object.__new__(kind), kind))
thread.start()
computed.wait()
print(forked(lambda: mine.__get__(object.__new__(kind), kind) == 5))
done.set()
thread.join()
"""

TORCH_HAS_A_TEAM = """
torch.set_num_threads(2)
x = torch.randn(1, 4, 400, 64)
from lowtri.kernels import threads

lowtri.attention(x, x, x, "causal", engine="cpu")
assert threads._team_has_run
large = torch.ones(2**20)
print(forked(lambda: large.clone().sum() == 2**20))
print(torch.get_num_threads())
"""

UNDER_LOAD = """
lengths = range(1, 200)
q = torch.randn(1, 2, 200, 16)


def call(n):
    ids = np.arange(n) // 7
    return lowtri.attention(q[:, :, :n], q[:, :, :n], q[:, :, :n], lowtri.causal() & lowtri.documents(ids))


stop = threading.Event()


def work(number):
    r = np.random.default_rng(number)
    while not stop.is_set():
        call(int(r.integers(1, 200)))


call(3)
expected = {n: call(n) for n in (5, 50, 150)}
threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
for thread in threads:
    thread.start()
codes = set()
for turn in range(FORKS):
    time.sleep(0.02)
    codes.add(forked(lambda: all(torch.equal(call(n), output) for n, output in expected.items())))
    if codes != {0}:
        break
stop.set()
for thread in threads:
    thread.join()
print(*codes)
"""


def run(code: str) -> list[str]:
    return printed("-c", FORK + code).split()


def test_a_child_waits_for_no_lock_of_the_prepared_calls() -> None:
    assert run(A_LOCK_IS_HELD) == ["0", "2"], "the parent's calls stay"


def test_a_child_waits_for_no_cached_property() -> None:
    assert run(A_PROPERTY_IS_COMPUTED) == ["0"]


def test_torch_computes_in_a_child_after_a_kernel_has_started_its_team() -> None:
    assert run(TORCH_HAS_A_TEAM) == ["0", "2"], "the parent keeps its threads"


def test_children_compute_while_threads_prepare_calls() -> None:
    assert run(UNDER_LOAD.replace("FORKS", "12")) == ["0"]


@pytest.mark.sweep
def test_many_children_compute_while_threads_prepare_calls() -> None:
    assert run(UNDER_LOAD.replace("FORKS", "200")) == ["0"]
