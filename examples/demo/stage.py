"""What an act of the tour shows and checks, how the acts run, and the page that they make."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch

import lowtri
from lowtri.files import write_text
from lowtri.pictures.labels import aligned
from lowtri.pictures.pages import TABLE_STYLE, html_table, html_text, page
from why_mask.experiment import SHORT, Experiment, Setting, why_mask

__all__ = ["DEMO", "TOUR", "Act", "Check", "Context", "Result", "Sizes", "as_html", "main"]


@dataclass(frozen=True)
class Sizes:
    """How much the acts compute."""

    setting: Setting  # of the two models that are trained
    cached: tuple[int, int]  # tokens after which the size of a cache is read
    speed: int  # tokens whose attention is timed
    rounds: int  # of each timing
    shards: tuple[int, int]  # tokens of the long row, processes that share it
    new_tokens: int  # of each text that is generated


DEMO = Sizes(SHORT, cached=(128, 500), speed=1024, rounds=3, shards=(32_768, 2), new_tokens=40)
TOUR = Sizes(Setting(), cached=(128, 2000), speed=2048, rounds=9, shards=(65_536, 4), new_tokens=80)


class Check(NamedTuple):
    """A statement about lowtri, and whether it is true in this run."""

    text: str  # with the figure that was measured
    passed: bool


@dataclass
class Result:
    """What an act shows: blocks of text, tables and pictures in their order, checks, and files in the folder ``out``."""

    out: Path
    checks: list[Check] = field(default_factory=list)
    files: list[str] = field(default_factory=list)  # names of those written besides the pictures
    pictures: list[str] = field(default_factory=list)
    _blocks: list[tuple[str, str]] = field(default_factory=list)  # for the terminal, for the page

    @property
    def text(self) -> str:
        """All blocks, as a terminal shows them."""
        return "\n\n".join(text for text, _ in self._blocks if text)

    def check(self, text: str, passed: object) -> None:
        self.checks.append(Check(text, bool(passed)))

    def say(self, *lines: str) -> None:
        text = "\n".join(lines)
        self._blocks.append((text, f'<p class="said">{html_text(text, keep=chr(10))}</p>'))

    def table(self, head: Sequence[str], rows: Iterable[Sequence[str]], text: str | None = None) -> None:
        """A table, whose first column names the row; ``text`` is its form for terminals, aligned columns if not given."""
        rows = list(rows)
        if text is None:
            text = "\n".join(aligned([head, *rows], "   ", right=True))
        self._blocks.append((text, f'<div class="scroll">{html_table(head, rows)}</div>'))

    def picture(self, name: str, drawn: Any = None, text: str = "", caption: str = "") -> None:
        """A picture in the file ``name``: of an object that draws itself as SVG, or else of a file that is there already.

        ``text`` is the picture's form for terminals; the page shows the picture in its place, and folds the text.
        """
        if drawn is not None:
            svg = drawn.to_svg() if hasattr(drawn, "to_svg") else drawn._repr_svg_()
            write_text(self.out / name, svg)
        self.pictures.append(name)
        alt, shown = escape(Path(name).stem.replace("-", " ")), html_text(text, keep="\n")
        words = f"<figcaption>{html_text(caption, keep=chr(10))}</figcaption>" if caption else ""
        folded = f"<details><summary>as text</summary><pre>{shown}</pre></details>" if text else ""
        image = f'<img src="{escape(name)}" alt="{alt}">'
        html = f'<figure class="picture">{image}{words}{folded}</figure>'
        self._blocks.append(("\n".join(filter(None, (caption, text))), html))

    def file(self, name: str, text: str | None = None) -> None:
        """List a file of the folder, and write it first if its text is given."""
        if text is not None:
            write_text(self.out / name, text)
        self.files.append(name)

    @property
    def html(self) -> str:
        return "\n".join(html for _, html in self._blocks)


@dataclass
class Context:
    """The output folder, the sizes, and the experiment, which the first act that needs it runs."""

    out: Path
    sizes: Sizes = DEMO
    note: Callable[[str], object] = lambda _: None
    train: Callable[..., Experiment] = why_mask

    def result(self) -> Result:
        return Result(self.out)

    @cached_property
    def experiment(self) -> Experiment:
        return self.train(self.sizes.setting, note=self.note)


class Act(NamedTuple):
    """A part of the tour."""

    title: str
    sentence: str  # what it shows
    run: Callable[[Context], Result]


class Shown(NamedTuple):
    """An act after its run."""

    name: str
    title: str
    sentence: str
    result: Result
    seconds: float


def main(acts: Mapping[str, Act], argv: Sequence[str] | None = None) -> int:
    """Run the acts by the command line's options; the result is the exit code, 1 if a check failed."""
    parser = argparse.ArgumentParser(
        prog="python examples/demo",
        description="Every part of lowtri in one run, each with its checks, pictures and files. "
        "The last line counts the checks; the exit code is 1 if one failed.",
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="a folder for the page and its files")
    parser.add_argument("--tour", action="store_true", help="the same acts at full size: about three minutes")
    parser.add_argument("--part", action="append", choices=list(acts), help="this act alone; may be repeated")
    parser.add_argument("--threads", type=int, help="threads to compute with; default: torch's own choice")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(argv)
    if options.threads is not None:
        if options.threads < 1:
            parser.error(f"--threads is {options.threads}. Fix: at least 1")
        torch.set_num_threads(options.threads)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out}: {error.strerror}. Fix: a folder that you may write to")
    if not os.access(options.out, os.W_OK):
        parser.error(f"--out {options.out}: it is read-only. Fix: a folder that you may write to")
    context = Context(
        options.out, TOUR if options.tour else DEMO, note=lambda line: print(line, file=sys.stderr, flush=True)
    )
    shown: list[Shown] = []
    for name, act in acts.items():
        if not options.part or name in options.part:
            shown.append(_run(name, act, context))
            if not options.json:
                _print(len(shown), shown[-1])
    checks = [check for one in shown for check in one.result.checks]
    passed = sum(check.passed for check in checks)
    verdict = f"{passed} of {len(checks)} checks passed"
    index = options.out / "index.html"
    write_text(index, as_html(shown, verdict, _machine(sum(one.seconds for one in shown))))
    if options.json:
        print(json.dumps({"verdict": verdict, "parts": [_as_dict(one) for one in shown]}, indent=2))
    else:
        print(f"\n{index}\n{verdict}")
    return 0 if passed == len(checks) else 1


def _run(name: str, act: Act, context: Context) -> Shown:
    """Run one act. An exception is a failed check of that act; the others still run."""
    started = time.perf_counter()
    try:
        result = act.run(context)
    except Exception as error:
        result = context.result()
        result.say(f"{type(error).__name__}: {error}")
        result.check(f"it runs to its end: {type(error).__name__}", False)
    return Shown(name, act.title, act.sentence, result, time.perf_counter() - started)


def _print(number: int, shown: Shown) -> None:
    print(f"\n{number}. {shown.title}\n{shown.sentence}\n\n{shown.result.text}\n")
    for check in shown.result.checks:
        print(f"   {'✓' if check.passed else '✗ FAILED:'} {check.text}", flush=True)


def _as_dict(shown: Shown) -> dict[str, object]:
    checks = [check._asdict() for check in shown.result.checks]
    files = [*shown.result.pictures, *shown.result.files]
    return {"part": shown.name, "seconds": round(shown.seconds, 1), "checks": checks, "files": files}


def _machine(seconds: float) -> str:
    versions = f"lowtri {lowtri.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    where = f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads of {os.cpu_count()} CPUs"
    return f"{versions}; {where}; {time.strftime('%Y-%m-%d')}, {seconds:.0f} s"


_STYLE = """:root { --good: light-dark(#276749, #68d391); --bad: light-dark(#c53030, #fc8181) }
:root a { color: inherit } :root img { max-width: 100%; height: auto; display: block; margin: 1rem 0 }
:root pre { font: var(--s0)/1.4 var(--mono); overflow-x: auto; margin: .8rem 0 }
:root .said { white-space: pre-line; font-size: var(--s1); color: var(--soft) }
:root .picture { display: inline-block; vertical-align: top; max-width: 100%; margin-right: 1.5rem; overflow-x: auto }
:root .picture figcaption { white-space: pre-line; margin: 0 0 .6rem; max-width: 19rem }
:root ul.checks { list-style: none; padding: 0 } :root summary { cursor: pointer; color: var(--soft); font-size: var(--s1) }
:root .passed::before { content: "✓ "; color: var(--good) } :root .failed::before { content: "✗ " }
:root .scroll { margin: 1rem 0 } :root .rows tr > :is(td, th):nth-child(n) { white-space: normal; width: auto; padding-right: 1.5rem }
:root .rows tr > td:first-child { white-space: nowrap; font-weight: 500 }
:root .failed { color: var(--bad) } :root .small { color: var(--soft); font-size: var(--s0) }
"""


def as_html(acts: Sequence[Shown], verdict: str, machine: str) -> str:
    """The page as text, with relative links to the pictures and files in its folder."""
    return page("demo", f"lowtri demo: {verdict}", _parts(acts, verdict, machine), TABLE_STYLE + _STYLE)


def _parts(acts: Sequence[Shown], verdict: str, machine: str) -> Iterator[str]:
    yield f"<h1>lowtri: {escape(verdict)}</h1>"
    yield "<p>You state once which query may see which key. From that statement follow the attention, a cache that fits it, "
    yield "a check that a model does not see more, and a picture.</p>"
    yield f'<p class="small">{escape(machine)}</p>'
    yield "<ol>" + "".join(f'<li><a href="#{act.name}">{escape(act.title)}</a></li>' for act in acts) + "</ol>"
    for number, act in enumerate(acts, start=1):
        yield f'<section class="figure" id="{act.name}"><h2>{number}. {escape(act.title)}</h2>'
        yield f'<p>{escape(act.sentence)}</p><ul class="checks">'
        for check in act.result.checks:
            yield f'<li class="{"passed" if check.passed else "failed"}">{html_text(check.text)}</li>'
        links = ", ".join(f'<a href="{escape(name)}">{escape(name)}</a>' for name in act.result.files)
        yield f'</ul>{act.result.html}<p class="small">{links}{". " * bool(links)}{act.seconds:.1f} s</p></section>'
