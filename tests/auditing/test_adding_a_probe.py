"""The recipe "Adding a probe" of CONTRIBUTING.md, followed to the letter; and the documentation's table, which comes from the list."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import lowtri
from lowtri.auditing import audit as module
from lowtri.auditing.audit import PROBES, probe_table
from lowtri.auditing.context import Context
from lowtri.auditing.probe import PairOfRuns, PairsOfRuns, Summary, probe

ROOT = Path(__file__).parents[2]
TRIAL = """
import numpy as np, lowtri
from lowtri.auditing.audit import probe_table
x = np.random.default_rng(0).standard_normal((6, 4))
right = lowtri.audit(lambda x: np.cumsum(x, axis=0), x)
wrong = lowtri.audit(lambda x: x + x[-1:], x, probes=["swap"])
assert right.ok and right.finding("swap").status == "clean" and "swap" in str(right), right
assert wrong.first.probe == "swap" and wrong.exit_code == 1 and "change places" in wrong.message, wrong
assert "| swap | exchanges" in probe_table()
"""


def test_the_recipe(tmp_path: Path) -> None:
    recipe = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Adding a probe")[1].split("\n## ")[0]
    file, line = (textwrap.dedent(block) for block in re.findall(r"   ```(?:python|text)\n(.*?)   ```", recipe, re.S))
    package = tmp_path / "lowtri"
    shutil.copytree(Path(lowtri.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    auditing = package / "auditing"
    (auditing / "swap.py").write_text(file, encoding="utf-8")
    text = (auditing / "audit.py").read_text(encoding="utf-8")
    text = text.replace(
        "from lowtri.auditing.probe import", "from lowtri.auditing.swap import swap\nfrom lowtri.auditing.probe import"
    )
    text = text.replace("    gradient,\n    prefix,\n", f"    {line.strip()}\n    gradient,\n    prefix,\n")
    (auditing / "audit.py").write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", TRIAL], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_table_in_the_documentation_is_the_list() -> None:
    assert probe_table() in (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")


def test_names_and_arguments_of_probes_are_unique() -> None:
    assert len({probe.name for probe in PROBES}) == len(PROBES)
    requested = [probe.argument for probe in PROBES if probe.argument]
    assert sorted(requested) == ["alone", "pads", "step"]


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 8)], ids=str)
def test_what_a_case_changes_is_said_for_all_rows_or_for_each(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    @probe("last", "changes the last three inputs", "outputs that depend on them", pairs=True)
    def last(context: Context) -> PairsOfRuns:
        where = np.broadcast_to(np.arange(8) > 4, shape)
        run = context.run(context.inputs.change(where, context.fresh(0)))
        yield PairOfRuns(run, context.independent_of(where), refusable=False, keys=where)
        return Summary("nothing moves", "outputs move", {})

    monkeypatch.setattr(module, "PROBES", (last,))
    x = np.random.default_rng(0).standard_normal((2, 8, 4))
    report = lowtri.audit(lambda x: np.cumsum(x, axis=-2) + x[..., 6:7, :], x)
    assert (report.first.query, report.first.key, report.first.probe) == (4, 6, "last")
    assert lowtri.audit(lambda x: np.cumsum(x, axis=-2), x).ok
