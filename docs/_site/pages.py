"""MkDocs hook: pages that stand outside docs/, and what GitHub and MkDocs read differently."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from lowtri.lesson.languages import LANGUAGES
from lowtri.lesson.page import file_name, lesson_page

ROOT = Path(__file__).parents[2]
OUTSIDE = {  # page of the site -> file of the repository
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "SECURITY.md",
    "benchmarks/transformers_models.md": "benchmarks/transformers_models.md",
}


def on_files(files: Files, config: Any) -> Files:
    for page, source in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=re.sub(r"\]\(docs/", "](", text)))
    for language in LANGUAGES:
        files.append(File.generated(config, f"lesson/{file_name(language)}", content=lesson_page(language)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Markdown within HTML tables is read when they say so; a bar within code in a table needs no backslash."""
    markdown = re.sub(r"<(table|tr|td|th)\b", r'<\1 markdown="1"', markdown)
    return re.sub(
        r"^\|.*", lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), row[0]), markdown, flags=re.M
    )
