"""The lesson's page of one language: sections, texts, numbers, style and scripts in one file that fetches nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from lowtri.files import write_text, writing
from lowtri.lesson.languages import DECIMALS, JOINTS, LANGUAGES, assets, filled, markup, texts
from lowtri.lesson.numbers import computed, in_texts, models
from lowtri.pictures.pages import html_document, json_value, shared_style
from lowtri.pictures.svg import declared

SCRIPTS = (
    *("base", "masks", "attention", "matrix", "equations", "workbench", "steps", "figures", "flow", "measured", "quiz"),
    *("decoder", "livemap", "live", "address", "page"),
)
_LIVE = ("arcs", "bench", "shapes", "maps", "cache", "patterns")  # figures whose program the scripts write
SENTENCES = ("cat", "forcing", "nlp", "long")
_FORBIDS_NETWORK = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_HEAD = f'<meta http-equiv="Content-Security-Policy" content="{_FORBIDS_NETWORK}"><link rel="icon" href="data:,">'


def write_lesson(path: str | Path, language: str = "en") -> Path:
    """Write the page of a language, atomically.

    Raises:
        DataError: if there is no such language, or the file cannot be written.
    """
    path, text = Path(path), lesson_page(language)
    with writing("lesson", path):
        write_text(path, text)
    return path


def file_name(language: str) -> str:
    """The name under which the pages link to one another when they lie in one folder."""
    return f"lesson-{language}.html"


def lesson_page(language: str = "en") -> str:
    """The page as HTML text. Times are measured once per process; other numbers are computed or stored."""
    words = texts(language)
    numbers = in_texts(language)
    written = {key: filled(text, numbers) for key, text in words.items()}
    example = written["sentence.example"].split(" ")
    written["flow.p1"] = filled(written["flow.p1"], {"t": str(len(example))})
    written["sentence.start"] = JOINTS.get(language, " ").join(example)
    code = programs(language)
    sections = [path.read_text(encoding="utf-8") for path in sorted((assets() / "sections").iterdir())]
    body = "\n".join(_section(section, written, code) for section in sections)
    for name, picture in _pictures(written["sentence.cat"].split(" "), example).items():
        body = body.replace(f"<!-- picture: {name} -->", f"<noscript>{picture}</noscript>")
    sentences: dict[str, Any] = {name: written[f"sentence.{name}"].split(" ") for name in SENTENCES}
    data = computed() | {
        "texts": {key: text for key, text in written.items() if not key.startswith(("explain.", "notebook."))},
        "sentences": sentences | {"example": example, "start": written["sentence.start"]},
        "language": LANGUAGES[language],
        "decimal": DECIMALS.get(language, "."),
        # What the page cuts a sentence into that is written without spaces; the longest first.
        "words": sorted({*example, *written["bench.words"].split(" "), *sentences["cat"]}, key=len, reverse=True),
        "programs": {name: code[name] for name in ("smollm2", "whisper")},
        "models": models(language),
    }
    page = [
        "<body>",
        *_top(language, written),
        '<div class="page">',
        *_contents(body, written),
        f'<main id="main"><header class="hero"><h1>{markup(written["hero.title"])}</h1>'
        f"<p>{markup(written['hero.lead'])}</p></header>",
        f'<noscript><p class="lead">{escape(written["nojs"])}</p></noscript>',
        body,
        "</main></div>",
        f'<script type="application/json" id="lesson-data">{_json(data)}</script>',
        *(f"<script>{_file('script', f'{name}.js')}</script>" for name in SCRIPTS),
        "</body>",
    ]
    head = f"{_HEAD}<noscript><style>{_file('style', 'no-scripts.css')}</style></noscript>"
    return html_document(written["title"], _style(), "\n".join(page), LANGUAGES[language], head)


def programs(language: str = "en") -> dict[str, str]:
    """Figure -> the program that is shown under it, its comments in the language; the scripts write those of live figures."""
    words = texts(language)
    return {
        path.stem: re.sub(r"\{\{([\w.]+)\}\}", lambda match: words[match[1]], path.read_text(encoding="utf-8").strip())
        for path in sorted((assets() / "programs").iterdir())
    }


def _pictures(words: list[str], example: list[str]) -> dict[str, str]:
    """What is seen of the first figures where scripts are off: who sees whom, and the steps of the worked example."""
    from lowtri.explaining.example import ENCODINGS, drawn
    from lowtri.explaining.steps import explain
    from lowtri.pictures.masks import svg

    module, _ = drawn(2, 0, 42)
    steps = explain(module, ENCODINGS, tokens=example, mask="causal")
    return {"arcs": svg("causal", len(words), tokens=words), "bench": steps.to_svg()}


def _section(html: str, written: dict[str, str], code: dict[str, str]) -> str:
    html = re.sub(r"\{\{#([\w.]+)\}\}", lambda match: escape(written[match[1]]), html)
    html = re.sub(r"\{\{([\w.]+)\}\}", lambda match: markup(written[match[1]]), html)
    html = re.sub(r"<!-- python: (\w+) -->", lambda match: _program(match[1], written, code), html)
    return html.replace("<!-- formula -->", _file("sections-extra", "formula.html")).replace(
        "<!-- references -->", _file("sections-extra", "references.html")
    )


def _program(name: str, written: dict[str, str], code: dict[str, str]) -> str:
    shown = "" if name in _LIVE else code[name]
    return (
        f'<div class="python" data-python="{name}"><pre tabindex="0" role="group" aria-label="{escape(written["python"])}">'
        f'<code lang="en" translate="no">{escape(shown)}</code></pre>'
        f'<button type="button" data-copy>{escape(written["copy"])}</button></div>'
    )


def _top(language: str, written: dict[str, str]) -> Iterator[str]:
    yield f'<a class="skip" href="#main">{escape(written["skip"])}</a>'
    yield '<div class="top" role="banner"><a class="brand" href="#main">lowtri</a>'
    yield f'<button type="button" class="quiet" id="theme" title="{escape(written["nav.theme"])}">'
    yield f'<span aria-hidden="true">◐</span><span class="sr">{escape(written["nav.theme"])}</span></button>'
    yield '<button type="button" class="quiet" id="motion" aria-pressed="true" '
    yield f'title="{escape(written["nav.motion"])}"><span aria-hidden="true">≋</span>'
    yield f'<span class="sr">{escape(written["nav.motion"])}</span></button>'
    yield f'<nav class="languages" aria-label="{escape(written["nav.languages"])}">'
    for other, tag in LANGUAGES.items():
        here = ' aria-current="page"' if other == language else ""
        name = escape(texts(other)["name"])
        yield f'<a href="{file_name(other)}" data-file="{file_name(other)}" lang="{tag}" hreflang="{tag}"{here}>{name}</a>'
    yield "</nav></div>"


def _contents(body: str, written: dict[str, str]) -> Iterator[str]:
    yield f'<nav class="contents" aria-label="{escape(written["nav.contents"])}"><details open>'
    yield f"<summary>{escape(written['nav.contents'])}</summary><ol>"
    for name, title in re.findall(r'<section id="(\w+)">\s*<h2>(.*?)</h2>', body):
        yield f'<li><a href="#{name}">{title}</a></li>'
    yield "</ol></details></nav>"


def _style() -> str:
    """The reader's system chooses light or dark colours, and the page's own button overrules it."""
    system = [
        f":root {{ {declared('light')} }}",
        f"@media (prefers-color-scheme: dark) {{ :root {{ {declared('dark')} }} }}",
    ]
    chosen = [f":root[data-theme={theme}] {{ {declared(theme)} }}" for theme in ("light", "dark")]
    paper = f"@media print {{ :root:root:root {{ {declared('light')} }} }}"  # whatever the screen shows
    return "\n".join([*system, *chosen, paper, shared_style(":root"), _file("style", "lesson.css")])


def _file(folder: str, name: str) -> str:
    return (assets() / folder / name).read_text(encoding="utf-8").strip()


def _json(data: dict[str, Any]) -> str:
    """JSON that may stand in a script element, whatever its texts hold."""
    text = json.dumps(json_value(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
