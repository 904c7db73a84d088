"""The page of wrong attentions: a picture and the figures of each, from what `benchmarks/lesson_data.py gallery` measured."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from lowtri.pictures.svg import declared

__all__ = ["gallery_page"]

ROOT = Path(__file__).parents[2]
MUSEUM = ROOT / "examples" / "leaks" / "wrong"
LOOKS = {"█": "seen", "○": "blind", "▒": "soft", "·": "hid", "✗": "leak"}  # as in the audit's drawing
HONEST = 0.99  # a loss below this one has looked ahead
GROUPS = {  # probe that reports the piece first -> how it was found
    "change": "Found by changing one input",
    "gradient": "Found by gradients",
    "prefix": "Found by cutting the input off",
    "batch": "Found by changing the other rows of the batch",
    "padding": "Found by adding pads",
    "packing": "Found by running each document of a packed row alone",
    "cache": "Found by decoding step by step",
    "code_paths": "Found on another code path",
    "training": "Found in training mode only",
    "longer": "Found on a longer example only",
}
INTRODUCTION = """# Gallery of wrong attentions

Faults from real code, each reduced to about twenty lines. None raises an error. For each one the gallery shows the
declared mask, what the model sees, and the pair of positions at which `lowtri.audit` reports it first.

The *loss* is that of predicting white noise after 300 steps of training, where 1 is the best that is possible without
looking ahead. A loss below {honest} has looked ahead. A loss near 1 shows nothing: many leaks are too faint for the loss,
or are not there in training, and only an audit finds them. Measured on {date} with lowtri {version} ({cpu}).

<p class="museum legend"><span><i class="seen"></i>declared and seen</span> <span><i class="blind"></i>declared, never
seen</span> <span><i class="hid"></i>hidden</span> <span><i class="leak"></i>leak: hidden, and seen</span></p>
"""


def gallery_page() -> str:
    """The page as Markdown."""
    stored = json.loads((Path(__file__).parent / "gallery.json").read_text(encoding="utf-8"))
    measured = stored["measured"]
    facts = {"date": measured["date"], "version": measured["versions"]["lowtri"], "cpu": measured["cpu"]}
    parts = [_colours(), INTRODUCTION.format(**facts, honest=HONEST)]
    for probe, title in GROUPS.items():
        pieces = [piece for piece in stored["pieces"] if piece["probe"] == probe]
        if pieces:
            parts += [f"## {title}", *map(_card, pieces)]
    return "\n\n".join([*parts, _ending()]) + "\n"


def _card(piece: dict[str, Any]) -> str:
    name = piece["name"]
    source = (MUSEUM / f"{name}.py").read_text(encoding="utf-8")
    title = name.replace("_", " ").capitalize()
    return f"""### {title} {{#{name}}}

<div class="museum card">{_picture(piece["cells"], title)}
<div><p>{escape(piece["doc"])}</p>
<p>Declared: <code>{escape(piece["mask"])}</code><br>Reported: {escape(piece["message"])}<br>{_loss(piece["loss"])}</p>
<details><summary>The code: <code>examples/leaks/wrong/{name}.py</code></summary>
<pre><code>{escape(source)}</code></pre></details></div></div>"""


def _loss(loss: float | None) -> str:
    if loss is None:
        return "Loss: none to compare"
    return f"Loss on noise: {loss:.2f}, " + ("too good" if loss < HONEST else "which looks honest")


def _picture(rows: list[str], label: str) -> str:
    squares = "".join(
        f'<rect class="{LOOKS[sign]}" x="{10 * j}" y="{10 * i}" width="9" height="9"/>'
        for i, row in enumerate(rows)
        for j, sign in enumerate(row)
    )
    side = 10 * len(rows)
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="-1 -1 {side + 1} {side + 1}">{squares}</svg>'


def _colours() -> str:
    """The palette of all pictures, in the theme's light and dark scheme."""
    schemes = {"default": "light", "slate": "dark"}
    rules = [f'[data-md-color-scheme="{scheme}"] .museum {{ {declared(theme)} }}' for scheme, theme in schemes.items()]
    return f"<style>{' '.join(rules)}</style>"


def _ending() -> str:
    count = len(list(MUSEUM.glob("*.py")))
    return f"""## The same on your model

All {count} files run: `lowtri audit examples/leaks/wrong/no_mask.py:make_model`. `examples/leaks/right` has models that
look suspicious but are correct, and that the audit passes. [The audit](audit.md) says what a verdict rests on.

`python benchmarks/lesson_data.py gallery` measures this page again."""
