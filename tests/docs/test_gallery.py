"""The gallery of wrong attentions: every piece of the museum, with the pair that its file names."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
from pathlib import Path
from types import ModuleType

import pytest

import lowtri

ROOT = Path(__file__).parents[2]
MUSEUM = sorted((ROOT / "examples" / "leaks" / "wrong").glob("*.py"))
STORED = json.loads((ROOT / "docs" / "_site" / "gallery.json").read_text(encoding="utf-8"))
PIECES = {piece["name"]: piece for piece in STORED["pieces"]}


@pytest.fixture(scope="module")
def gallery() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "docs" / "_site" / "gallery.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_piece_with_the_pair_of_its_file() -> None:
    assert sorted(PIECES) == [path.stem for path in MUSEUM]
    for path in MUSEUM:
        named = runpy.run_path(str(path))
        piece = PIECES[path.stem]
        assert (tuple(piece["pair"]), piece["probe"], piece["mask"]) == (named["PAIR"], named["PROBE"], named["MASK"])


def test_pictures_show_what_the_mask_declares() -> None:
    for name, piece in PIECES.items():
        n = len(piece["cells"])
        declared = lowtri.mask(piece["mask"]).dense(n, n).reshape(n, n)
        shown = [[sign in "█○" for sign in row] for row in piece["cells"]]
        if "documents" not in piece["mask"] and n <= 16:
            assert shown == declared.tolist(), name


def test_the_page(gallery: ModuleType) -> None:
    page = gallery.gallery_page()
    assert re.findall(r"^### .* \{#(\w+)\}$", page, re.M) == sorted(
        PIECES, key=lambda name: (list(gallery.GROUPS).index(PIECES[name]["probe"]), name)
    )
    assert page.count("<svg") == len(PIECES) == page.count("<details>")
    assert f"All {len(PIECES)} files" in page
    too_good = [name for name, piece in PIECES.items() if piece["loss"] is not None and piece["loss"] < gallery.HONEST]
    assert page.count("too good") == len(too_good) >= 5
