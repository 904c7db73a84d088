"""A drawing of who sees whom: what was declared, what was seen, what leaks."""

from __future__ import annotations

import html

import numpy as np
import numpy.typing as npt

__all__ = ["LEGEND", "cells", "draw_text", "to_table"]

LEGEND = "█ declared and seen   ○ declared, never seen   ▒ declared, not looked at   · hidden   ✗ leak"
_CLASSES = {"█": "seen", "○": "blind", "▒": "open", "·": "hidden", "✗": "leak"}


def cells(
    allowed: npt.NDArray[np.bool_], seen: npt.NDArray[np.float64], leaks: list[tuple[int, int]], most: int
) -> list[str]:
    """One line for each query (or for each block of queries, when there are more than `most`), one sign for each key."""
    n = len(allowed)
    leaking = np.zeros((n, n), bool)
    for query, key in leaks:
        if query < n and key < n:
            leaking[query, key] = True
    side = -(-n // most)
    lines = []
    for q in range(0, n, side):
        line = ""
        for k in range(0, n, side):
            block = np.s_[q : q + side, k : k + side]
            looked = seen[block][allowed[block]]
            if leaking[block].any():
                line += "✗"
            elif not allowed[block].any():
                line += "·"
            elif np.isnan(looked).all():
                line += "▒"
            else:
                line += "█" if np.nan_to_num(looked).max() > 0 else "○"
        lines.append(line)
    return lines


def draw_text(lines: list[str], n: int) -> str:
    """The drawing with its legend; queries go down, keys go right."""
    scale = "" if len(lines) == n else f"   (each sign stands for {-(-n // len(lines))} x {-(-n // len(lines))} pairs)"
    used = [part for part in LEGEND.split("   ") if any(part[0] in line for line in lines)]
    return "\n".join([*("  " + line for line in lines), "  " + "   ".join(used) + scale])


def to_table(lines: list[str]) -> str:
    """The drawing as an HTML table; every cell's title names its pair."""
    side = max(4, min(18, 720 // max(1, len(lines))))
    rows = []
    for q, line in enumerate(lines):
        row = "".join(f'<td class="{_CLASSES[c]}" title="query {q}, key {k}"></td>' for k, c in enumerate(line))
        rows.append(f"<tr>{row}</tr>")
    style = (
        f"table.audit{{border-collapse:collapse}}table.audit td{{width:{side}px;height:{side}px;border:1px solid #ddd;padding:0}}"
        "td.seen{background:#2b6cb0}td.blind{background:#bee3f8}td.open{background:#90cdf4}"
        "td.hidden{background:repeating-linear-gradient(45deg,#fff,#fff 3px,#eee 3px,#eee 4px)}td.leak{background:#c53030}"
    )
    return f'<style>{style}</style><table class="audit">{"".join(rows)}</table><p>{html.escape(LEGEND)}</p>'
