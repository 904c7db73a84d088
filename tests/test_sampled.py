"""The plugin that samples tests for slow machines: every value of every parameter, and few examples of a property."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest
from hypothesis import given, settings, strategies as st

@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", "wxyz")
def test_two(a, b):
    print(f"{a=} {b=}.")

def test_alone():
    print("alone.")

@settings(max_examples=200)
@given(st.integers())
def test_property(n):
    print("example.")
"""


def test_a_sample_has_every_value_and_few_examples(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "sampled", "-p", "no:cacheprovider", "-p", "no:xdist"]
    path = os.pathsep.join([*sys.path, str(Path(__file__).parents[1] / "tools")])
    samples = []
    for salt in ("one", "two"):
        done = subprocess.run(
            [*command, "--examples", "7", "--salt", salt, "test_it.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and "6 passed, 8 deselected" in done.stdout, done.stdout + done.stderr
        assert all(done.stdout.count(f"{word}.") == 1 for word in ("alone", *(f"b={x!r}" for x in "wxyz")))
        assert all(f"a={x} " in done.stdout for x in (1, 2, 3)) and done.stdout.count("example.") == 7
        samples.append({word for word in done.stdout.replace(".", "\n").splitlines() if word.startswith("a=")})
    assert samples[0] != samples[1], "the salt decides"
    done = subprocess.run(
        [*command, "--cases", "2", "--examples", "3", "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert "4 passed, 10 deselected" in done.stdout and done.stdout.count("example.") == 3, done.stdout + done.stderr
    assert done.stdout.count("a=") == 2, "of a test with twelve cases, two"
