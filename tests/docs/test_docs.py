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


def test_the_site_needs_no_network() -> None:
    """Neither to be built nor to be read: no fonts, scripts or pictures from elsewhere."""
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in config and not re.search(r"https?://|extra_javascript|privacy", config)
    style = (ROOT / "docs" / "site.css").read_text(encoding="utf-8")
    assert not re.search(r"@import|https?://", style)
    fetched = re.compile(r"!\[[^\]]*\]\(\s*https?:|<(?:img|script|link|iframe)\b[^>]*(?:src|href)=\"https?:")
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert len(pages) > 25
    assert [page.name for page in pages if fetched.search(page.read_text(encoding="utf-8"))] == []


def test_files_of_the_source_that_pages_name_exist() -> None:
    """Not those of the recipes, which a reader is to write."""
    source = Path(lowtri.__file__).parent
    packages = "|".join(path.name for path in source.iterdir() if path.is_dir())
    named = re.compile(rf"`(?:src/lowtri/)?((?:{packages})/[\w/]+\.py)(?::\w+)?`")
    written = {"auditing/swap.py", "backends/zeros.py", "masks/dilated.py"}
    pages = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    names = {name for page in pages for name in named.findall(page.read_text(encoding="utf-8"))}
    assert len(names) > 20
    assert sorted(name for name in names - written if not (source / name).is_file()) == []


def test_every_decision_is_in_the_index_and_says_when_to_look_again() -> None:
    folder = ROOT / "dev" / "decisions"
    listed = re.findall(r"^\| \[(\d{4})\]\((.+?)\) \| (.+) \|$", (folder / "README.md").read_text("utf-8"), re.M)
    records = sorted(path for path in folder.glob("*.md") if path.name != "README.md")
    assert [name for _, name, _ in listed] == [path.name for path in records]
    for (number, _, title), path in zip(listed, records, strict=True):
        text = path.read_text(encoding="utf-8")
        assert path.name.startswith(number) and text.startswith(f"# {int(number)}. {title}\n"), path.name
        parts = re.findall(r"^\*\*(Context|Chosen|Tried|Look again)\b", text, re.M)
        assert parts == ["Context", "Chosen", "Tried", "Look again"], path.name
        assert len(text.splitlines()) <= 45, path.name


PROSE = [
    *ROOT.glob("*.md"),
    *(path for folder in ("docs", "dev", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.md")),
]
_FENCED = re.compile(r"^ *(```|~~~).*?^ *\1[ `~]*$", re.M | re.S)


def _anchors(path: Path) -> set[str]:
    """The anchors that a code host gives to headings: lower case, no punctuation, "-" for each space; repeated ones are numbered."""
    found: dict[str, int] = {}
    text = _FENCED.sub("", path.read_text(encoding="utf-8"))
    for heading in re.findall(r"^#{1,6} +(.+?) *$", text, re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
    return {name if i == 0 else f"{name}-{i}" for name, n in found.items() for i in range(n + 1)}


def _links(text: str) -> list[str]:
    """The targets of all links and pictures of a page, but not what looks like one in code."""
    text = re.sub(r"`[^`\n]*`", "`code`", _FENCED.sub("", text))
    inline = re.findall(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)", text)
    return inline + re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, re.M) + re.findall(r"(?:href|src)=\"([^\"]+)\"", text)


def _broken(path: Path, text: str) -> list[str]:
    """The relative links of a page to files that the repository lacks, or to headings that these lack."""
    broken = []
    for link in _links(text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        made = any(target.is_relative_to(ROOT / folder) for folder in ("site", "out"))
        inside = target.is_relative_to(ROOT) and not made
        if not inside or not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    return broken


def test_links_work_on_a_code_host() -> None:
    """Every relative link of every page, and its anchor, as a host of the repository shows them; `make docs` checks the site's."""
    texts = {path: path.read_text(encoding="utf-8") for path in PROSE}
    assert len(PROSE) > 20 and sum(len(_links(text)) for text in texts.values()) > 50
    broken = {path.relative_to(ROOT).as_posix(): _broken(path, text) for path, text in texts.items()}
    assert {name: links for name, links in broken.items() if links} == {}


def test_broken_links_are_reported() -> None:
    page = ROOT / "docs" / "audit.md"
    text = '[a](no.md) [b](audit.md#nowhere) [c](audit.md#the-probes) [d](#the-audit)\n```\n[e](no)\n```\n`[f](no)` <img src="no.png">'
    assert _broken(page, text) == ["no.md", "audit.md#nowhere", "no.png"]
