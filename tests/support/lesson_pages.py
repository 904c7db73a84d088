"""A page of the lesson in a browser: its controls, its texts in its own language, and the programs that it shows."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from browser import Browser, Page

from lowtri.lesson.languages import DECIMALS, texts
from lowtri.lesson.page import file_name


class LessonPage(Page):
    """A tab with the page of a language."""

    language = "en"

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def focus(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")

    def change(self, selector: str, value: float | str, event: str = "input") -> None:
        """Give a slider, an input or a list another value, as a reader does."""
        self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(value)};"
            f"e.dispatchEvent(new Event('{event}', {{bubbles: true}})) }})()"
        )

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).textContent"))

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements."""
        found: list[str] = self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")
        return found

    def count(self, selector: str) -> int:
        return int(self.run(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def said(self, key: str, **values: object) -> str:
        """A text of the page's language, filled in."""
        return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), texts(self.language)[key])

    def number(self, x: float, digits: int = 2) -> str:
        """A number as the page of this language writes it."""
        decimal = DECIMALS.get(self.language, ".")
        return "−∞" if x == -math.inf else f"{x:.{digits}f}".replace("-", "−").replace(".", decimal)

    def program(self, figure: str) -> dict[str, Any]:
        """The names that the program under a figure defines; ``steps`` is the explanation that it prints."""
        code = self.text(f'[data-python="{figure}"] code')
        names: dict[str, Any] = {}
        exec(compile(code.replace("print(lowtri.explain(", "steps = (lowtri.explain("), figure, "exec"), names)
        return names


def opened(browser: Browser, folder: Path, language: str = "en", **options: Any) -> LessonPage:
    """The page of a language, with all its figures drawn."""
    page = browser.open_lesson(folder / file_name(language), **options)
    lesson = LessonPage(browser, page.session, page.target)
    lesson.language = language
    return lesson
