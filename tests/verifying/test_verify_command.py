"""``lowtri verify`` and the fixture ``lowtri_verify``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import outcome, printed, refused

FILE = """
import time, torch, lowtri
def right(q, k, v, mask):
    return lowtri.attention(q, k, v, mask)
def inverted(q, k, v, mask):
    return lowtri.attention(q, k, v, ~mask)
def slow(q, k, v, mask):
    if mask != lowtri.full():
        time.sleep(20)
    return right(q, k, v, mask)
def closure():
    def attend(q, k, v, mask):
        return right(q, k, v, mask)
    return attend
made = closure()
not_a_function = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_kernel.py"
    path.write_text(FILE)
    return path


def test_exit_codes_and_reports(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--dtypes", "float32", "--cases", "causal"]
    right = printed(capsys, "verify", f"{file}:right", "--dtypes", "fp32,bf16", "--cases", "causal")
    assert "right is right: 2 cases agree" in right
    assert "made is right: 1 case agrees" in printed(capsys, "verify", f"{file}:made", *few)
    wrong = ["verify", f"{file}:inverted", *few]
    out, err = outcome(capsys, *wrong, "--out", tmp_path / "r.html", "--json", code=1)
    assert json.loads(out)["mistakes"] == ["mask inverted"] and "wrote" in err
    assert "mask inverted" in (tmp_path / "r.html").read_text()
    documented = printed(capsys, *wrong, "--difference", "mask inverted=True means hidden")
    assert "documented (4): True means hidden" in documented
    undecided, _ = outcome(capsys, "verify", f"{file}:slow", *few, "--limit", "0.3", code=3)
    assert "no result within 0.3 s" in undecided


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["FILE:other"], "has no function 'other'; it has right, inverted, slow"),
        (["FILE:not_a_function"], "has no function 'not_a_function'"),
        (["FILE"], "Fix: FILE.py:attend"),
        (["no.py:attend"], "no.py: no such file"),
        (["FILE:right", "--signature", "triton"], "signature='triton'; expected mask, sdpa, flash, flex"),
        (["FILE:right", "--dtypes", "int8"], "dtypes=['int8']"),
        (["FILE:right", "--cases", "zebra"], "cases='zebra'"),
        (
            ["FILE:right", "--out", "r.pfd"],
            "r.pfd ends in none of .html, .json, .txt, .svg, .png, .pdf. Fix: r.html",
        ),
        (["FILE:right", "--difference", "mask inverted"], '--difference "mask inverted"; expected NAME=WHY'),
        (["FILE:right", "--difference", "zebra=it has stripes"], "differences='zebra' is neither a case nor a mistake"),
    ],
)
def test_bad_input(file: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(capsys, "verify", *(word.replace("FILE", str(file)) for word in arguments))


def test_the_fixture(file: Path) -> None:
    (file.parent / "test_mine.py").write_text(
        "from my_kernel import inverted, right\n"
        "def test_right(lowtri_verify): assert lowtri_verify(right, dtypes=['float32'], cases='causal').ok\n"
        "def test_wrong(lowtri_verify): lowtri_verify(inverted, dtypes=['float32'], cases='causal')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "test_mine.py"]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in done.stdout and "inverted is wrong: mask inverted" in done.stdout, done.stdout
