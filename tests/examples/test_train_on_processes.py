"""examples/train on several processes: it learns what one process learns, and goes on where a killed run stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Ranks
from train_on_ranks import RECIPE, Training, training_run

from processes import processes

PROGRAM = Path(__file__).parents[2] / "examples" / "train" / "train.py"
LIMIT = 300  # seconds for one run


def close(found: dict[str, Any], expected: dict[str, Any], limit: float = 1e-5) -> None:
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=limit)
    np.testing.assert_allclose(found["validation"], expected["validation"], rtol=limit)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert found["weights"][name].dtype == np.float32
        assert np.abs(found["weights"][name] - weight).max() < 20 * limit, name


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return training_run(None, Training(1, 1))


@pytest.mark.sweep
@pytest.mark.parametrize(("dp", "sp"), [(2, 2), (1, 4), (4, 1)])
def test_several_processes_learn_what_one_learns(ranks: Ranks, alone: dict[str, Any], dp: int, sp: int) -> None:
    results = ranks.run(training_run, Training(dp, sp))
    close(results[0], alone)
    assert all(result["losses"] == results[0]["losses"] and not result["weights"] for result in results[1:])


def test_a_model_of_transformers_shares_rows_and_tokens(ranks: Ranks) -> None:
    close(ranks.run(training_run, Training(2, 2, "llama"))[0], training_run(None, Training(1, 1, "llama")))


def test_a_batch_smaller_than_the_groups(ranks: Ranks) -> None:
    """A group without rows takes part, and counts for nothing."""
    small = replace(RECIPE, batch=3, steps=2)
    close(ranks.run(training_run, Training(4, 1, recipe=small))[0], training_run(None, Training(1, 1, recipe=small)))


@pytest.mark.parametrize("kind", ["decoder", "llama"])
def test_bfloat16_keeps_float32_weights(ranks: Ranks, kind: str) -> None:
    half = replace(RECIPE, bf16=True)
    expected = training_run(None, Training(1, 1, kind))
    close(training_run(None, Training(1, 1, kind, half)), expected, limit=2e-3)
    found = ranks.run(training_run, Training(2, 2, kind, half))[0]
    close(found, expected, limit=2e-3)
    assert found["losses"] != expected["losses"]


def test_a_run_moves_from_several_processes_to_one_and_back(
    ranks: Ranks, alone: dict[str, Any], tmp_path: Path
) -> None:
    first = ranks.run(training_run, Training(2, 2, folder=tmp_path, stop=2))[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]
    with processes(1):
        second = training_run(None, Training(1, 1, folder=tmp_path, stop=3))
    assert second["begun"] == 2 and [path.name for path in tmp_path.iterdir()] == ["step-3"]
    third = ranks.run(training_run, Training(1, 4, folder=tmp_path))[0]
    assert third["begun"] == 3
    close({**third, "losses": first["losses"] + second["losses"] + third["losses"]}, alone)


def test_a_resumed_run_is_bit_equal_on_as_many_processes(ranks: Ranks, tmp_path: Path) -> None:
    first = ranks.run(training_run, Training(2, 2, folder=tmp_path, stop=2))[0]
    resumed = ranks.run(training_run, Training(2, 2, folder=tmp_path))[0]
    unbroken = ranks.run(training_run, Training(2, 2))[0]
    assert first["losses"] + resumed["losses"] == unbroken["losses"]
    assert resumed["validation"] == unbroken["validation"]
    assert all(np.array_equal(resumed["weights"][name], weight) for name, weight in unbroken["weights"].items())


# The program under torchrun.


def torchrun(count: int, *arguments: str | Path) -> subprocess.Popen[str]:
    """Start a run; torchrun takes a free port."""
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    command += [f"--nproc-per-node={count}", str(PROGRAM), *map(str, arguments)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> str:
    """What a run that must succeed prints."""
    try:
        printed, errors = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:  # torchrun ends its processes; killed, it would leave them behind
            process.terminate()
            process.wait(60)
    assert process.returncode == 0, errors
    return printed


def held_out(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"held out ([\d.]+)", printed)]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    """The text, and the options of a small run of 40 steps with a checkpoint each four."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(" ".join(f"{n} green bottles hanging on the wall." for n in range(300)))
    sizes = "--vocabulary 258 --hidden 16 --layers 1 --heads 2 --context 128 --batch 4 --steps 40 --every 4"
    return [text, *sizes.split()]


@pytest.mark.sweep
def test_sweep_torchrun_shares_rows_or_tokens(words: list[str | Path], tmp_path: Path) -> None:
    expected = finish(torchrun(1, *words, "--out", tmp_path / "one"))
    for sp in (1, 2):
        printed = finish(torchrun(2, *words, "--out", tmp_path / f"sp-{sp}", "--sp", str(sp)))
        np.testing.assert_allclose(held_out(printed), held_out(expected), atol=2e-4)
        assert printed.count("step 40:") == 1, "one process prints"
        assert (tmp_path / f"sp-{sp}" / "model.safetensors").exists()
    printed = finish(
        torchrun(2, *words, "--out", tmp_path / "llama", "--sp", "2", "--config", "llama", "--bf16", "--lr", "0.01")
    )
    assert held_out(printed)[-1] < held_out(printed)[0] - 1


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


@pytest.mark.sweep
def test_sweep_a_killed_run_goes_on_on_one_process_or_two(words: list[str | Path], tmp_path: Path) -> None:
    unbroken = tmp_path / "unbroken"
    expected = held_out(finish(torchrun(2, *words, "--out", unbroken)))
    for count in (1, 2):
        folder = tmp_path / f"resumed-on-{count}"
        process = torchrun(2, *words, "--out", folder)
        until = time.monotonic() + LIMIT
        while not list(folder.glob("state/step-*")):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        os.kill(worker(process, 1), signal.SIGKILL)
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode != 0 and not (folder / "model.safetensors").exists(), "killed before its end"
        assert re.search(r"rank +: 1 \(.*\n +exitcode +: -9", errors), errors
        found = held_out(finish(torchrun(count, *words, "--out", folder)))
        assert 0 < len(found) < len(expected), "it went on from a checkpoint"
        np.testing.assert_allclose(found, expected[-len(found) :], atol=2e-4)
        if count == 2:
            assert (folder / "model.safetensors").read_bytes() == (unbroken / "model.safetensors").read_bytes()
