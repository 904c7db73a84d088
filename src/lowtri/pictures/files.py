"""Pictures as files, in the format of the file's name: SVG and HTML as they are, PNG and PDF drawn from the SVG by matplotlib."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lowtri.errors import DataError
from lowtri.files import write_atomically, write_text, writing

_DRAWN = (".png", ".pdf")
_SPACE = "{http://www.w3.org/2000/svg}"
_FONTS = (  # the first that has a letter draws it; those that are not installed are left out
    *(
        "DejaVu Sans Mono",
        "Noto Sans Mono CJK TC",
        "Noto Sans CJK TC",
        "Noto Sans CJK JP",
        "PingFang TC",
        "Noto Sans Thai",
    ),
    *("Microsoft JhengHei", "WenQuanYi Zen Hei", "Leelawadee UI", "Thonburi", "Loma", "Noto Emoji"),
)


def save_picture(path: str | Path, forms: Mapping[str, Callable[[], str]]) -> Path:
    """Write a picture to ``path`` in the format of its suffix, atomically.

    Args:
        forms: suffix -> the text of that format; ".svg" is one of them, and the source of PNG and PDF.

    Raises:
        DataError: if the suffix names no format, matplotlib is missing, or the file cannot be written.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix in forms:
        text = forms[suffix]()
        write: Callable[[], None] = lambda: write_text(target, text)  # noqa: E731
    elif suffix in _DRAWN:
        figure = _figure(forms[".svg"](), target)
        options = {"metadata": {"CreationDate": None}} if suffix == ".pdf" else {"dpi": 192}  # no date: equal files
        write = lambda: write_atomically(target, lambda part: figure.savefig(part, format=suffix[1:], **options))  # noqa: E731
    else:
        raise DataError(
            f"save: {path} ends in none of {', '.join([*forms, *_DRAWN])}, the formats that are written. "
            f"Fix: {target.stem.strip('.')}.svg."
        )
    with writing("save", path):
        write()
    return target


def _figure(svg: str, target: Path) -> Any:
    """A matplotlib figure of one of our own SVG texts: rectangles, paths of straight lines, and texts."""
    try:
        # The figure itself, without pyplot: no window, no global state.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.font_manager import get_font_names
    except ImportError:
        raise DataError(
            f"save: {target.name} needs matplotlib. Fix: pip install 'lowtri[plot]', or {target.stem}.svg."
        ) from None
    root = ET.fromstring(svg)
    width, height = (float(root.attrib[side]) for side in ("width", "height"))
    figure = Figure(figsize=(width / 72, height / 72))  # one unit of the SVG is one point
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    installed = set(get_font_names())
    fonts = [name for name in _FONTS if name in installed]
    hatching = root.find(f".//{_SPACE}pattern/{_SPACE}path")
    hatch = "none" if hatching is None else hatching.attrib["stroke"]
    for node in root:
        if node.tag == f"{_SPACE}rect":
            _rectangle(axes, node, (width, height), hatch)
        elif node.tag == f"{_SPACE}path":
            _path(axes, node, hatch)
        elif node.tag == f"{_SPACE}text":
            _text(axes, node, root.attrib["fill"], fonts)
    return figure


def _look(node: ET.Element, hatch: str) -> dict[str, Any]:
    fill, stroke = node.get("fill", "none"), node.get("stroke")
    if fill.startswith("url("):
        return {"facecolor": "none", "edgecolor": hatch, "hatch": "/////", "linewidth": 0.4}
    look = {"facecolor": fill, "edgecolor": stroke or "none", "linewidth": float(node.get("stroke-width", "0.7"))}
    if "fill-opacity" in node.attrib:
        from matplotlib.colors import to_rgba

        look["facecolor"] = to_rgba(fill, float(node.attrib["fill-opacity"]))
    return look


def _rectangle(axes: Any, node: ET.Element, whole: tuple[float, float], hatch: str) -> None:
    from matplotlib.patches import Rectangle

    x, y = float(node.get("x", "0")), float(node.get("y", "0"))
    sides = [
        of if node.get(name) == "100%" else float(node.attrib[name])
        for name, of in zip(("width", "height"), whole, strict=True)
    ]
    axes.add_patch(Rectangle((x, y), *sides, **_look(node, hatch)))


def _path(axes: Any, node: ET.Element, hatch: str) -> None:
    """M, h, v and z: what our own paths consist of."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    x = y = 0.0
    points, codes = [], []
    for command, numbers in re.findall(r"([Mhvz])([-\d. ]*)", node.attrib["d"]):
        values = [float(number) for number in numbers.split()]
        if command == "M":
            x, y = values
        elif command in "hv":
            x, y = (x + values[0], y) if command == "h" else (x, y + values[0])
        points.append((x, y))
        codes.append({"M": Outline.MOVETO, "z": Outline.CLOSEPOLY}.get(command, Outline.LINETO))
    if points:
        axes.add_patch(PathPatch(Outline(points, codes), **_look(node, hatch)))


def _text(axes: Any, node: ET.Element, ink: str, fonts: list[str]) -> None:
    x, y, turned = float(node.get("x", "0")), float(node.get("y", "0")), 0.0
    if "transform" in node.attrib:
        x, y, turned = map(float, re.findall(r"-?[\d.]+", node.attrib["transform"]))
    axes.text(
        *(x, y, node.text or ""),
        fontsize=float(node.get("font-size", "12")),
        fontweight=node.get("font-weight", "normal"),
        color=node.get("fill", ink),
        family=fonts,
        ha={"end": "right", "middle": "center"}.get(node.get("text-anchor", ""), "left"),
        va="baseline",
        rotation=-turned,  # clockwise in SVG
        rotation_mode="anchor",
        parse_math=False,  # a dollar sign of a token is a dollar sign
    )
