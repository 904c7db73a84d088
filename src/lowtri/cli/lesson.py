"""lowtri lesson: the interactive lesson as an HTML page."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from lowtri.cli.options import Threads, note, output_file, use_threads


class Language(str, Enum):
    en = "en"
    id = "id"
    th = "th"
    zh = "zh"


def command(
    out: Annotated[Path, output_file("Where to write the page.", ".html")] = Path("lesson-en.html"),
    lang: Annotated[Language, typer.Option("--lang", help="The language of the page.")] = Language.en,
    threads: Threads = None,
) -> None:
    """lowtri lesson --out lesson-en.html
    lowtri lesson --out lesson-zh.html --lang zh

    Masked self-attention as one interactive page that works without network: every step with numbers, masks to draw, maps
    of trained models, traps, a quiz. The times in it are measured while it is made. The four pages link to one another
    when they are named lesson-en.html, lesson-id.html, lesson-th.html and lesson-zh.html.
    """
    from lowtri.lesson.page import write_lesson

    use_threads(threads)
    write_lesson(out, lang.value)
    note(f"wrote {out} ({out.stat().st_size / 1000:,.0f} kB)")
