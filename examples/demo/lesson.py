"""The lesson in its four languages, next to the demo's own page."""

from __future__ import annotations

from demo.context import Context, Result
from lowtri.lesson.languages import LANGUAGES, texts
from lowtri.lesson.numbers import computed
from lowtri.lesson.page import file_name, lesson_page

__all__ = ["SENTENCE", "TITLE", "run"]

TITLE = "The lesson"
SENTENCE = "Masked self-attention as an interactive page in four languages: open one, and change a number."

_MOST = 2_000_000  # bytes of a page


def run(context: Context) -> Result:
    """Write the pages; the worked example in them is the notebooks'."""
    result = Result("\n".join(f"{file_name(language)}  {texts(language)['title']}" for language in LANGUAGES))
    for language in LANGUAGES:
        page = lesson_page(language)
        result.files.append(context.write(file_name(language), page))
        size = len(page.encode())
        result.check(f"{file_name(language)}: {size / 1000:.0f} kB, below {_MOST / 1000:,.0f}", size < _MOST)
    row = computed()["example"]["steps"]["weights"][1]
    shown = ", ".join(f"{x:.4f}" for x in row)
    result.check(f"the second row of its weights: {shown}, as in the notebooks", shown == "0.3606, 0.6394, 0.0000")
    return result
