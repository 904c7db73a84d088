"""Functions that end their process: with ``isolate=True`` and on the command line they are findings with their case."""

from __future__ import annotations

import ctypes
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtri
from lowtri.cli.main import main
from lowtri.errors import CallError, UndecidedError

FILE = """
import ctypes, os, lowtri
print("printed by the file")
def crashing(q, k, v, mask):
    print("printed by the function")
    ctypes.CDLL(None).puts(b"printed by C")
    if q.shape[2] == 64:
        ctypes.string_at(0)
    return lowtri.attention(q, k, v, mask)
def right(q, k, v, mask):
    ctypes.CDLL(None).puts(b"printed by C")
    return lowtri.attention(q, k, v, mask)
"""
TOKENS = ["causal", "64 tokens", "129 tokens", "full"]


def verify(attend: Any, **options: Any) -> Any:
    return lowtri.verify(attend, **{"dtypes": ["float32"], "cases": TOKENS, "isolate": True, **options})


def crashing(q: Any, k: Any, v: Any, mask: Any) -> Any:
    if q.shape[2] == 64:
        ctypes.string_at(0)
    if q.shape[2] == 129:
        os._exit(3)
    return lowtri.attention(q, k, v, mask)


def test_a_crash_is_a_finding_with_its_case() -> None:
    report = verify(crashing)
    assert report.mistakes == ("ends its process",) and report.exit_code == 1 and report.level == "wrong"
    assert [(one.case, one.where) for one in report.wrong] == [
        ("64 tokens", "it ended its process: segmentation fault (SIGSEGV)"),
        ("129 tokens", "it ended its process: exit code 3"),
    ]
    assert report.results["causal"] == report.results["full"] == {"float32": "right"}  # before it, and after it
    assert verify(crashing, differences={"ends its process": "sizes it does not take"}).ok


def test_a_child_process_gives_the_report_of_this_one() -> None:
    """Closures, gradients, what is not offered, and notes come back."""
    factor = 1.0  # a mistake: the scale is missing

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        if q.shape[2] == 64:
            return None
        return lowtri.attention(q, k, v, mask, scale=factor).double()

    cases = [*TOKENS, "bias", "softcap"]
    inside, here = (verify(attend, cases=cases, isolate=isolate) for isolate in (True, False))
    assert inside.findings == here.findings and inside.results == here.results
    assert inside.mistakes == here.mistakes and inside.not_offered == here.not_offered
    assert set(inside.mistakes) == {"returns None", "returns float64 for inputs of float32", "scale missing"}


def test_a_child_process_after_this_one_has_used_threads() -> None:
    """torch's pool of threads is not in a forked process, which would wait for it."""
    code = (
        "import torch, lowtri\n"
        "torch.set_num_threads(2)\n"
        "torch.randn(3_000_000).exp().sum()\n"
        "def attend(q, k, v, mask):\n"
        "    torch.randn(3_000_000).exp().sum()\n"
        "    return lowtri.attention(q, k, v, mask)\n"
        "print(lowtri.verify(attend, dtypes=['float32'], cases=['full'], isolate=True, limit=30).ok)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "True\n", done.stderr


def test_the_first_call_of_a_process_may_load_libraries() -> None:
    calls = [0]

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            time.sleep(2.0)
        return lowtri.attention(q, k, v, mask)

    assert verify(attend, limit=1.5, cases=["full"]).ok


@pytest.mark.sweep
def test_no_process_is_left() -> None:
    """Neither after a call that hangs nor after an error: the pipe that all of them inherit comes to its end."""
    reading, writing = os.pipe()

    def sleeping(q: Any, k: Any, v: Any, mask: Any) -> Any:
        time.sleep(60)

    with pytest.raises(UndecidedError):
        verify(sleeping, limit=0.2)
    with pytest.raises(CallError, match=r"The simplest call .*: it ended its process: segmentation fault \(SIGSEGV\)"):
        verify(lambda q, k, v, mask: ctypes.string_at(0))
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert select.select([pipe], [], [], 10)[0] and pipe.read() == b""


@pytest.mark.parametrize("form", [["--json"], []])
def test_stdout_has_the_report_alone(form: list[str], tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text(FILE)
    command = [sys.executable, "-m", "lowtri", "verify", "k.py:crashing", "--dtypes", "float32", "--cases", "64 tokens"]
    done = subprocess.run([*command, *form], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1 and "printed by the file" in done.stderr and "printed by the function" in done.stderr
    assert "printed" not in done.stdout
    if form:
        fields = json.loads(done.stdout)
        assert fields["mistakes"] == ["ends its process"] and fields["findings"][0]["case"] == "64 tokens"
    else:
        assert done.stdout.startswith("crashing is wrong: ends its process (1 difference, 0 cases agree)\n")


def test_stdout_is_clean_in_this_process_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "k.py").write_text(FILE)
    options = ["--dtypes", "float32", "--cases", "64 tokens", "--no-isolate", "--json"]
    assert main(["verify", f"{tmp_path / 'k.py'}:right", *options]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["level"] == "right" and "printed by C" in said.err


def test_threads_and_a_child_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One thread of torch is what a child has, so other numbers are refused, or make the calls in this process."""
    (tmp_path / "k.py").write_text(
        "import lowtri, os\nhere = os.getpid()\ndef attend(q, k, v, mask):\n"
        "    assert os.getpid() == here\n    return lowtri.attention(q, k, v, mask)\n"
    )
    few = [f"{tmp_path / 'k.py'}:attend", "--dtypes", "float32", "--cases", "causal"]
    assert main(["verify", *few, "--threads", "2", "--isolate"]) == 2
    assert "--threads 2: a child process has one thread of torch. Fix: --no-isolate" in capsys.readouterr().err
    before = torch.get_num_threads()
    try:
        assert main(["verify", *few, "--threads", "2"]) == 0
    finally:
        torch.set_num_threads(before)
    assert main(["verify", *few]) == (2 if sys.platform == "linux" else 0)


def test_processes_that_cannot_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(CallError) as error:
        verify(crashing)
    assert str(error.value) == (
        "verify: isolate=True, but this process has used CUDA, and a child of it could not.\n"
        "Fix: isolate=False, or verify before the first use of CUDA."
    )
    monkeypatch.delattr(os, "fork")
    with pytest.raises(CallError, match=r"this system has no os\.fork\.\nFix: isolate=False"):
        verify(crashing)
