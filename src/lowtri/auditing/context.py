"""The state that every probe receives: the adapter, its inputs, the pairs that the mask allows, the noise, and random inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.adapter import ModelAdapter, Rows
from lowtri.auditing.finding import first_line
from lowtri.auditing.inputs import Array, Inputs
from lowtri.auditing.noise import Difference, Noise, magnitude, measure_noise, movement
from lowtri.auditing.options import Bools, Options

__all__ = ["Context"]

_LONG = 48  # positions looked at when the input is too long for all of them


@dataclass
class Context:
    """What an audit works on. Probes read it, and write to `seen` alone.

    `base`, `noise` and `float64` are measured when they are first read, and anew in every copy that `replace` makes.
    """

    adapter: ModelAdapter
    inputs: Inputs
    allowed: Bools  # (1 or B, N, N)
    options: Options
    vocabulary: npt.NDArray[np.int64]  # ids to draw from
    show_progress: Callable[[str, int, int], None]
    by_pair: bool = True  # whether each key is changed alone as well, and not only all that is hidden from a query
    chosen: tuple[int, ...] | None = None  # the queries to look at, where `exact` does not say
    probe: str = ""  # the one that runs
    seen: npt.NDArray[np.float64] = field(init=False)  # (Nq, Nk): how far outputs moved, NaN where not looked at

    def __post_init__(self) -> None:
        self.seen = np.full((self.n, self.n), np.nan)

    @property
    def n(self) -> int:
        return self.inputs.n

    @property
    def mode(self) -> str:
        """The mode that a torch module is in, as its flags say; empty for anything else."""
        module = self.adapter.module
        if module is None:
            return ""
        return "training mode" if all(part.training for part in module.modules()) else "eval mode"

    @functools.cached_property
    def base(self) -> Rows:
        """The rows of the example itself."""
        return self.adapter(self.inputs)

    @functools.cached_property
    def noise(self) -> Noise:
        """How far the example's outputs move when nothing that matters changes."""
        return measure_noise(self.adapter, self.inputs, self.ignored)

    @functools.cached_property
    def float64(self) -> Context | str:
        """The same on the float64 copy, or the reason why there is none."""
        if self.adapter.signature.dtypes[0] == np.dtype(np.float64):
            return "it is float64 already"
        try:
            adapter = self.adapter.in_float64()
            step, alone = (
                _of_copy(value, self.adapter.model, adapter.model) for value in (self.options.step, self.options.alone)
            )
            copy64 = replace(self, adapter=adapter, options=replace(self.options, step=step, alone=alone))
            broken = copy64.noise.broken
            apart = float(np.nanmax(movement(self.base, copy64.base)))
        except Exception as error:
            return first_line(error, typed=False)
        if copy64.base.dtype.kind != "f" or broken:
            return broken or "its output is not made of floats"
        if apart > 0.05 * max(self.noise.magnitude, 1e-30) and not self.noise.random:  # it may draw other numbers
            return f"the copy answers differently, by {apart:.2g}"
        return copy64

    @property
    def discrete_output(self) -> bool:
        return self.base.dtype.kind != "f"

    @property
    def ignored(self) -> Bools:
        """Positions (B, N) that no query sees: pads, whose own output means nothing."""
        return np.broadcast_to(~self.allowed.any(axis=1), (self.inputs.batch, self.n))

    def independent_of(self, where: Bools) -> Bools:
        """Positions (B, N) whose output may depend on nothing of `where`, (N,) or (B, N)."""
        sees = np.any(self.allowed & np.atleast_2d(where)[:, None, :], axis=-1)  # (1 or B, N)
        return ~np.broadcast_to(sees, (self.inputs.batch, self.n)) & ~self.ignored

    def difference(
        self,
        before: Rows,
        after: Rows,
        *,
        where: Bools | bool = True,
        same_order: bool = False,
        non_finite: float = np.inf,
    ) -> Difference:
        """Compare two answers, (B, N, F), at the positions `where`, (B, N); `non_finite` stands for what turned NaN."""
        sizes = np.where(where, np.nan_to_num(movement(before, after), nan=non_finite), 0.0)
        return Difference(sizes, magnitude(before, after), self.noise, same_order)

    def see(self, sizes: npt.NDArray[np.float64], key: int) -> None:
        """Record how far each output, (N,), moved with one key."""
        self.seen[:, key] = np.fmax(self.seen[:, key], np.nan_to_num(sizes, nan=0.0))

    def tick(self, done: int, of: int) -> None:
        """Show how far the probe that runs has come."""
        self.show_progress(self.probe, done, of)

    def fresh(self, salt: int, kind: str = "random", inputs: Inputs | None = None) -> Inputs:
        """Other values for every position of the example (or of `inputs`): `random` ones, or `extreme` ones."""
        inputs, rng = inputs or self.inputs, np.random.default_rng([self.options.seed, salt])
        return replace(
            inputs, sequences=tuple(_drawn(values, self.vocabulary, rng, kind) for values in inputs.sequences)
        )

    def echoed(self, query: int) -> Inputs:
        """Every position holding a token that the query has before it: row b takes the one b places back.

        Random draws from a large vocabulary never repeat a token, so a leak of equality would not show.
        """
        rows = np.arange(self.inputs.batch)
        column = (query - rows) % self.n
        copies = tuple(np.repeat(values[rows, column][:, None], self.n, axis=1) for values in self.inputs.sequences)
        return replace(self.inputs, sequences=copies)

    def queries(self) -> list[int]:
        """The positions that are looked at one by one."""
        if self.chosen is not None:
            return list(self.chosen)
        return list(range(self.n)) if self.n <= self.options.exact else self.sample(_LONG)

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


def _of_copy(value: Any, model: Any, copy64: Any) -> Any:
    """The model itself, or a method of it, as the copy's own; anything else as it is."""
    if value is not None and value is model:
        return copy64
    if getattr(value, "__self__", None) is model and hasattr(value, "__name__"):
        return getattr(copy64, value.__name__)
    return value


def _drawn(values: Array, vocabulary: npt.NDArray[np.int64], rng: np.random.Generator, kind: str) -> Array:
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
