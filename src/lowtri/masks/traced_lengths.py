"""Masks of lengths in programs that are traced, which serve other lengths, too."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.compat import tracer
from lowtri.errors import MaskError
from lowtri.masks.arrays import FrozenArray
from lowtri.masks.mask import CONSTRUCTORS, Mask, array_text, field_text
from lowtri.masks.tile import Index


def lengths_text(lengths: tuple[int, ...], array: NDArray[np.int64], arrays: list[Any] | None) -> str:
    """Lengths as text; in a program of torch.compile the placeholder of their array, since it serves other lengths, too."""
    if arrays is not None and tracer() == "compile":
        return array_text(array, arrays)
    return f"{list(lengths)}"


@dataclass(frozen=True, repr=False)
class OfTracedLengths(Mask):
    """A mask of lengths in a program that is traced: its text, and the tensor, whose numbers come when the program runs.

    After a graph break it is the mask of these numbers.
    """

    lengths: FrozenArray
    function: str  # of the user
    argument: str
    open_end: bool = False

    def __post_init__(self) -> None:
        of_keys = self.function == "keys"
        object.__setattr__(self, "_batch", tuple(self.lengths.array.shape) if of_keys else ())
        object.__setattr__(self, "depends_on_query", not of_keys)

    @cached_property
    def for_plan(self) -> Mask:
        """The mask of the numbers."""
        from lowtri.compat.torch_private import outside_graph

        if tracer() == "export":
            raise MaskError(
                f"{self.function}: {self.argument} belongs to a program that is being traced, so only attention takes the mask.\n"
                "Fix: make the mask outside of the program."
            )
        make = outside_graph(
            CONSTRUCTORS[self.function], f"{self.function} with numbers of the program is asked for its pairs"
        )
        options = {"open_end": True} if self.open_end else {}
        made: Mask = make(**{self.argument: self.lengths.array}, **options)
        return made

    @property
    def packed_totals(self) -> tuple[int, ...]:
        return () if tracer() else self.for_plan.packed_totals

    def _sees(self, q: Index, k: Index) -> Any:
        return self.for_plan._sees(q, k)

    def _for_row(self, b: int, h: int) -> Mask:
        return self.for_plan._for_row(b, h)

    def __getattr__(self, name: str) -> Any:
        """What masks of documents have, and others have not: labels, and where they begin and end."""
        if name in ("_label", "_edges"):
            return getattr(self.for_plan, name)
        raise AttributeError(name)

    def _text(self, arrays: list[Any] | None = None) -> str | None:
        if arrays is None and not tracer():
            return self.for_plan._text()
        more = ", open_end=True" if self.open_end else ""
        return f"{self.function}({self.argument}={field_text(self.lengths, arrays)}{more})"
