"""The result of explain: the steps with their labels, as text, as JSON, and as one HTML page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtri.explaining.equation import as_svg
from lowtri.explaining.html import as_html, as_output
from lowtri.explaining.show import as_text
from lowtri.explaining.step import Step, Steps
from lowtri.pictures.files import save_picture
from lowtri.pictures.pages import json_value

__all__ = ["Explanation", "Step"]


@dataclass(frozen=True)
class Explanation(Steps):
    """All steps, in order. ``print`` shows them as tables; ``explanation["weights"].value`` is the array of one step.

    Attributes:
        tokens: the tokens of the sentence.
        mask: the mask, as text.
        visible: (Nq, Nk), or (H, Nq, Nk) with several heads; True = may see.
        steps: every step, a :class:`Step` each.
        note: how the tokens and the weights were chosen.
    """

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
        """Everything as plain lists and numbers. Numbers that JSON lacks become text: "-inf", "inf", "nan"."""
        names = ("name", "formula", "sentence", "shape", "rows", "columns", "value", "unmasked")
        steps = [{name: getattr(step, name) for name in names} for step in self.steps]
        about = {name: getattr(self, name) for name in ("tokens", "mask", "note", "visible")}
        values: dict[str, Any] = json_value({**about, "steps": steps})
        return values

    def to_json(self) -> str:
        """:meth:`as_dict` as text."""
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def to_html(self) -> str:
        """One self-contained HTML page: no network, no script."""
        return as_html(self)

    def to_svg(self) -> str:
        """The first head's matrices as one picture, laid out as the equation reads."""
        return as_svg(self)

    def save(self, path: str | Path) -> Path:
        """Write the page as .html, the numbers as .json, the tables as .txt, or the picture as .svg, .png or .pdf; atomically.

        Raises:
            DataError: if the name ends in none of these, or the file cannot be written, or matplotlib is missing.
        """
        forms = {".svg": self.to_svg, ".html": self.to_html, ".json": self.to_json, ".txt": lambda: f"{self}\n"}
        return save_picture(path, forms)

    def _repr_html_(self) -> str:
        return as_output(self)

    _repr_svg_ = to_svg
