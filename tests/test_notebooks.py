"""What notebooks show, in a real browser: on light and dark pages, with the style sheets of several hosts, and without any."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import Browser, Page, chromium

import lowtri
from lowtri.explaining.example import untrained
from lowtri.pictures.svg import INK, PAPER, VISIBLE, ink_over

NARROW, WIDE = 390, 1280
# What each host says about tables, code and images in an output.
_TABLES = """{0} table {{ border-collapse: collapse; border: none; table-layout: fixed; margin-bottom: 1em; color: {1} }}
{0} table {{ font-size: 12px }}
{0} td, {0} th, {0} tr {{ text-align: right; vertical-align: middle; padding: .5em; line-height: normal; white-space: normal;
  max-width: none; border: none }} {0} th {{ font-weight: bold }} {0} p {{ margin: 0 0 1em; text-align: left }}
{0} h1, {0} h2 {{ font-weight: 400; margin: 2em 0 1em }} {0} tbody tr:nth-child(odd) {{ background: {2} }}
{0} tbody tr:nth-child(even) {{ background: {3} }} {0} code, {0} pre {{ background: {2}; color: {1}; font-size: inherit }}
{0} :not(pre) > code {{ background: {3}; padding: 1px 5px }} {0} svg {{ fill: red }}"""
_LIGHT, _DARK = ("#212121", "#ffffff", "#f5f5f5"), ("#ffffff", "#111111", "#333333")
_BODY = "body { margin: 0; background: %s; color: %s; font-family: serif }"
HOSTS = {  # name -> attributes of the body, class around an output, style sheet, whether the page is dark
    "JupyterLab": ('data-jp-theme-light="true"', "jp-RenderedHTMLCommon", _LIGHT, False),
    "JupyterLab dark": ('data-jp-theme-light="false"', "jp-RenderedHTMLCommon", _DARK, True),
    "VS Code": ('class="vscode-light"', "output_html", _LIGHT, False),
    "VS Code dark": ('class="vscode-dark"', "output_html", _DARK, True),
    "another page": ("", "output", _LIGHT, False),
}


def outputs() -> dict[str, Any]:
    """One thing of each kind that notebooks show."""

    class Leaks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.cumsum(1) + 0.01 * x.roll(-1, 1)

    weights = np.tril(np.random.default_rng(0).random((2, 6, 6))) + np.eye(6)
    cache = lowtri.KVCache("causal & (window(4) | first(2))", block=1)
    for _ in range(12):
        cache.append(np.zeros((1, 2)), np.zeros((1, 2)))
    q = torch.zeros(1, 2, 128, 32)
    return {
        "mask": lowtri.causal() & lowtri.window(64),
        "weights": lowtri.show(
            weights / weights.sum(-1, keepdims=True), tokens="The black cat <b>sat</b> down &", mask="causal"
        ),
        "explanation": untrained("I love machine learning models", "causal & window(3)"),
        "step": untrained("I love machine learning models", "causal & window(3)")["weights"],
        "audit": lowtri.audit(Leaks(), torch.randn(1, 8, 4, generator=torch.Generator().manual_seed(0))),
        "cache": cache,
        "engine": lowtri.which_engine(q, q, q, "causal & window(16)"),
        "plan": lowtri.parallel.plan_shards("causal & window(200)", 1024, 4, block=64),
    }


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    return outputs()


@pytest.fixture(scope="module")
def html(shown: dict[str, Any]) -> dict[str, str]:
    return {name: one._repr_html_() for name, one in shown.items()}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if chromium() is None:
        pytest.skip("no browser: apt-get install chromium")
    browser = Browser()
    yield browser
    browser.close()


def opened(browser: Browser, html: dict[str, str], host: str, folder: Path, **options: Any) -> Page:
    """The page of a host with all outputs and a table of its own."""
    attributes, name, (ink, paper, row), _ = HOSTS[host]
    style = _TABLES.format(f".{name}", ink, paper, row) + _BODY % (paper, ink)
    own = '<table id="own"><tbody><tr><th>a</th><td>b</td></tr></tbody></table><svg id="picture"><text>c</text></svg>'
    body = "".join(f'<div class="{name}" id="{one}">{text}</div>' for one, text in html.items())
    path = folder / "host.html"
    path.write_text(
        f'<!doctype html><html><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<style>{style}</style></head><body {attributes}><div class='{name}'>{own}</div>{body}</body></html>",
        encoding="utf-8",
    )
    return browser.open(path, **options)


# The least contrast of a text with the backgrounds below it, and where it is; hatched cells count as their lightest part.
CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = colour => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data] };
  const light = ([r, g, b]) => [r, g, b].map(c => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const under = e => { for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor);
    if (c[3] > 250) return c } return [255, 255, 255, 255] };
  let least = [99, ''];
  for (const root of document.querySelectorAll('[class^=lowtri-]')) {
    const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      const e = walk.currentNode.parentElement;
      if (!walk.currentNode.data.trim() || !e.checkVisibility() || e.closest('svg, style')) continue;
      const [a, b] = [light(rgba(getComputedStyle(e).color)), light(under(e))].sort((x, y) => y - x);
      const ratio = (a + .05) / (b + .05);
      if (ratio < least[0]) least = [ratio, root.className + ': ' + walk.currentNode.data.trim()];
    }
  }
  return least })()"""
# Tables that are cut off, and anything wider than the screen.
CUT = """[...document.querySelectorAll('[class^=lowtri-] .scroll:has(table)')].filter(e => e.scrollWidth > e.clientWidth + 1)
  .map(e => [e.scrollWidth, e.clientWidth, e.innerText.slice(0, 40)])
  .concat(document.documentElement.scrollWidth > innerWidth ? ['page'] : [])"""
# What style sheets decide, of each element of the outputs: nothing that follows from sizes of a page.
LOOKS = """(name => { const which = ['color', 'background-color', 'background-image', 'font-family', 'font-size', 'font-weight',
  'line-height', 'text-align', 'vertical-align', 'white-space', 'padding', 'border', 'border-collapse', 'border-spacing',
  'table-layout', 'display', 'margin-top', 'margin-bottom', 'max-width', 'fill'];
  return [...document.querySelectorAll(name)].flatMap(e => [e, ...e.querySelectorAll('*')])
    .map(e => e.tagName + which.map(p => getComputedStyle(e).getPropertyValue(p)).join('|')) })"""


@pytest.mark.parametrize("host", HOSTS)
def test_outputs_are_readable_on_the_page_whatever_the_system_is(
    host: str, browser: Browser, html: dict[str, str], tmp_path: Path
) -> None:
    dark = HOSTS[host][-1]
    page = opened(browser, html, host, tmp_path, width=WIDE, dark=not dark)  # a system of the other kind
    ratio, where = page.run(CONTRAST)
    assert ratio >= 4.5, (ratio, where)
    assert page.run(CUT) == []
    assert page.run("[...document.querySelectorAll('img')].every(e => e.complete && e.naturalWidth > 100)")
    schemes = page.run("[...new Set([...document.querySelectorAll('img')].map(e => getComputedStyle(e).colorScheme))]")
    assert schemes == ["dark" if dark else "light"]
    page.resize(NARROW)
    assert page.run(CUT) == []
    page.close()


def test_pictures_have_the_ink_of_their_background(browser: Browser, html: dict[str, str], tmp_path: Path) -> None:
    """An image of a dark system on a light page is light: its corner and its title, as pixels."""
    from matplotlib.image import imread

    for host, corner in (("JupyterLab", PAPER.light), ("JupyterLab dark", PAPER.dark)):
        page = opened(browser, {"mask": html["mask"]}, host, tmp_path, width=WIDE, dark=corner == PAPER.light)
        page.screenshot(tmp_path / "mask.png", selector="img")
        pixels = np.round(imread(tmp_path / "mask.png")[..., :3] * 255).astype(int)
        wanted = [int(corner[i : i + 2], 16) for i in (1, 3, 5)]
        assert abs(pixels[3, 3] - wanted).max() <= 1
        assert abs(pixels[10:40].sum(-1) - sum(wanted)).max() > 450  # letters
        page.close()


def test_no_style_of_a_host_reaches_an_output_and_none_of_an_output_a_host(
    browser: Browser, html: dict[str, str], tmp_path: Path
) -> None:
    def looks(host: str, content: dict[str, str], names: list[str]) -> list[Any]:
        page = opened(browser, content, host, tmp_path, width=WIDE)
        every = [page.run(f"{LOOKS}({json.dumps(name)})") for name in names]
        page.close()
        return every

    selectors = [f".lowtri-{name}" for name in html]
    alone = [looks("another page", {name: text}, [f".lowtri-{name}"])[0] for name, text in html.items()]
    assert min(map(len, alone)) > 3
    own = ["#own", "#picture"]
    without = looks("JupyterLab", {}, own)
    for host in ("JupyterLab", "VS Code"):
        everything = looks(host, html, selectors + own)  # all outputs stand in one notebook
        for name, here, there in zip(selectors, everything, alone, strict=False):
            assert here == there, (host, name)
        assert host != "JupyterLab" or everything[len(alone) :] == without


class _Sanitized(HTMLParser):
    """What GitHub leaves of an output: no style sheets, scripts, vector graphics or data images; no classes, ids or `hidden`."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words, self.tags, self._inside = "", [], ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag in ("style", "script", "svg", "iframe"):
            self._inside = self._inside or tag
        elif not self._inside and tag != "img":
            self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag == self._inside else self._inside

    def handle_data(self, data: str) -> None:
        self.words += "" if self._inside and self._inside != "svg" else data  # the words of pictures may stay


def test_where_styles_and_images_are_removed_the_text_can_be_read(shown: dict[str, Any], html: dict[str, str]) -> None:
    for name, text in html.items():
        left = _Sanitized(text)
        assert "{" not in left.words and "svg" not in left.tags, name
        # The words of a picture within the page would stay, jumbled.
        assert "<svg" not in text and text.count("<img") == (name not in ("engine", "step"))
        if name in ("explanation", "engine", "audit"):
            assert left.tags.count("table") == left.tags.count("thead") >= 1
        if name in ("mask", "weights", "cache", "plan", "audit"):
            drawing = shown[name].draw() if name == "audit" else str(shown[name])
            assert left.tags.count("pre") == 1 and drawing in left.words, name
    steps = _Sanitized(html["explanation"]).words
    assert all(f"{step.name} " in steps or f"{step.name}=" in steps for step in shown["explanation"].steps)


@pytest.mark.parametrize("dark", [False, True])
def test_pages_of_their_own_follow_the_system(
    dark: bool, browser: Browser, shown: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("explanation", "audit"):
        path = tmp_path / f"{name}.html"
        shown[name].save(path)
        page = browser.open(path, width=WIDE, dark=dark)
        ratio, where = page.run(CONTRAST)
        assert ratio >= 4.5, (name, ratio, where)
        assert page.run("getComputedStyle(document.body).backgroundColor") == (
            "rgb(21, 22, 26)" if dark else "rgb(251, 250, 247)"
        )
        for width in (WIDE, NARROW):
            page.resize(width)
            assert page.run(CUT) == [], (name, width)
        assert page.problems() == []
        page.close()


def test_numbers_on_weights_are_readable() -> None:
    """On any share of the colour; with two inks no threshold gives more than 3.65 for all shares of the dark scheme."""

    def luminance(colour: np.ndarray) -> float:
        channels = np.where(colour <= 0.03928, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
        return float(channels @ [0.2126, 0.7152, 0.0722])

    def of(text: str) -> np.ndarray:
        return np.array([int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)])

    inks = {"ink": INK, "paper": PAPER, "dark": type(INK)(INK.light, PAPER.dark)}
    for share in np.linspace(0, 1, 101):
        name = re.search(r"lowtri-(\w+)", ink_over(share))
        assert name is not None
        for theme in ("light", "dark"):
            below = of(getattr(VISIBLE, theme)) * share + of(getattr(PAPER, theme)) * (1 - share)
            high, low = sorted((luminance(below), luminance(of(getattr(inks[name[1]], theme)))), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 3.6, (share, theme)
