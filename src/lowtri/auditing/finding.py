"""What two runs that should agree show: the noise, their difference, and the findings and leaks made of it.

Noise is how far outputs move when nothing relevant changes: the same input twice, and the same input with its sums in another
order (the batch reversed, or one row alone). Rounding errors grow with the magnitude of the numbers, so thresholds are multiples of
one rounding error at that magnitude.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lowtri.auditing.inputs import Inputs
from lowtri.auditing.system import Rows, System

Status = Literal["clean", "leak", "doubt", "undecided", "warning", "skipped"]


@dataclass(frozen=True)
class Leak:
    """Position `query` depends on position `key` although the mask hides it, or its output is wrong in another way."""

    query: int
    key: int
    size: float
    row: int = 0
    module: str | None = None
    note: str = ""  # the whole sentence, where it is not "position q sees position k"
    under: str = ""  # the conditions, where they are not the example's own: "in training mode"
    probe: str = ""  # set by `examine`, as is `paired`
    paired: bool = False  # query and key are positions of the trial's input
    drawn: bool = True  # and of the example, so that the drawing can show them

    @property
    def direct(self) -> bool:
        """Whether it is a pair of positions, found without any special conditions."""
        return self.paired and not self.under

    @property
    def what(self) -> str:
        """The pair and the size, without a full stop."""
        text = self.note
        if not text:
            how = f"moves output {self.query} by {self.size:.2g}"
            if math.isinf(self.size):
                how = f"turns output {self.query} from finite to infinite or NaN, or back"
            text = f"position {self.query} sees position {self.key}: changing input {self.key} {how}"
        return f"{self.under}, {text}" if self.under else text

    def sentence(self, noise: float) -> str:
        """One sentence that names the pair, the size and the module."""
        text = self.what + (f" (noise {noise:.1g})." if noise else " (noise 0).")
        return text + (f" First seen in {self.module}." if self.module else "")


@dataclass(frozen=True)
class Finding:
    """One trial's result under one condition, or that of a group of conditions.

    A trial returns `doubt` where the movement is near the noise; the audit then repeats it on the float64 copy, so that no
    report contains a `doubt`.
    """

    status: Status
    message: str
    leaks: tuple[Leak, ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)
    probe: str = ""  # set by `examine`
    condition: str = ""  # in words; empty for the example as it is
    mode: str = ""  # the mode and the length that it adds to those of the whole audit
    length: int | None = None
    watch: Any = field(default=None, repr=False)  # two runs that part where the first leak enters

    @property
    def greatest(self) -> float:
        """The greatest movement that the probe measured."""
        return float(self.measured.get("greatest", 0.0))


def describe_movement(size: float, when: str = "") -> str:
    """What an output does, in words: an infinite size stands for a number that turned infinite or NaN, or back.

    >>> describe_movement(0.25, " when the input ends"), describe_movement(math.inf)
    ('moves by 0.25 when the input ends', 'turns from finite to infinite or NaN, or back')
    """
    if math.isinf(size):
        return "turns from finite to infinite or NaN, or back" + ("," if when else "") + when
    return f"moves by {size:.2g}{when}"


def describe_difference(size: float, up_to: str = "up to ") -> str:
    """How far two answers are apart, in words that follow a comma.

    >>> describe_difference(0.25), describe_difference(math.inf)
    ('by up to 0.25', 'one side finite and the other infinite or NaN')
    """
    return "one side finite and the other infinite or NaN" if math.isinf(size) else f"by {up_to}{size:.2g}"


# In roundings of the output's precision at the output's magnitude. Between the two a finding is in doubt.
_SURE = 2.0**10
_ROUNDING = 2.0**4


@dataclass(frozen=True)
class Noise:
    """What was measured before the trials ran."""

    eps: float  # one rounding, relative
    repeat: float  # the greatest movement between two runs on the same input
    reorder: float  # the same with the sums in another order
    magnitude: float
    random: bool  # another seed gives another answer
    broken: str | None  # why no verdict is possible, if so

    def classify(self, size: float, scale: float, *, same_order: bool = True) -> Literal["clean", "doubt", "leak"]:
        """What a movement means when nothing but rounding should have moved anything.

        With `same_order` both runs added the same sums in the same order, so that even one rounding needs an explanation.
        """
        greatest, rounding = max(self.repeat, self.reorder), self.eps * max(scale, 1e-30)
        if size == 0.0:
            return "clean"
        if size > max(_SURE * rounding, 32.0 * greatest):
            return "leak"
        return "clean" if not same_order and size <= max(_ROUNDING * rounding, 2.0 * greatest) else "doubt"


@dataclass(frozen=True)
class Difference:
    """How far two answers are apart that should be equal."""

    sizes: npt.NDArray[np.float64]  # (B, N); infinite where a number turned infinite or NaN, or back
    scale: float  # the magnitude of the answers
    noise: Noise
    same_order: bool
    moved: npt.NDArray[np.float64]  # (B, N); the same at all positions

    @property
    def greatest(self) -> float:
        return float(self.sizes.max())

    @property
    def status(self) -> Literal["clean", "doubt", "leak"]:
        return self.noise.classify(self.greatest, self.scale, same_order=self.same_order)

    def first(self, *, of_all_rows: bool = False) -> tuple[int, int, float]:
        """Row, position and size: the first position that differs by more than rounding, in the row that differs most."""
        rows = range(len(self.sizes)) if of_all_rows else [int(self.sizes.max(axis=1).argmax())]
        kind = np.vectorize(lambda size: self.noise.classify(float(size), self.scale, same_order=self.same_order))
        wrong = kind(self.sizes[rows]) == self.status
        position, row = min((int(wrong[i].argmax()), row) for i, row in enumerate(rows) if wrong[i].any())
        return row, position, float(self.sizes[row, position])


def measure_noise(system: System, inputs: Inputs, ignored: npt.NDArray[np.bool_]) -> Noise:
    """Run the same input several times, in several orders and under two seeds.

    `ignored`, (B, N), marks positions whose own output means nothing.
    """
    first = system(inputs)
    floats = first.dtype.kind == "f"
    eps, scale = _eps(system, first), _magnitude(np.where(ignored[..., None], 0, first))
    nan = np.isnan(first).any(axis=-1) & ~ignored
    if nan.any():
        row, position = np.argwhere(nan)[0]
        reason = (
            f"the output is NaN at {int(nan.sum())} of {nan.size} positions already for the example itself "
            f"(first: row {row}, position {position})"
        )
        return Noise(eps, 0.0, 0.0, scale, False, reason)

    def apart(rows: Rows) -> float:
        return float(np.nan_to_num(np.where(ignored, 0, movement(first, rows)), nan=np.inf).max())

    repeat = max(apart(system(inputs)) for _ in range(3))
    reseeded = apart(system(inputs, seed=system.seed + 1))
    broken = None
    if repeat > (_SURE * eps * scale if floats else 0):
        broken = f"the same input gives different outputs from run to run ({describe_difference(repeat)}, seeds fixed)"
    reorder = _reorder(system, inputs, first, ignored, eps * scale) if floats else 0.0
    return Noise(eps, repeat, reorder, scale, reseeded > repeat, broken)


def movement(before: Rows, after: Rows) -> npt.NDArray[np.float64]:
    """How far each position moved, (B, N): the greatest difference over its features, NaN where only one side is finite."""
    if before.dtype.kind != "f" and after.dtype.kind != "f":
        return np.asarray((before != after).any(axis=-1), dtype=np.float64)
    if np.array_equal(before, after):
        return np.zeros(before.shape[:2])
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(before.astype(np.float64) - after.astype(np.float64))
    distance[(before == after) | (np.isnan(before) & np.isnan(after))] = 0.0
    distance[~np.isfinite(distance)] = np.nan
    return np.asarray(distance.max(axis=-1)) if distance.shape[-1] else np.zeros(before.shape[:2])


def compare(
    before: Rows, after: Rows, noise: Noise, where: Any = True, *, same_order: bool = False, non_finite: float = np.inf
) -> Difference:
    """Two runs, (B, N, F), at the positions `where`, (B, N); `non_finite` stands for what turned infinite or NaN, or back."""
    distance = movement(before, after)
    sizes, moved = (np.nan_to_num(distance, nan=value) for value in (non_finite, np.inf))
    return Difference(np.where(where, sizes, 0.0), _magnitude(before, after), noise, same_order, moved)


def _magnitude(*answers: Rows) -> float:
    """The greatest finite value."""
    return max(float(np.abs(rows[np.isfinite(rows)]).max(initial=0.0)) for rows in answers)


def _eps(system: System, rows: Rows) -> float:
    """One relative rounding in the precision of the model's answer."""
    if rows.dtype.kind != "f":
        return 0.0
    if system.signature.float64:
        return float(np.finfo(np.float64).eps)
    module = system.module
    kinds: list[Any] = [] if module is None else [p.dtype for p in module.parameters() if p.is_floating_point()]
    floats = (kind for kind in system.signature.dtypes if "float" in str(kind))  # of NumPy or of torch
    kinds = kinds or list(floats)[:1]
    if kinds:
        return max(
            float((np if isinstance(kind, np.dtype) else sys.modules["torch"]).finfo(kind).eps) for kind in kinds
        )
    # Token ids into a plain callable: its answer is exact in float32 if it was computed there.
    narrow = bool((rows.astype(np.float32) == rows)[np.isfinite(rows)].all())
    return float(np.finfo(np.float32 if narrow else np.float64).eps)


def _reorder(system: System, inputs: Inputs, first: Rows, ignored: npt.NDArray[np.bool_], rounding: float) -> float:
    if system.signature.batch_axis is None:
        return 0.0
    greatest = 0.0
    with np.errstate(all="ignore"):
        try:
            reversed_rows = system(inputs.rows(range(inputs.batch - 1, -1, -1)))[::-1]
            alone = system(inputs.rows([0]))
        except Exception:
            return 0.0  # a model with a fixed batch size; the batch probe reports it
    for other, count in ((reversed_rows, len(first)), (alone, 1)):
        if other.shape == first[:count].shape:
            moved = np.where(ignored[:count], 0.0, np.nan_to_num(movement(first[:count], other)))
            # Movements beyond any rounding are the batch probe's to judge; they are not noise.
            greatest = max(greatest, float(moved[moved <= 64 * rounding].max(initial=0.0)))
    return greatest
