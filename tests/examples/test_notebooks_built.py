"""The notebooks are what their sources say in each language, run from top to bottom, and their stored outputs are small."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lowtri.sentences import LANGUAGES, texts
from notebooks.build import cells_of, execute, notebook, sources, translated

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NAMES = list(sources())


def stored(language: str, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / language / f"{name}.ipynb").read_text(encoding="utf-8"))
    return content


def test_there_are_five_in_each_language() -> None:
    assert len(NAMES) == 5
    for language in LANGUAGES:
        assert sorted(path.stem for path in (FOLDER / language).iterdir()) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_stored_notebook_is_its_source(language: str, name: str) -> None:
    content = stored(language, name)
    expected = notebook(translated(sources()[name], language))
    for cell, source in zip(content["cells"], expected["cells"], strict=True):
        assert {key: cell[key] for key in ("cell_type", "id", "source")} == {
            key: source[key] for key in ("cell_type", "id", "source")
        }
    assert "{{" not in json.dumps(content) and len(json.dumps(content)) < 25_000
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert sum(len(cell["outputs"]) for cell in code) >= 3
    assert texts(language)[f"notebook.{name[0]}"] in content["cells"][0]["source"]
    assert not re.search(
        r"\[[qkvw]:|\{\w+\}", "".join(c["source"] for c in content["cells"] if c["cell_type"] != "code")
    )


def same_where_it_is_exact(text: str) -> str:
    """Without digits that depend on the machine: long fractions, and exponents."""
    return re.sub(r"-?\d+\.\d{3,}|\d\.?\d*e[-+]\d+", "#", text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "language", [lang if lang == "en" else pytest.param(lang, marks=pytest.mark.sweep) for lang in LANGUAGES]
)
def test_it_runs_from_top_to_bottom(language: str, name: str) -> None:
    content = stored(language, name)
    again = json.loads(json.dumps(content))
    execute(again)
    for before, after in zip(content["cells"], again["cells"], strict=True):
        kinds = [[output["output_type"] for output in cell.get("outputs", [])] for cell in (before, after)]
        assert kinds[0] == kinds[1]
        if name.startswith("5"):  # a training: its digits, and so what it writes, differ between machines
            continue
        assert same_where_it_is_exact(json.dumps(before)) == same_where_it_is_exact(json.dumps(after))


def test_the_copier_of_the_last_notebook() -> None:
    lines = "".join(o["text"] for c in stored("en", NAMES[4])["cells"] for o in c.get("outputs", [])).splitlines()
    figures = {line.split()[0]: [float(x) for x in line.split()[1:3]] for line in lines[:2]}
    assert figures["causal"][0] == pytest.approx(figures["causal"][1], abs=2e-3)
    assert figures["full"][0] < figures["causal"][0] < figures["full"][1]


def test_cells() -> None:
    cells = cells_of("# %% [markdown]\n# # A\n#\n# b\n\n# %%\nx = 1\n\n# %%\n# c\nx\n")
    assert [cell["source"] for cell in cells] == ["# A\n\nb", "x = 1", "# c\nx"]
