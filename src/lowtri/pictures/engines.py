"""Which engine runs a call, as a table for notebooks."""

from __future__ import annotations

from lowtri.dispatch.choose import Choice
from lowtri.pictures.pages import TABLE_STYLE, html_table, html_text, output


def notebook_html(choice: Choice) -> str:
    """The engine that would run, and a table of the answers."""
    sentence = f"<p>{html_text(f'{choice.engine} runs: {choice.reason}')}</p>"
    return output("engine", [sentence, html_table(("engine", "answer"), choice.answers.items())], TABLE_STYLE)
