"""MkDocs hook: pages that stand outside docs/, and what GitHub and MkDocs read differently."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from lowtri.lesson.languages import LANGUAGES, texts
from lowtri.lesson.page import file_name, lesson_page

sys.path.insert(0, str(Path(__file__).parent))  # MkDocs loads this file alone

from gallery import gallery_page

ROOT = Path(__file__).parents[2]
OUTSIDE = {  # page of the site -> file of the repository
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "SECURITY.md",
    "benchmarks/transformers_models.md": "benchmarks/transformers_models.md",
    "dev/decisions/README.md": "dev/decisions/README.md",
}
OUTSIDE |= {
    f"dev/decisions/{path.name}": f"dev/decisions/{path.name}" for path in (ROOT / "dev/decisions").glob("0*.md")
}
SHOWN = {**{source: page for page, source in OUTSIDE.items()}, "examples/leaks/README.md": "gallery.md"}  # file -> page
LESSONS = "<!-- the lesson's pages -->"  # in docs/lesson.md, since only the site has these pages


def on_files(files: Files, config: Any) -> Files:
    for page, source in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = re.sub(r"\]\(docs/", "](", text)
        if "/" not in source:  # its links start at the root of the repository, as those of the site's first page do
            text = re.sub(r"\]\(([^)#]+)", lambda link: f"]({SHOWN.get(link[1], link[1])}", text)
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "gallery.md", content=gallery_page()))
    for language in LANGUAGES:
        files.append(File.generated(config, f"lesson/{file_name(language)}", content=lesson_page(language)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Markdown within HTML tables is read when they say so; a bar within code in a table needs no backslash.

    Links from docs/ to files outside of it, which GitHub follows, point at the page that shows the file.
    """
    markdown = re.sub(
        r"\]\(\.\./((?!\.\.)[^)#]+)", lambda link: f"]({SHOWN[link[1]]}" if link[1] in SHOWN else link[0], markdown
    )
    lessons = [f"[{texts(language)['name']}](lesson/{file_name(language)})" for language in LANGUAGES]
    markdown = markdown.replace(LESSONS, " · ".join(lessons))
    markdown = re.sub(r"<(table|tr|td|th)\b", r'<\1 markdown="1"', markdown)
    return re.sub(
        r"^\|.*", lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), row[0]), markdown, flags=re.M
    )
