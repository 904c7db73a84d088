"""Draws docs/lesson.png, the picture of the lesson in README.md and in the site: the steps of the worked example.

python tools/lesson_picture.py          # needs Chromium
"""

from __future__ import annotations

import argparse
import base64
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from browser import Browser  # noqa: E402

from lowtri.files import write_atomically  # noqa: E402
from lowtri.lesson.page import write_lesson  # noqa: E402

WIDTH = 1360  # of the page, in CSS pixels
SCALE = 2  # pixels of the picture for each of these
MARGIN = 8
# From the equation to the end of the matrices, as wide as these are.
_BOX = """(() => {
  const [bar, flow] = [document.querySelector("#bench .equationbar"), document.querySelector("#bench .flow")];
  const top = bar.getBoundingClientRect(), bottom = flow.getBoundingClientRect();
  const right = Math.max(...[...flow.querySelectorAll("table")].map((table) => table.getBoundingClientRect().right));
  return { x: top.left + scrollX, y: top.top + scrollY, width: right - top.left, height: bottom.bottom - top.top };
})()"""


def picture() -> bytes:
    """The steps of the worked example as PNG, with the weight of query 3 and key 2 chosen."""
    browser = Browser()
    try:
        with tempfile.TemporaryDirectory() as folder:
            page = browser.open_lesson(write_lesson(Path(folder) / "lesson.html"), width=WIDTH)
            page.run('document.querySelector(\'#weights td[data-i="2"][data-j="1"]\').focus()')
            page.run("document.activeElement.blur()")
            page.run(
                "document.head.append(Lesson.el('style', {}, '.block { background: none !important }'))"
            )  # no shadows
            box = page.run(_BOX)
            clip = {
                "x": box["x"] - MARGIN,
                "y": box["y"] - MARGIN,
                "width": box["width"] + 2 * MARGIN,
                "height": box["height"] + 2 * MARGIN,
                "scale": SCALE,
            }
            shot = page.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
            page.close()
    finally:
        browser.close()
    return base64.b64decode(shot["data"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "lesson.png")
    options = parser.parse_args()
    content = picture()
    write_atomically(options.out, lambda path: path.write_bytes(content))
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
