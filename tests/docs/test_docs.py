"""The documentation: the API reference lists every public name once; the site lists every page."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import lowtri
import lowtri.nn
import lowtri.parallel
import lowtri.plain

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
LISTED = [name for page in PAGES for name in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.M)]


def test_the_api_reference_has_every_public_name_once() -> None:
    public = {f"lowtri.{name}" for name in lowtri.__all__} - {
        *("lowtri.nn", "lowtri.parallel", "lowtri.plain", "lowtri.__version__")
    }
    public |= {f"lowtri.nn.{name}" for name in lowtri.nn.__all__}
    public |= {f"lowtri.parallel.{name}" for name in lowtri.parallel.__all__}
    public |= {f"lowtri.plain.{name}" for name in lowtri.plain.__all__}
    assert sorted(public - set(LISTED)) == []
    assert len(LISTED) == len(set(LISTED))
    by_module = set(LISTED) - public  # integrations, and the types that public functions return
    assert all(len(name.split(".")) > 2 for name in by_module)


def test_every_listed_name_exists_and_is_documented() -> None:
    for listed in LISTED:
        module, name = listed.rsplit(".", 1)
        assert getattr(importlib.import_module(module), name).__doc__, listed


def test_the_site_has_every_page() -> None:
    """Pages in docs/, and pages that the hook adds: from elsewhere in the repository, and the gallery."""
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w./-]+\.md\b", config))
    outside = dict(re.findall(r'^    "(.+\.md)": "(.+\.md)",', (ROOT / "docs/_site/pages.py").read_text("utf-8"), re.M))
    inside = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert listed == inside | set(outside) | {"gallery.md"}
    assert all((ROOT / source).exists() for source in outside.values())


def test_links_between_pages_exist() -> None:
    """As files, which GitHub follows, or as pages that the site makes; MkDocs checks the anchors."""
    made = {"gallery.md", *(f"lesson/lesson-{language}.html" for language in ("en", "id", "th", "zh"))}
    for path in (ROOT / "docs").rglob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8")):
            if not target.startswith(("http", "mailto:")):
                assert target in made or (path.parent / target).exists(), (path.name, target)
