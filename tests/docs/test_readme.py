"""The README, and pages that name verbs, masks and tests: what they name exists, and pictures of masks are those of lowtri."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import lowtri
from lowtri.cli.main import VERBS, main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
CLAIMS = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)
GUIDE = (ROOT / "docs" / "masks.md").read_text(encoding="utf-8")
ALL_MASKS = re.findall(r"^\| `(.+?)` \| <code>(.*?)</code>", GUIDE, re.M)
MASKS = re.findall(r"^\| `(.+?)` \| <code>(.*?)</code>", README, re.M)


def test_attention_takes_ten_lines() -> None:
    (block,) = (block for block in BLOCKS if "output, weights" in block)
    names: dict[str, Any] = {}
    exec(compile(block, "README", "exec"), names)
    assert names["output"].shape == (8, 512, 64) and names["weights"].shape == (8, 512, 512)
    assert len(block.splitlines()) <= 10


def test_the_model_and_the_kernel_of_the_page_of_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    block, kernel = re.findall(r"^```python\n(.*?)^```", COMMANDS, re.S | re.M)
    (tmp_path / "my_model.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    assert "    lowtri audit my_model.py:make_model" in README and "    lowtri audit my_model.py:make_model" in COMMANDS
    assert main(["audit", "my_model.py:make_model"]) == 0
    assert "no leak found" in capsys.readouterr().out
    (tmp_path / "my_model.py").write_text(block.replace("cumsum(1)", "flip(1).cumsum(1)"))
    assert main(["audit", "my_model.py:make_model"]) == 1
    capsys.readouterr()
    (tmp_path / "my_kernel.py").write_text(kernel)
    assert main(["verify", "my_kernel.py:attend", "--dtypes", "float32", "--cases", "empty"]) == 1
    assert capsys.readouterr().out.startswith("attend is wrong: hidden as -1e9 (")


def test_the_readme_is_short_and_has_a_block_and_masks() -> None:
    assert len(README.splitlines()) <= 130
    assert BLOCKS and len(ALL_MASKS) >= 8
    assert len(MASKS) == 5 and set(MASKS) <= set(ALL_MASKS)


@pytest.mark.parametrize(("text", "picture"), ALL_MASKS, ids=[text for text, _ in ALL_MASKS])
def test_every_picture_of_a_mask(text: str, picture: str) -> None:
    assert picture.split("<br>") == lowtri.mask(text.replace("\\|", "|")).draw(6).splitlines()


@pytest.mark.parametrize("page", ["README.md", "docs/claims.md", "docs/commands.md", "docs/models.md"])
def test_verbs_and_files_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for verb in re.findall(r"(?:^    |`)lowtri ([a-z]+)\b", text, re.M):
        assert verb in VERBS
    for name in re.findall(r"(?<![\w/])(?:examples|benchmarks|tests|docs)/[\w./-]+\.\w+", text):
        assert (ROOT / name).exists(), name


def test_the_table_of_packages_is_complete() -> None:
    source = ROOT / "src" / "lowtri"
    packages = {path.name for path in source.iterdir() if any(path.glob("*.py"))} | {"assets"}
    packages |= {path.stem for path in source.glob("*.py") if not path.stem.startswith("_")}
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \| [^|]+ \|$", contributing, re.M)) == packages


def test_every_claim_names_an_existing_test_or_a_command() -> None:
    claims = CLAIMS.split("## Two pairs")[0]
    rows = [line for line in claims.splitlines() if line.startswith("| ") and not line.startswith("| claim")]
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(rows) >= 20
    for row in rows:
        source = row.rsplit("|", 2)[1]
        named = re.findall(r"`(test_\w+)`", source)
        assert named or "`lowtri " in source or "`python " in source, row
        assert all(f"def {name}(" in tests for name in named), named
