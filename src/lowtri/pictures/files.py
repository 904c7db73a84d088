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
    *("DejaVu Sans Mono", "Noto Sans Mono CJK TC", "Noto Sans CJK TC", "Noto Sans CJK JP", "PingFang TC"),
    *("Noto Sans Thai", "Microsoft JhengHei", "WenQuanYi Zen Hei", "Leelawadee UI", "Thonburi", "Loma", "Noto Emoji"),
)


def save_picture(path: str | Path, forms: Mapping[str, Callable[[], str]]) -> Path:
    """Write a picture to ``path`` in the format of its suffix, atomically.

    Args:
        forms: suffix -> the text of that format; ".svg" is one of them, and the source of PNG and PDF.

    Raises:
        DataError: if the suffix names no format, matplotlib is missing, or the file cannot be written.
    """
    if not isinstance(path, str | Path):
        raise DataError(f'save: the path is {path!r:.60}; expected the name of a file. Fix: "mask.svg".')
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in (*forms, *_DRAWN):
        raise DataError(
            f"save: {path} ends in none of {', '.join([*forms, *_DRAWN])}, the formats that are written. "
            f"Fix: {target.stem.strip('.')}.svg."
        )
    if suffix in forms:
        text = forms[suffix]()
        with writing("save", path):
            write_text(target, text)
    else:
        figure = _figure(forms[".svg"](), target)
        options = {"metadata": {"CreationDate": None}} if suffix == ".pdf" else {"dpi": 192}  # no date: equal files
        with writing("save", path):
            write_atomically(target, lambda part: figure.savefig(part, format=suffix[1:], **options))
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
            f"save: {target.name} needs matplotlib. Fix: pip install matplotlib, or {target.stem}.svg."
        ) from None
    root = ET.fromstring(svg)
    width, height = (float(root.attrib[side]) for side in ("width", "height"))
    figure = Figure(figsize=(width / 72, height / 72))  # one unit of the SVG is one point
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    installed = set(get_font_names())
    hatching = root.find(f".//{_SPACE}pattern/{_SPACE}path")
    for node in root:
        if node.tag in (f"{_SPACE}rect", f"{_SPACE}path"):
            _shape(axes, node, "none" if hatching is None else hatching.attrib["stroke"])
        elif node.tag == f"{_SPACE}text":
            _text(axes, node, root.attrib["fill"], [name for name in _FONTS if name in installed])
    return figure


def _shape(axes: Any, node: ET.Element, hatch: str) -> None:
    """A rectangle, or a path of M, h, v and z."""
    from matplotlib.colors import to_rgba
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    outline = node.get("d")
    if outline is None:
        wide = node.get("width")
        outline = f"M{node.get('x', 0)} {node.get('y', 0)}h{wide}v{node.get('height')}h-{wide}z"
    points = []
    codes = []
    x = y = 0.0
    for command, numbers in re.findall(r"([Mhvz])([-\d. ]*)", outline):
        values = [float(number) for number in numbers.split()]
        if command == "M":
            x, y = values
        elif command == "h":
            x += values[0]
        elif command == "v":
            y += values[0]
        points.append((x, y))
        codes.append({"M": Outline.MOVETO, "z": Outline.CLOSEPOLY}.get(command, Outline.LINETO))
    look: dict[str, Any] = {"facecolor": "none", "edgecolor": hatch, "hatch": "/////", "linewidth": 0.4}
    if not (fill := node.get("fill", "none")).startswith("url("):
        opacity = float(node.get("fill-opacity", "1")) if fill != "none" else None
        look = {"facecolor": to_rgba(fill, opacity), "edgecolor": node.get("stroke", "none")}
        look["linewidth"] = float(node.get("stroke-width", "0.7"))
    axes.add_patch(PathPatch(Outline(points, codes), **look))


def _text(axes: Any, node: ET.Element, ink: str, fonts: list[str]) -> None:
    if "transform" in node.attrib:
        x, y, turned = map(float, re.findall(r"-?[\d.]+", node.attrib["transform"]))
    else:
        x = float(node.get("x", "0"))
        y = float(node.get("y", "0"))
        turned = 0.0
    axes.text(
        x,
        y,
        node.text or "",
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
