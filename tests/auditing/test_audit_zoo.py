"""The zoo: every wrong model is caught at the pair it names, and no right one is accused."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

import lowtri

ZOO = Path(__file__).parents[2] / "examples" / "leaks"
WRONG = sorted((ZOO / "wrong").glob("*.py"))
RIGHT = sorted((ZOO / "right").glob("*.py"))


def audited(path: Path, seed: int) -> tuple[dict[str, Any], lowtri.AuditReport]:
    names = runpy.run_path(str(path))
    model, example, *rest = names["make_model"](seed)
    return names, lowtri.audit(model, example, mask=names["MASK"], seed=seed, **(rest[0] if rest else {}))


def check(path: Path, seed: int) -> None:
    names, report = audited(path, seed)
    if path.parent.name == "right":
        assert report.ok, report
        return
    first = report.first
    assert first is not None, report
    assert (first.query, first.key, first.found_by) == (*names["PAIR"], names["PROBE"]), report
    assert report.exit_code == 1


@pytest.mark.parametrize("path", WRONG + RIGHT, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_model(path: Path) -> None:
    check(path, 0)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("path", WRONG + RIGHT, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_model_at_other_seeds(path: Path, seed: int) -> None:
    check(path, seed)


def test_the_zoo_is_large_enough_and_its_models_small() -> None:
    assert len(WRONG) >= 25
    assert len(RIGHT) >= 15
    for path in WRONG + RIGHT:
        text = path.read_text(encoding="utf-8")
        assert len([line for line in text.splitlines() if line.strip()]) <= 36, path
        assert text.startswith('"""'), path


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("bidirectional_lstm", "cells"),
        ("group_norm_over_time", "norm"),
        ("symmetric_padding", "0"),
        ("no_mask", "Model"),
    ],
)
def test_the_module_is_named(name: str, module: str) -> None:
    _, report = audited(ZOO / "wrong" / f"{name}.py", 0)
    assert report.first is not None and report.first.module == module
    assert f"First seen in {module}." in report.message
