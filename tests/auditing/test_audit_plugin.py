"""The pytest plugin: a fixture, and audits that are collected, selected and distributed as any other test is."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

LEAKS = Path(__file__).parents[2] / "examples" / "leaks"


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A test file, a file of models beside it, and a leaking and a right model in a folder."""
    monkeypatch.delenv("CI", raising=False)  # with it, pytest's summary has whole messages
    pytester.makepyfile(test_ok="def test_a(): pass\ndef test_b(): pass\ndef make(): 1 / 0\n")
    wrong = (LEAKS / "wrong" / "no_mask.py").read_text(encoding="utf-8")
    models = pytester.mkdir("sub") / "models.py"
    models.write_text(
        wrong + "\n\ndef make_linear():\n    return torch.nn.Linear(4, 4), torch.randn(2, 6, 4), {'length': 0}\n"
    )
    return pytester


WRONG, RIGHT = "sub/models.py:make_model", "sub/models.py:make_linear"
BOTH = ["--lowtri-audit", WRONG, "--lowtri-audit", RIGHT]
ITEMS = ["sub/models.py::lowtri_audit[make_model]", "sub/models.py::lowtri_audit[make_linear]"]
TESTS = ["test_ok.py::test_a", "test_ok.py::test_b"]


def run(folder: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    named = {point.value for point in entry_points(group="pytest11")}
    more = [] if "lowtri.auditing.plugin" in named else ["-p", "lowtri.auditing.plugin"]  # a tree that is not installed
    return folder.runpytest_inprocess("-p", "no:cacheprovider", *more, *arguments)


@pytest.mark.parametrize(
    ("arguments", "items"),
    [
        (["test_ok.py", *BOTH], TESTS + ITEMS),
        (BOTH, ITEMS + TESTS),
        ([".", *BOTH], ITEMS + TESTS),
        ([".", "sub", "sub/models.py", *BOTH], ITEMS + TESTS),
        (["test_ok.py", *BOTH, "-k", "make_linear"], ITEMS[1:]),
        (["test_ok.py", *BOTH, "-k", "not lowtri_audit"], TESTS),
        (["test_ok.py", *BOTH, "--deselect", ITEMS[0]], TESTS + ITEMS[1:]),
        ([ITEMS[1], *BOTH], ITEMS[1:]),
        (["sub/models.py::lowtri_audit", *BOTH], ITEMS),
        ([TESTS[0], *BOTH, *BOTH], TESTS[:1] + ITEMS),
        # A file of tests that holds a model, too: its other tests are chosen by the arguments alone.
        ([TESTS[0], "--lowtri-audit", "test_ok.py:make"], [TESTS[0], "test_ok.py::lowtri_audit[make]"]),
        (["sub", "--lowtri-audit", "test_ok.py:make"], ["test_ok.py::lowtri_audit[make]"]),
        (["test_ok.py"], TESTS),
    ],
)
def test_audits_are_collected(folder: pytest.Pytester, arguments: list[str], items: list[str]) -> None:
    listed = [line for line in run(folder, "--collect-only", "-q", *arguments).outlines if "::" in line]
    assert sorted(listed) == sorted(items) and len(set(listed)) == len(listed)


def test_a_folder_is_a_target(folder: pytest.Pytester) -> None:
    (folder.mkdir("model") / "config.json").write_text("{}")
    listed = run(folder, "--collect-only", "-q", "test_ok.py", "--lowtri-audit", "model").outlines
    assert "model/config.json::lowtri_audit[model]" in listed


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("away.py:make", "--lowtri-audit away.py:make: there is no file away.py.*"),
        ("sub", "--lowtri-audit sub: there is no file *config.json.*"),
        ("test_ok.py", "--lowtri-audit test_ok.py: no function is named.*"),
    ],
)
def test_what_is_no_target(folder: pytest.Pytester, target: str, words: str) -> None:
    result = run(folder, "test_ok.py", "--lowtri-audit", target)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{words}", "*Fix: *"])


def test_they_run_and_report_the_verdict(folder: pytest.Pytester) -> None:
    folder.makepyfile(
        test_mine="""
        import torch
        def test_right(lowtri_audit):
            assert lowtri_audit(torch.nn.Linear(4, 4), torch.randn(2, 6, 4), length=0).ok
        def test_wrong(lowtri_audit):
            lowtri_audit(lambda x: x.flip(1), torch.randn(2, 6, 4), length=0)
        """
    )
    result = run(folder, "-v", "test_mine.py", *BOTH)
    result.assert_outcomes(passed=2, failed=2)
    out = result.stdout.str()
    assert "<lambda> sees what causal hides: position 0 sees position 5" in out
    assert "Model sees what causal hides: position 0 sees position 1" in out
    verdict = "no leak found against causal: 2 x 6 positions"
    assert "lowtri audits" in out and f"test_mine.py::test_right: {verdict}" in out and f"{ITEMS[1]}: {verdict}" in out
    assert f"{ITEMS[0]}: leak against causal: " in out
    legend = "█ declared and seen"  # of the drawing
    assert out.count(legend) == 2
    brief = run(folder, "test_mine.py", *BOTH).stdout.str()
    assert legend not in brief and brief.count("(pytest -v draws the pairs)") == 2
    lines = brief.splitlines()
    title = next(index for index, line in enumerate(lines) if f" audit of {WRONG}" in line)
    assert lines[title + 1].startswith("Model sees what causal hides: position 0 sees position 1: ")


@pytest.mark.sweep
def test_they_are_distributed(folder: pytest.Pytester) -> None:
    """Without this, a run in several processes would pass where one process fails."""
    result = run(folder, "-v", "-n", "2", "test_ok.py", "--lowtri-audit", WRONG)
    result.assert_outcomes(passed=2, failed=1)
    assert result.ret == 1
    assert "Model sees what causal hides" in result.stdout.str()
    assert f"{ITEMS[0]}: leak against causal: " in result.stdout.str()


FAILING = """
import lowtri, numpy as np
def test_a():
    lowtri.assert_causal(lambda x: x - x.mean(0), np.random.default_rng(0).standard_normal((6, 3)))
"""


def test_a_failure_shows_the_sentence_the_drawing_and_the_users_frames(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(FAILING)
    lines = pytester.runpytest("-q").stdout.lines
    text = "\n".join(lines)
    assert "LeakError: <lambda> sees what causal hides: position 0 sees position 1: " in text and "█✗✗✗✗✗" in text
    assert "auditing" not in text and "raise_for_leak" not in text
