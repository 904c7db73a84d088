"""What explain returns: the steps with their labels, as text, as JSON, and as one HTML page."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.explaining.show import as_text

__all__ = ["Explanation", "Step"]


@dataclass(frozen=True)
class Step:
    """One step: its value, (rows, columns) or (heads, rows, columns), with a label for each row and column."""

    name: str
    formula: str
    sentence: str
    value: NDArray[Any]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    unmasked: NDArray[Any] | None = None  # the same step had there been no mask

    @property
    def hatched(self) -> bool:
        """Whether the cells are pairs of tokens that the mask may hide."""
        return self.name in ("mask", "masked", "weights")


@dataclass(frozen=True)
class Explanation:
    """All steps, in order. ``print`` shows tables; ``explanation["weights"].value`` is the array of one step."""

    tokens: tuple[str, ...]
    mask: str
    visible: NDArray[np.bool_]  # (Nq, Nk), or (H, Nq, Nk) with several heads; True = may see
    steps: tuple[Step, ...]
    note: str = ""

    def __getitem__(self, name: str) -> Step:
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(f"no step {name!r}; there are {', '.join(step.name for step in self.steps)}")

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"Explanation({len(self.tokens)} tokens, {self.mask}, {len(self.steps)} steps)"

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain lists and numbers. What JSON has no number for is text: "-inf", "inf", "nan"."""
        return {
            "tokens": list(self.tokens),
            "mask": self.mask,
            "note": self.note,
            "visible": self.visible.tolist(),
            "steps": [
                {
                    "name": step.name,
                    "formula": step.formula,
                    "sentence": step.sentence,
                    "shape": list(step.value.shape),
                    "rows": list(step.rows),
                    "columns": list(step.columns),
                    "value": _plain(step.value.tolist()),
                    "unmasked": None if step.unmasked is None else _plain(step.unmasked.tolist()),
                }
                for step in self.steps
            ],
        }

    def to_json(self) -> str:
        """:meth:`as_dict` as text."""
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def to_html(self) -> str:
        """One page that needs nothing else: no network, no script."""
        from lowtri.explaining.html import as_html

        return as_html(self)

    _repr_html_ = to_html


def _plain(value: Any) -> Any:
    """Nested lists without the numbers that JSON does not have."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
