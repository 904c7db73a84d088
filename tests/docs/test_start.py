"""The ten-minute starts run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "start.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_block_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(BLOCKS[number], f"docs/start.md, block {number}", "exec"), {})
    assert capsys.readouterr().out


def test_there_are_four_starts_and_their_links_exist() -> None:
    assert len(BLOCKS) == 4 == PAGE.count("\n## ")
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / target).is_file(), target
