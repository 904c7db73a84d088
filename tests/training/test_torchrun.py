"""`torchrun -m lowtri train`: torchrun names a killed process, and the run goes on from its checkpoint, on any number of processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

STEPS = 40
LIMIT = 240  # seconds for one run


def words(folder: Path, text: Path) -> list[str]:
    sizes = [
        "--vocabulary",
        "258",
        "--hidden",
        "16",
        "--layers",
        "1",
        "--heads",
        "2",
        "--context",
        "64",
        "--batch",
        "4",
    ]
    return [str(text), *sizes, "--steps", str(STEPS), "--save-every", "4", "--out", str(folder), "--threads", "1"]


def torchrun(processes: int, *arguments: str, restarts: int = 0) -> subprocess.Popen[str]:
    """Start a run; a free port is taken by torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    command += [f"--nproc-per-node={processes}", f"--max-restarts={restarts}", "-m", "lowtri", "train", *arguments]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> str:
    """What a run that must succeed says."""
    try:
        output, said = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 0, said
    return output


def worker(process: subprocess.Popen[str], rank: int) -> int:
    """The process number of a rank."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            parent = int(re.search(r"PPid:\s*(\d+)", (path.parent / "status").read_text())[1])  # type: ignore[index]
            if parent == process.pid and f"RANK={rank}".encode() in path.read_bytes().split(b"\0"):
                return int(path.parent.name)
        except (OSError, TypeError):
            continue
    raise AssertionError(f"no process has rank {rank}")


def kill_after_a_checkpoint(process: subprocess.Popen[str], folder: Path, rank: int) -> None:
    until = time.monotonic() + LIMIT
    while not list(folder.glob("training-state/step-*")):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    os.kill(worker(process, rank), signal.SIGKILL)


def losses(folder: Path) -> list[float]:
    history: Any = json.loads((folder / "training.json").read_text())["history"]
    return list(history["losses"])


@pytest.mark.sweep
def test_sweep_a_killed_run_is_named_and_goes_on_on_one_process_two_or_three(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"{n} green bottles hanging on the wall." for n in range(300)))
    unbroken = tmp_path / "unbroken"
    finish(torchrun(2, *words(unbroken, text)))
    assert len(losses(unbroken)) == STEPS
    for processes in (1, 2, 3):
        folder = tmp_path / f"resumed-on-{processes}"
        process = torchrun(2, *words(folder, text))
        kill_after_a_checkpoint(process, folder, 1)
        _, said = process.communicate(timeout=LIMIT)
        assert process.returncode != 0 and not (folder / "model.safetensors").exists(), "killed before its end"
        assert re.search(r"rank +: 1 \(.*\n +exitcode +: -9", said), said
        lines = [line for line in said.splitlines() if line.startswith("lowtri: ") and "a process of the group" in line]
        assert len(lines) <= 1, "none if torchrun ended it first"
        report = json.loads(finish(torchrun(processes, "--out", str(folder), "--resume", "--json")))
        assert report["steps"] == STEPS
        if processes == 2:
            assert losses(folder) == losses(unbroken)
            assert (folder / "model.safetensors").read_bytes() == (unbroken / "model.safetensors").read_bytes()
        np.testing.assert_allclose(losses(folder), losses(unbroken), rtol=1e-4)
        assert (folder / "training-state").exists()  # for more steps
