"""How fast the lesson's page paints and answers in a browser whose CPU is throttled four times, through the DevTools protocol.

    python benchmarks/lesson_paint.py                   # needs Chromium; --slower 1 for the machine as it is

First paint: the work of the page's main thread from the navigation to the first contentful paint, in CPU time (the
throttle burns CPU time, so it counts; waiting for other programs does not); and the time on the clock. Interactions:
real clicks, keys and drags; the main thread's work, and from the event to the next frame as the browser's Event Timing
reports it. On a machine that others use only the work is comparable.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from browser import Browser, Page  # noqa: E402

from lowtri.benching import facts  # noqa: E402
from lowtri.lesson.page import write_lesson  # noqa: E402

WORDS = " ".join(f"word{i}" for i in range(200))
_EVENTS = (
    "globalThis.slow = []; new PerformanceObserver(list => slow.push(...list.getEntries().map(e => e.duration)))"
    ".observe({type: 'event', durationThreshold: 16})"
)
_PAINTED = """new Promise(done => { const look = () => {
    const [paint] = performance.getEntriesByName("first-contentful-paint");
    if (paint) done(paint.startTime); else setTimeout(look, 20);
}; look() })"""
_FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 30))))"


def first_paint(browser: Browser, path: Path, slower: float) -> tuple[float, float]:
    """Milliseconds of the main thread's work until the first contentful paint; and on the clock."""
    browser.events.clear()
    browser.send(
        "Tracing.start", transferMode="ReportEvents", categories="devtools.timeline,toplevel,loading,blink.user_timing"
    )
    page = browser.open_lesson(path, width=390, slower=slower, whole=False)
    clock = page.run(_PAINTED)
    browser.send("Tracing.end")
    while not any(event.get("method") == "Tracing.tracingComplete" for event in browser.events):
        browser.send("Browser.getVersion")
    events = [e for m in browser.events if m.get("method") == "Tracing.dataCollected" for e in m["params"]["value"]]
    page.close()
    paint = max(e["ts"] for e in events if e["name"] == "firstContentfulPaint")
    (thread,) = {(e["pid"], e["tid"]) for e in events if e["name"] == "firstContentfulPaint" and e["ts"] == paint}
    start = max(e["ts"] for e in events if e["name"] == "navigationStart" and e["pid"] == thread[0] and e["ts"] < paint)
    work = sum(
        e.get("tdur", 0)
        for e in events
        if (e["pid"], e["tid"]) == thread and e["name"] == "ThreadControllerImpl::RunTask" and start <= e["ts"] <= paint
    )
    return work / 1000, clock


def click(selector: str) -> Callable[[Page], None]:
    def act(page: Page) -> None:
        box = page.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            page.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    return act


def key(element: str, key: str) -> Callable[[Page], None]:
    def act(page: Page) -> None:
        page.run(f"document.getElementById({json.dumps(element)}).focus({{preventScroll: false}})")
        page.press(key)

    return act


def typed(text: str) -> Callable[[Page], None]:
    def act(page: Page) -> None:
        page.run("document.getElementById('sentence').focus()")
        page.send("Input.insertText", text=text)

    return act


ACTIONS: dict[str, tuple[str, Callable[[Page], None]]] = {  # name -> sentence, what the reader does
    "mask switch, 3 tokens": ("Write a poem", click("#mask-switch")),
    "draw on the mask": ("Write a poem", click('[data-matrix="mask"] td[data-i="2"][data-j="0"]')),
    "a letter, 3 tokens": ("Write a poem", typed("s")),
    "a letter, 8 tokens": ("one two three four five six seven eight", typed("s")),
    "next of the step mode": ("Write a poem", click("[data-walk=start]")),
    "mask switch, 200 tokens": (WORDS, click("#mask-switch")),
    "a letter, 200 tokens": (WORDS, typed("s")),
    "window's width, 200 tokens": (WORDS, key("window-width", "ArrowRight")),
    "width of the patterns": ("Write a poem", key("patterns-w", "ArrowRight")),
    "tokens of the patterns": ("Write a poem", key("patterns-n", "ArrowRight")),
    "a head of SmolLM2": ("Write a poem", click('#maps [data-map="5,3"]')),
    "the other model": ("Write a poem", click("#maps .chips button:nth-child(2)")),
    "bytes that three models wrote": ("Write a poem", key("written-bytes", "ArrowLeft")),
    "an answer of the quiz": ("Write a poem", click(".quiz .choices button")),
}


def interaction(page: Page, act: Callable[[Page], None]) -> tuple[float, float]:
    """Milliseconds of the main thread's work, and from the event to the next frame."""
    page.run(_FRAMES)
    page.run("slow.length = 0")
    before = _work(page)
    act(page)
    page.run(_FRAMES)
    return 1000 * (_work(page) - before), page.run("Math.max(0, ...slow)")


def _work(page: Page) -> float:
    """Seconds of script, style and layout on the main thread."""
    metrics = {metric["name"]: metric["value"] for metric in page.send("Performance.getMetrics")["metrics"]}
    return float(metrics["ScriptDuration"] + metrics["LayoutDuration"] + metrics["RecalcStyleDuration"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slower", type=float, default=4, help="the throttle of the browser's CPU")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    known: dict[str, Any] = facts(1)
    print(f"{known['date'][:10]}, {known['cpu']}, throttled {options.slower:g} times; medians of {options.rounds}, ms")
    with tempfile.TemporaryDirectory() as folder:
        path = write_lesson(Path(folder) / "lesson-en.html")
        browser = Browser()
        try:
            print(browser.send("Browser.getVersion")["product"])
            floor = Path(folder) / "floor.html"
            floor.write_text("<!doctype html><title>-</title><h1>One line</h1><script>Lesson = {ready: 1}</script>")
            pages = {"first paint of one line of text": floor, "first paint of the lesson": path}
            paints: dict[str, list[tuple[float, float]]] = {name: [] for name in pages}
            for _ in range(options.rounds):
                for name, file in pages.items():  # interleaved
                    paints[name].append(first_paint(browser, file, options.slower))
            for name, measured in paints.items():
                _print(name, measured)
            page = browser.open_lesson(path, width=390, slower=options.slower, whole=False)
            page.send("Performance.enable", timeDomain="threadTicks")
            page.run(_EVENTS)
            for name, (sentence, act) in ACTIONS.items():
                page.type("sentence", sentence)
                _print(name, [interaction(page, act) for _ in range(options.rounds)])
        finally:
            browser.close()


def _print(name: str, measured: list[tuple[float, float]]) -> None:
    work, clock = (statistics.median(column) for column in zip(*measured, strict=True))
    print(f"{name:32} work {work:6.0f}   clock {clock:6.0f}", flush=True)


if __name__ == "__main__":
    main()
