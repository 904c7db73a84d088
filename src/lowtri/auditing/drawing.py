"""A drawing of who sees whom: what was declared, what was seen, what leaks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["LOOKS", "cells", "draw_text"]

# Each sign, its name in a style sheet, and what it means.
LOOKS = {
    "█": ("seen", "declared and seen"),
    "○": ("blind", "declared, never seen"),
    "▒": ("open", "declared, not looked at"),
    "·": ("hidden", "hidden"),
    "✗": ("leak", "leak"),
}


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
    used = [f"{sign} {name}" for sign, (_, name) in LOOKS.items() if any(sign in line for line in lines)]
    return "\n".join([*("  " + line for line in lines), "  " + "   ".join(used) + scale])
