"""Verify: kernels that somebody else wrote, held to the definition, with their mistakes by name."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

import lowtri
from demo.context import Context, Result

__all__ = ["SENTENCE", "TITLE", "run"]

TITLE = "Is an attention kernel right?"
SENTENCE = "Each function is called with masks, sizes and garbage of many kinds; a wrong one gets its mistake named."


def _window_too_wide(q: Any, k: Any, v: Any, mask: Any) -> Any:
    wide = lowtri.mask("causal & window(6)") if repr(mask) == "causal & window(5)" else mask
    return lowtri.attention(q, k, v, wide)


def _inverted(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return lowtri.attention(q, k, v, ~mask)


def run(context: Context) -> Result:
    """Two right functions and two wrong ones."""
    known = {"NaN from hidden keys": "torch multiplies hidden values by a weight of 0"}
    cases = ["full", "causal", "one query, 130 keys", "grouped heads", "window of 5", "documents", "empty rows"]
    result, lines = Result(""), []
    tried: list[tuple[Any, str, dict[str, Any]]] = [
        (lowtri.attention, "", {}),
        (F.scaled_dot_product_attention, "", {"signature": "sdpa", "differences": known}),
        (_window_too_wide, "window one too wide", {}),
        (_inverted, "mask inverted", {}),
    ]
    for attend, mistake, options in tried:
        report = lowtri.verify(attend, dtypes=["float32"], cases=cases, **options)
        lines.append(report.message)
        right = report.ok if not mistake else report.mistakes == (mistake,)
        result.check(f"{report.name}: {mistake or 'right'}", right)
    result.files.append(report.save(context.out / "verify.html").name)
    result.text = "\n".join(lines)
    return result
