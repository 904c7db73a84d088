"""The versions that were tried: what pyproject.toml, the constraints and the prose say, and what doctor says of others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lowtri import doctor
from lowtri.compat.tested import TESTED, installed_versions, tried_range, untried

ROOT = Path(__file__).parents[2]
NAMES = {"python": "Python", "numpy": "NumPy", "torch": "torch", "transformers": "transformers", "numba": "Numba"}
PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROSE += [path for path in sorted((ROOT / "src").rglob("*.py")) if path.name != "tested.py"]  # whose example is untried


def minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def lower_bound(name: str) -> str:
    """The oldest version that pyproject.toml allows."""
    project = text_of("pyproject.toml")
    pattern = r'requires-python = ">=([\d.]+)"' if name == "python" else rf'"{name}>=([\d.]+)"'
    found = re.search(pattern, project)
    assert found is not None, name
    return found[1]


@pytest.mark.parametrize("name", TESTED)
def test_the_oldest_is_what_is_allowed_and_pinned_for_the_floor(name: str) -> None:
    oldest, newest = TESTED[name]
    assert minor(oldest) == minor(lower_bound(name)) <= minor(newest)
    pinned = re.search(rf"^{name}==([\d.]+)", text_of("constraints-floor.txt"), re.M)
    assert name == "python" or (pinned is not None and minor(pinned[1]) == minor(oldest))
    for usual in re.findall(rf"^{name}==([\d.]+)", text_of("constraints.txt"), re.M):
        assert minor(oldest) <= minor(usual) <= minor(newest)


def test_the_newest_python_is_the_last_of_the_classifiers() -> None:
    assert TESTED["python"][1] == re.findall(r'Python :: (3\.\d+)"', text_of("pyproject.toml"))[-1]


def stated(text: str, name: str) -> list[tuple[str, str]]:
    """The versions of a library in a text, each with the words after it."""
    pattern = rf"(?<![\w.-]){NAMES[name]} (?:>= ?)?(\d+\.\d+(?:\.\d+)?)((?: or newer)?)"
    return re.findall(pattern, text)


def test_versions_are_read_from_prose() -> None:
    text = "Python 3.10 or newer, torch 2.13.0 (CPU), NumPy 2.4.6; torch 1.5 times; my-transformers 2.31"
    assert stated(text, "python") == [("3.10", " or newer")]
    assert stated(text, "torch") == [("2.13.0", ""), ("1.5", "")]
    assert stated(text, "transformers") == []


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_prose_names_versions_that_were_tried(path: Path) -> None:
    """And what a sentence requires is what pyproject.toml requires."""
    text = path.read_text(encoding="utf-8")
    for name, (oldest, newest) in TESTED.items():
        for version, or_newer in stated(text, name):
            assert minor(oldest) <= minor(version) <= minor(newest), f"{name} {version}"
            assert not or_newer or minor(version) == minor(lower_bound(name)), f"{name} {version}{or_newer}"


def test_an_untried_version_is_one_line_and_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    assert untried({"torch": "2.6.0+cpu", "numpy": TESTED["numpy"][1], "other": "9", "numba": None}) == []
    words = f"torch 99.1 was never tried: lowtri's tests have run with {tried_range('torch')}"
    assert untried({"torch": "99.1", "python": "3.10.1"}) == [words]
    assert untried({"torch": "2.5.1"}) != []
    monkeypatch.setattr(doctor, "installed_versions", lambda: {"torch": "99.1"})
    report = doctor.examine(measure=False)
    assert f"untried   {words}" in doctor.as_text(report).splitlines()
    assert not any("never tried" in words for words in report["trouble"])


def test_what_is_installed_has_versions() -> None:
    found = installed_versions()
    assert set(found) <= set(TESTED) and {"python", "numpy", "torch"} <= set(found)
