"""What probes work on: a model under one condition, its inputs, the pairs that the mask allows, runs, the noise, and random inputs.

Noise is how far outputs move when nothing relevant changes: the same input twice, and the same input with its sums in another order
(the batch reversed, or one row alone). Rounding errors grow with the magnitude of the numbers, so thresholds are multiples of one
rounding error at that magnitude.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lowtri.auditing.declared import DeclaredMask
from lowtri.auditing.example import Array, Bools, Inputs, Rows, first_line
from lowtri.auditing.model_under_test import ModelUnderTest
from lowtri.auditing.restoring import in_mode
from lowtri.compat.transformers_private import attention_name

Sizes = npt.NDArray[np.float64]
Kind = Literal["clean", "doubt", "leak"]

# In roundings of the output's precision at the output's magnitude. Between the two a finding is in doubt.
_SURE = 2.0**10
_ROUNDING = 2.0**4
EXACT = 128  # up to so many positions, every pair is looked at
_LONG = 48  # positions looked at when the input is too long for all of them
_LARGE = 2**32  # parameters times tokens of a call, from which on some queries stand for all
FEW = 12  # queries looked at there, and on other code paths
DRAWS = 2  # random values that replace each input in turn, for each row of the batch


@dataclass(frozen=True)
class Noise:
    """What was measured before the probes ran."""

    eps: float  # one rounding, relative
    repeat: float  # the greatest movement between two runs on the same input
    reorder: float  # the same with the sums in another order
    magnitude: float
    random: bool  # another seed gives another answer
    broken: str | None  # why no verdict is possible, if so

    @property
    def greatest(self) -> float:
        return max(self.repeat, self.reorder)

    @property
    def dependence(self) -> float:
        """How far an output moves that depends on an input: beyond rounding, and beyond the noise."""
        return max(64 * self.eps * self.magnitude, 4 * self.greatest)

    def classify(self, size: float, scale: float, *, same_order: bool = True) -> Kind:
        """What a movement means when nothing but rounding should have moved anything.

        With `same_order` both runs added the same sums in the same order, so that even one rounding needs an explanation.
        """
        rounding = self.eps * max(scale, 1e-30)
        if size == 0.0:
            return "clean"
        if size > max(_SURE * rounding, 32.0 * self.greatest):
            return "leak"
        return "clean" if not same_order and size <= max(_ROUNDING * rounding, 2.0 * self.greatest) else "doubt"


@dataclass(frozen=True)
class Movement:
    """How far positions moved between two runs that should agree."""

    sizes: Sizes  # (B, N), 0 where not compared; infinite where a number turned infinite or NaN, or back
    scale: float  # the magnitude of the answers
    noise: Noise
    same_order: bool
    moved: Sizes  # (B, N); the same at all positions

    @property
    def greatest(self) -> float:
        return float(self.sizes.max())

    @property
    def status(self) -> Kind:
        return self.kind(self.greatest)

    def kind(self, size: float) -> Kind:
        return self.noise.classify(float(size), self.scale, same_order=self.same_order)

    def first(self, *, of_all_rows: bool = False) -> tuple[int, int, float]:
        """Row, position and size: the first position that differs by more than rounding, in the row that differs most."""
        rows = range(len(self.sizes)) if of_all_rows else [int(self.sizes.max(axis=1).argmax())]
        wrong = np.vectorize(self.kind)(self.sizes[rows]) == self.status
        position, row = min((int(wrong[i].argmax()), row) for i, row in enumerate(rows) if wrong[i].any())
        return row, position, float(self.sizes[row, position])


def movement(before: Rows, after: Rows) -> Sizes:
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
    before: Rows, after: Rows, noise: Noise, where: Any = True, *, same_order: bool = False, overflows: bool = False
) -> Movement:
    """Two runs, (B, N, F), at the positions `where`, (B, N).

    Args:
        overflows: whether numbers may turn infinite or NaN, or back; they are then in `moved` only.
    """
    moved = np.nan_to_num(movement(before, after), nan=np.inf)
    sizes = np.where(where & ~(overflows & np.isinf(moved)), moved, 0.0)
    return Movement(sizes, _magnitude(before, after), noise, same_order, moved)


def measure_noise(tested: ModelUnderTest, inputs: Inputs, first: Rows, real: Bools, repeats: int) -> Noise:
    """Run the same input several times, in several orders and under two seeds.

    Args:
        first: the rows of a first run on this input.
        real: (B, N), False at positions whose own output means nothing.
        repeats: how many further runs must repeat the first.
    """
    floats = first.dtype.kind == "f"
    eps, scale = _eps(tested, first), _magnitude(np.where(real[..., None], first, 0))
    nan = np.isnan(first).any(axis=-1) & real
    if nan.any():
        row, position = np.argwhere(nan)[0]
        reason = (
            f"the output is NaN at {int(nan.sum())} of {nan.size} positions already for the example itself "
            f"(first: row {row}, position {position})"
        )
        return Noise(eps, 0.0, 0.0, scale, False, reason)

    def apart(rows: Rows) -> float:
        return float(np.nan_to_num(np.where(real, movement(first, rows), 0), nan=np.inf).max())

    repeat = max(apart(tested(inputs)) for _ in range(repeats))
    reseeded = apart(tested(inputs, seed=tested.seed + 1))
    broken = None
    if repeat > (_SURE * eps * scale if floats else 0):
        broken = f"the same input gives different outputs from run to run ({describe_difference(repeat)}, seeds fixed)"
    reorder = _reorder(tested, inputs, first, real, eps * scale) if floats else 0.0
    return Noise(eps, repeat, reorder, scale, reseeded > repeat, broken)


def describe_difference(size: float, up_to: str = "up to ") -> str:
    """How far two answers are apart, in words that follow a comma.

    >>> describe_difference(0.25), describe_difference(math.inf)
    ('by up to 0.25', 'one side finite and the other infinite or NaN')
    """
    return "one side finite and the other infinite or NaN" if math.isinf(size) else f"by {up_to}{size:.2g}"


def _magnitude(*answers: Rows) -> float:
    """The greatest finite value."""
    return max(float(np.abs(rows[np.isfinite(rows)]).max(initial=0.0)) for rows in answers)


def _eps(tested: ModelUnderTest, rows: Rows) -> float:
    """One relative rounding in the precision of the model's answer."""
    if rows.dtype.kind != "f":
        return 0.0
    kinds: list[Any] = [p.dtype for p in tested.module.parameters()] if tested.module is not None else []
    kinds = [kind for kind in kinds if kind.is_floating_point]
    kinds = kinds or [kind for kind in tested.signature.dtypes if "float" in str(kind)][:1]  # of NumPy or of torch
    if tested.signature.float64:
        kinds = [np.dtype(np.float64)]
    if not kinds:
        # Token ids into a plain callable: its answer is exact in float32 if it was computed there.
        narrow = bool((rows.astype(np.float32) == rows)[np.isfinite(rows)].all())
        kinds = [np.dtype(np.float32 if narrow else np.float64)]
    return max(float((np if isinstance(kind, np.dtype) else sys.modules["torch"]).finfo(kind).eps) for kind in kinds)


def _reorder(tested: ModelUnderTest, inputs: Inputs, first: Rows, real: Bools, rounding: float) -> float:
    """How far outputs move with the batch reversed, and in a batch of one."""
    if tested.signature.batch_axis is None or inputs.batch == 1:
        return 0.0
    try:
        with np.errstate(all="ignore"):
            others = tested(inputs.rows(range(inputs.batch - 1, -1, -1)))[::-1], tested(inputs.rows([0]))
    except Exception:
        return 0.0  # a model with a fixed batch size; the batch probe reports it
    greatest = 0.0
    for other, count in zip(others, (len(first), 1), strict=True):
        if other.shape == first[:count].shape:
            moved = np.where(real[:count], np.nan_to_num(movement(first[:count], other)), 0.0)
            # Movements beyond any rounding are the batch probe's to judge; they are not noise.
            greatest = max(greatest, float(moved[moved <= 64 * rounding].max(initial=0.0)))
    return greatest


def vocabulary_size(model: Any) -> int | None:
    """How many ids a model's config names, or else its first embedding; None where neither is there."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(size, int) or not hasattr(model, "modules"):
        return size if isinstance(size, int) else None
    return next((part.num_embeddings for part in model.modules() if hasattr(part, "num_embeddings")), None)


@dataclass(frozen=True)
class Condition:
    """What probes run under. The example as it is has none of these."""

    name: str = ""  # of the kind of condition, as `audit(conditions=)` has it
    training: bool = False  # else the mode that is set
    keyword: tuple[str, Any] | None = None  # added to the call
    attention: str = ""  # the implementation that is set
    compiled: bool = False
    length: int | None = None  # of a longer example

    @property
    def words(self) -> str:
        """As the start of a sentence."""
        parts = [
            "in training mode" if self.training else "",
            "with {}={}".format(*self.keyword) if self.keyword else "",
            f"with attn_implementation={self.attention}" if self.attention else "",
            "with torch.compile" if self.compiled else "",
            f"in an example of {self.length} positions" if self.length else "",
        ]
        return ", ".join(part for part in parts if part)


EXAMPLE = Condition()  # none of them


@dataclass(eq=False)
class Run:
    """A run of a model on some inputs, computed when its output is first read.

    Attributes:
        own: how the rows are computed, if not by one call of the model.
        calls: how many positions each call of the module computes, where there are several; None where that is not known.
        start: the row and the position of the inputs at which the output begins.
    """

    tested: ModelUnderTest
    inputs: Inputs
    own: Callable[[], Rows] | None = None
    calls: Sequence[int] | None = ()
    start: tuple[int, int] = (0, 0)

    def compute(self) -> Rows:
        """The rows (B, N, F), anew."""
        return self.tested(self.inputs) if self.own is None else self.own()

    @functools.cached_property
    def output(self) -> Rows:
        return self.compute()

    def part(self, rows: slice = slice(None), positions: slice = slice(None)) -> Run:
        """Some rows and positions of the output."""
        part = replace(self, start=(rows.start or 0, positions.start or 0))
        part.output = self.output[rows, positions]
        return part


@dataclass
class Context:
    """A model under one condition. Probes read it, and write to `seen` alone.

    What is measured (`example`, `noise`, `float64`) is so when it is first read, and anew in every copy that `replace` makes.
    """

    tested: ModelUnderTest
    inputs: Inputs
    declared: Bools  # (1 or B, N, N): the mask
    real: Bools  # (B, N): False at pads, whose own output means nothing
    mask: DeclaredMask
    vocabulary: npt.NDArray[np.int64]  # ids to draw from
    conditions: tuple[str, ...] = ("eval",)  # of `audit`'s arguments, as is the next one
    length: int | None = 0
    show_progress: Callable[[str], None] = lambda what: None
    condition: Condition = EXAMPLE
    chosen: tuple[int, ...] | None = None  # the queries to look at; by default all, or a sample
    fresh_copy: Any = None  # a copy of the model that has never been called
    separator: int | None = None  # a token that ends documents: it is not changed, and not drawn
    probe: str = ""  # the one that runs
    seen: Sizes = field(init=False)  # (Nq, Nk): how far outputs moved, NaN where not looked at
    # (B, N, N): whether an output moved, once all pairs were tried.
    depends: Bools | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.seen = np.full((self.n, self.n), np.nan)

    @property
    def n(self) -> int:
        return self.inputs.n

    @functools.cached_property
    def allowed(self) -> Bools:
        """(1 or B, N, N): the declared mask, without the pads."""
        return self.declared & self.real[:, None, :]

    @property
    def mode(self) -> str:
        """The mode that a torch module is in, as its flags say; empty for anything else."""
        module = self.tested.module
        if module is None:
            return ""
        return "training mode" if all(part.training for part in module.modules()) else "eval mode"

    def under(self, condition: Condition) -> Context:
        """This context under a condition (of which `applied` sets the mode and the attention)."""
        tested, inputs = replace(self.tested, training=self.tested.training or condition.training), self.inputs
        if condition.compiled:
            import torch

            tested = replace(tested, model=torch.compile(tested.model))
        if condition.keyword is not None:
            inputs = inputs.having(dict([condition.keyword]))
        return replace(self, tested=tested, inputs=inputs, condition=condition)

    def copied(self) -> ModelUnderTest:
        """A copy of the model that was never called, under this condition."""
        if self.fresh_copy is None or self.condition.attention or self.condition.compiled:
            raise LookupError("there is no copy under this condition")
        model = copy.deepcopy(self.fresh_copy)
        if self.condition.training:
            model.train()
        return replace(self.tested, model=model)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The condition's mode and attention, and what was set before afterwards."""
        module, attention = self.tested.module, self.condition.attention
        before = attention_name(module)
        with in_mode(module, True if self.tested.training else None):
            try:
                if attention:
                    module.set_attn_implementation(attention)
                    if attention_name(module) != attention:
                        raise LookupError("the model kept its attention implementation")
                yield
            finally:
                if attention:
                    module.set_attn_implementation(before)

    def run(self, inputs: Inputs) -> Run:
        """A run on other inputs."""
        return Run(self.tested, inputs)

    @functools.cached_property
    def example(self) -> Run:
        """The run on the example itself."""
        return Run(self.tested, self.inputs)

    @property
    def base(self) -> Rows:
        """The rows of the example itself."""
        return self.example.output

    @property
    def discrete_output(self) -> bool:
        return self.base.dtype.kind != "f"

    @functools.cached_property
    def noise(self) -> Noise:
        """How far the example's outputs move when nothing that matters changes."""
        repeats = 1 if self.is_large else 3
        return measure_noise(self.tested, self.inputs, self.base, self.real, repeats)

    @functools.cached_property
    def float64(self) -> Context | str:
        """This context on the float64 copy, or the reason why there is none."""
        if self.tested.signature.dtypes[0] == np.dtype(np.float64):
            return "it is float64 already"
        try:
            copy64 = replace(self, tested=self.tested.in_float64(), fresh_copy=None)
            broken = copy64.noise.broken
            apart = float(np.nanmax(np.where(self.real, movement(self.base, copy64.base), 0.0)))
        except Exception as error:
            return first_line(error, typed=False)
        if copy64.base.dtype.kind != "f" or broken:
            return broken or "its output is not made of floats"
        if apart > 0.05 * max(self.noise.magnitude, 1e-30) and not self.noise.random:  # it may draw other numbers
            return f"the outputs of the copy differ, by {apart:.2g}"
        return copy64

    def independent_of(self, where: Bools) -> Bools:
        """Positions (B, N) whose output may depend on nothing of `where`, (N,) or (B, N)."""
        sees = np.any(self.allowed & np.atleast_2d(where)[:, None, :], axis=-1)  # (1 or B, N)
        return ~np.broadcast_to(sees, (self.inputs.batch, self.n)) & self.real

    def compare(self, after: Rows, where: Bools | bool = True, **more: Any) -> Movement:
        """Another run against the example's own rows."""
        return compare(self.base, after, self.noise, where, **more)

    def fresh(self, salt: int, kind: str = "random", inputs: Inputs | None = None) -> Inputs:
        """Other values for every position of the example (or of `inputs`): `random` ones, or `extreme` ones."""
        inputs, rng = inputs or self.inputs, np.random.default_rng([self.tested.seed, salt])
        ids = self.vocabulary if self.separator is None else self.vocabulary[self.vocabulary != self.separator]
        values = tuple(self._kept(values, random_values(values, ids, rng, kind)) for values in inputs.sequences)
        return replace(inputs, sequences=values)

    def _kept(self, before: Array, after: Array) -> Array:
        """The new values, but for the tokens that end documents."""
        return after if self.separator is None else np.where(before == self.separator, before, after)

    def repeated_token(self, query: int) -> Inputs:
        """Every position holding a token that the query has before it: row b takes the one b places back.

        Random draws from a large vocabulary never repeat a token, so a leak of equality would not show.
        """
        rows = np.arange(self.inputs.batch)
        column = (query - rows) % self.n
        copies = (np.repeat(values[rows, column][:, None], self.n, axis=1) for values in self.inputs.sequences)
        kept = tuple(
            np.where(new == self.separator, values, self._kept(values, new))
            for values, new in zip(self.inputs.sequences, copies, strict=True)
        )
        return replace(self.inputs, sequences=kept)

    def queries(self) -> list[int]:
        """The positions that are looked at one by one."""
        if self.chosen is not None:
            return list(self.chosen)
        if self.n > EXACT:
            return self.sample(_LONG)
        return list(range(self.n))

    @functools.cached_property
    def is_large(self) -> bool:
        """Whether a call is so expensive that some queries have to stand for all."""
        return self.tested.work(self.inputs) >= _LARGE

    def with_fewer_queries(self) -> Context:
        """This context for a condition that is tried besides others, where calls are expensive."""
        return replace(self, chosen=tuple(self.sample(FEW // 2)))

    def sample(self, most: int) -> list[int]:
        """At most `most` positions worth looking at: both ends, powers of two, edges of the mask, and a spread."""
        n = self.n
        if n <= most:
            return list(range(n))
        wanted = [0, 1, 2, n - 1, n - 2]
        for query in (n - 1, n // 2):
            edges = np.flatnonzero(np.diff(self.allowed[0, query].astype(np.int8)))
            wanted += [int(edge) + d for edge in edges for d in (0, 1)]
        wanted += [2**p + d for p in range(2, n.bit_length()) for d in (-1, 0, 1)]
        wanted += np.linspace(0, n - 1, most).astype(int).tolist()
        unique = list(dict.fromkeys(position for position in wanted if 0 <= position < n))
        return sorted(unique[:most])

    def shorter(self) -> list[int]:
        """Lengths to cut the input off at."""
        return [t for t in self.chosen or self.sample(16) if t > 0]


def random_values(values: Array, vocabulary: npt.NDArray[np.int64], rng: np.random.Generator, kind: str) -> Array:
    """Another value for every token or vector."""
    other: Array
    if np.issubdtype(values.dtype, np.inexact):
        # Extreme values stay within what half precision can represent after a projection.
        spread, size = float(np.nanstd(values)) or 1.0, 1.0 if kind == "random" else 100.0
        other = rng.standard_normal(values.shape) * spread * size + float(np.nanmean(values))
        if kind == "extreme":
            zero = rng.random(values.shape[:2]) < 0.2
            other = np.where(zero.reshape(zero.shape + (1,) * (values.ndim - 2)), 0.0, other)
    else:
        if kind == "extreme":  # the first and the last id, where special tokens live
            vocabulary = vocabulary[[0, -1]]
        index = rng.integers(0, len(vocabulary), values.shape)
        other = vocabulary[index]
        other = np.where(other == values, vocabulary[(index + 1) % len(vocabulary)], other)
    return np.asarray(other.astype(values.dtype))
