"""How far outputs move when nothing that matters changes; thresholds follow from it.

Two measurements: the same input twice, and the same input with its sums in another order (the batch turned round, or run
row by row). Rounding grows with the size of the numbers, so thresholds are multiples of one rounding at that size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from lowtri.auditing.adapter import ModelAdapter
from lowtri.auditing.finding import by
from lowtri.auditing.inputs import Inputs

__all__ = ["Noise", "magnitude", "measure_noise", "movement"]

# In roundings of the output's precision at the output's magnitude. Between the two a finding is in doubt.
_SURE = 2.0**10
_ROUNDING = 2.0**4


@dataclass(frozen=True)
class Noise:
    """What was measured before anything else."""

    eps: float  # one rounding, relative
    repeat: float  # the greatest movement between two runs on the same input
    reorder: float  # the same with the sums in another order
    magnitude: float
    random: bool  # another seed gives another answer
    broken: str | None  # why nothing can be decided, if so

    @property
    def greatest(self) -> float:
        return max(self.repeat, self.reorder)

    def classify(self, size: float, scale: float, *, doubtful: bool = True) -> Literal["clean", "doubt", "leak"]:
        """What a movement means when nothing but rounding should have moved anything.

        With `doubtful` the same sums ran in the same order, so that even one rounding needs an explanation.
        """
        if size == 0.0:
            return "clean"
        rounding = self.eps * max(scale, 1e-30)
        if size > max(_SURE * rounding, 32.0 * self.greatest):
            return "leak"
        return "clean" if not doubtful and size <= max(_ROUNDING * rounding, 2.0 * self.greatest) else "doubt"

    def first(self, sizes: npt.NDArray[np.float64], scale: float, *, doubtful: bool = True) -> int:
        """The first position of (N,) whose movement is more than nothing."""
        kinds = [self.classify(float(size), scale, doubtful=doubtful) for size in sizes]
        return next(
            (i for wanted in ("leak", "doubt") for i, kind in enumerate(kinds) if kind == wanted), int(sizes.argmax())
        )


def measure_noise(adapter: ModelAdapter, inputs: Inputs, ignored: npt.NDArray[np.bool_]) -> Noise:
    """Run the same input several times, in several orders and under two seeds.

    `ignored`, (1 or B, N), marks positions whose own output means nothing.
    """
    first = adapter(inputs)
    eps = _eps(adapter, first)
    silent = np.broadcast_to(ignored, first.shape[:2]) if ignored.shape[0] in (1, first.shape[0]) else ignored[:1]
    scale = magnitude(np.where(silent[..., None], 0, first))
    nan = np.isnan(first).any(axis=-1) & ~silent if first.dtype.kind == "f" else np.zeros(first.shape[:2], bool)
    if nan.any():
        row, position = np.argwhere(nan)[0]
        reason = (
            f"the output is NaN at {int(nan.sum())} of {nan.size} positions already for the example itself "
            f"(first: row {row}, position {position})"
        )
        return Noise(eps, 0.0, 0.0, scale, False, reason)

    def apart(rows: npt.NDArray[np.generic]) -> float:
        return float(np.nan_to_num(np.where(silent, 0, movement(first, rows)), nan=np.inf).max())

    repeat = max(apart(adapter(inputs)) for _ in range(3))
    reseeded = apart(adapter(inputs, seed=adapter.seed + 1))
    broken = None
    if repeat > (_SURE * eps * scale if first.dtype.kind == "f" else 0):
        broken = f"the same input gives different outputs from run to run ({by(repeat)}, seeds fixed)"
    return Noise(eps, repeat, _reorder(adapter, inputs, first, silent, eps * scale), scale, reseeded > repeat, broken)


def movement(before: npt.NDArray[np.generic], after: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """How far each position moved, (B, N): the greatest difference over its features, NaN where only one side is finite."""
    if before.dtype.kind != "f" and after.dtype.kind != "f":
        return np.asarray((before != after).any(axis=-1), dtype=np.float64)
    if np.array_equal(before, after):
        return np.zeros(before.shape[:2])
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(before.astype(np.float64) - after.astype(np.float64))
    both = (before == after) | (np.isnan(before) & np.isnan(after))
    distance[both] = 0.0
    distance[~np.isfinite(distance)] = np.nan
    return np.asarray(distance.max(axis=-1)) if distance.shape[-1] else np.zeros(before.shape[:2])


def magnitude(*rows: npt.NDArray[np.generic]) -> float:
    """The greatest finite value."""
    greatest = 0.0
    for values in rows:
        finite = np.abs(values[np.isfinite(values)]) if values.dtype.kind == "f" else np.abs(values)
        greatest = max(greatest, float(finite.max()) if finite.size else 0.0)
    return greatest


def _eps(adapter: ModelAdapter, rows: npt.NDArray[np.generic]) -> float:
    """One relative rounding in the precision of the model's answer."""
    if rows.dtype.kind != "f":
        return 0.0
    if adapter.signature.float64:
        return float(np.finfo(np.float64).eps)
    module = adapter.module
    if module is not None:
        import torch

        kinds = {p.dtype for p in module.parameters() if p.is_floating_point()}
        if kinds:
            return max(float(torch.finfo(kind).eps) for kind in kinds)
    for dtype in adapter.signature.dtypes:
        if hasattr(dtype, "is_floating_point") and dtype.is_floating_point:
            import torch

            return float(torch.finfo(dtype).eps)
        if isinstance(dtype, np.dtype) and dtype.kind == "f":
            return float(np.finfo(dtype).eps)
    # Token ids into a plain callable: its answer is exact in float32 if it was computed there.
    narrow = bool((rows.astype(np.float32) == rows)[np.isfinite(rows)].all())
    return float(np.finfo(np.float32 if narrow else np.float64).eps)


def _reorder(
    adapter: ModelAdapter,
    inputs: Inputs,
    first: npt.NDArray[np.generic],
    silent: npt.NDArray[np.bool_],
    rounding: float,
) -> float:
    if adapter.signature.batch_axis is None or first.dtype.kind != "f":
        return 0.0
    found = 0.0
    with np.errstate(all="ignore"):
        try:
            turned = adapter(inputs.rows(range(inputs.batch - 1, -1, -1)))[::-1]
            alone = adapter(inputs.rows([0]))
        except Exception:
            return 0.0  # a model with a fixed batch size; the batch probe reports it
    for other, whole, quiet in ((turned, first, silent), (alone, first[:1], silent[:1])):
        if other.shape == whole.shape:
            moved = np.where(quiet, 0.0, np.nan_to_num(movement(whole, other)))
            # Movements beyond any rounding are the batch probe's to judge; they say nothing about noise.
            found = max(found, float(moved[moved <= 64 * rounding].max(initial=0.0)))
    return found
