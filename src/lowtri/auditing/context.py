"""What every probe is given: the adapter, its inputs, what they may depend on, the noise, and fresh draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.adapter import ModelAdapter, Rows
from lowtri.auditing.declared import has_token
from lowtri.auditing.inputs import Inputs
from lowtri.auditing.noise import Noise, movement

__all__ = ["Context", "draw"]

Bools = npt.NDArray[np.bool_]

_LONG = 48  # positions looked at when the input is too long for all of them


@dataclass
class Context:
    """One audit's working state. Probes read it; the only thing they write is `seen`, through `see`."""

    adapter: ModelAdapter
    inputs: Inputs
    allowed: Bools  # (1 or B, N, N)
    noise: Noise
    vocab: npt.NDArray[np.int64]  # ids to draw from
    draws: int = 2
    exact: int = 128  # up to this length every pair is looked at
    seed: int = 0
    show_progress: Callable[[str, int, int], None] = lambda probe, done, of: None
    options: dict[str, Any] = field(default_factory=dict)
    seen: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))  # (Nq, Nk), NaN where not looked at
    by_pair: bool = True  # whether each key is changed alone as well, and not only all that is hidden from a query
    chosen: tuple[int, ...] | None = None  # the queries to look at, where `exact` does not say
    probe: str = ""  # the one that runs
    _base: Rows | None = None

    def __post_init__(self) -> None:
        if not self.seen.size:
            self.seen = np.full((self.n, self.n), np.nan)

    @property
    def n(self) -> int:
        return self.inputs.n

    @property
    def mode(self) -> str:
        """The mode that a torch module is in, as its flags stand; empty for anything else."""
        module = self.adapter.module
        if module is None:
            return ""
        return "training mode" if all(part.training for part in module.modules()) else "eval mode"

    @property
    def base(self) -> Rows:
        """The rows of the example itself."""
        if self._base is None:
            self._base = self.adapter(self.inputs)
        return self._base

    @property
    def discrete_output(self) -> bool:
        return self.base.dtype.kind != "f"

    @property
    def ignored(self) -> Bools:
        """Positions (B, N) that no query sees: pads, whose own output means nothing."""
        return np.broadcast_to(~has_token(self.allowed), (self.inputs.batch, self.n))

    def independent_of(self, where: Bools) -> Bools:
        """Positions (B, N) whose output may depend on nothing of `where`, (N,) or (B, N)."""
        rows = np.atleast_2d(where)
        tables = range(max(len(rows), len(self.allowed)))
        sees = [self.allowed[b % len(self.allowed)][:, rows[b % len(rows)]].any(axis=-1) for b in tables]
        return np.broadcast_to(~np.array(sees), (self.inputs.batch, self.n)) & ~self.ignored

    def moved(self, inputs: Inputs) -> tuple[npt.NDArray[np.float64], float]:
        """How far each output moves from the example's, (B, N), and the magnitude of the outputs."""
        from lowtri.auditing.noise import magnitude

        rows = self.adapter(inputs)
        return movement(self.base, rows), magnitude(self.base, rows)

    def see(self, sizes: npt.NDArray[np.float64], key: int) -> None:
        """Remember how far each output, (N,), moved with one key."""
        self.seen[:, key] = np.fmax(self.seen[:, key], np.nan_to_num(sizes, nan=0.0))

    def tick(self, done: int, of: int) -> None:
        """Show how far the probe that runs has come."""
        self.show_progress(self.probe, done, of)

    def fresh(self, salt: int, kind: str = "random") -> Inputs:
        """Other values for every position: `random` ones, or `extreme` ones."""
        return draw(self.inputs, self.vocab, np.random.default_rng([self.seed, salt]), kind)

    def echoed(self, query: int) -> Inputs:
        """Every position holding a token that the query has before it: row b takes the one b places back.

        Random draws from a large vocabulary never repeat a token, so a leak of equality would not show.
        """
        column = (query - np.arange(self.inputs.batch)) % self.n
        rows = np.arange(self.inputs.batch)
        copies = tuple(np.repeat(values[rows, column][:, None], self.n, axis=1) for values in self.inputs.sequences)
        return replace(self.inputs, sequences=copies)

    def queries(self) -> list[int]:
        """The positions that are looked at one by one."""
        if self.chosen is not None:
            return list(self.chosen)
        return list(range(self.n)) if self.n <= self.exact else self.sample(_LONG)

    def sample(self, most: int) -> list[int]:
        """At most `most` positions worth looking at: both ends, powers of two, edges of the mask, and a spread."""
        n = self.n
        if n <= most:
            return list(range(n))
        wanted = [0, 1, 2, n - 1, n - 2]
        first = self.allowed[0]
        for row in (n - 1, n // 2):
            wanted += [int(edge) + d for edge in np.flatnonzero(np.diff(first[row].astype(np.int8))) for d in (0, 1)]
        wanted += [2**p + d for p in range(2, n.bit_length()) for d in (-1, 0, 1)]
        wanted += np.linspace(0, n - 1, most).astype(int).tolist()
        unique = list(dict.fromkeys(place for place in wanted if 0 <= place < n))
        return sorted(unique[:most])

    def in_float64(self) -> Context:
        """The same on the float64 copy."""
        from lowtri.auditing.noise import measure_noise

        adapter = self.adapter.in_float64()
        noise = measure_noise(adapter, self.inputs, ~has_token(self.allowed))
        options = {name: _of_copy(value, self.adapter.model, adapter.model) for name, value in self.options.items()}
        return replace(self, adapter=adapter, noise=noise, options=options, seen=self.seen.copy(), _base=None)


def _of_copy(value: Any, model: Any, copy64: Any) -> Any:
    """The model itself, or a method of it, as the copy's own; anything else as it is."""
    if value is not None and value is model:
        return copy64
    if getattr(value, "__self__", None) is model and hasattr(value, "__name__"):
        return getattr(copy64, value.__name__)
    return value


def draw(inputs: Inputs, vocab: npt.NDArray[np.int64], rng: np.random.Generator, kind: str) -> Inputs:
    """Draw another value for every token or vector."""
    changed = []
    for values in inputs.sequences:
        if inputs.discrete:
            changed.append(_other_ids(values, vocab, rng, kind))
            continue
        spread = float(np.nanstd(values)) or 1.0
        # Extreme values stay within what half precision can hold after a projection.
        size = 1.0 if kind == "random" else 100.0
        noise = rng.standard_normal(values.shape) * spread * size + float(np.nanmean(values))
        if kind == "extreme":
            noise = np.where(
                rng.random(values.shape[:2]).reshape(values.shape[:2] + (1,) * (values.ndim - 2)) < 0.2, 0.0, noise
            )
        changed.append(noise.astype(values.dtype))
    return replace(inputs, sequences=tuple(changed))


def _other_ids(
    ids: npt.NDArray[Any], vocab: npt.NDArray[np.int64], rng: np.random.Generator, kind: str
) -> npt.NDArray[Any]:
    if kind == "extreme":  # the first and the last id, where special tokens live
        ends = np.array([vocab[0], vocab[-1]])
        other = ends[rng.integers(0, 2, ids.shape)]
        other = np.where(other == ids, np.where(ids == ends[0], ends[1], ends[0]), other)
        return np.asarray(other.astype(ids.dtype))
    place = rng.integers(0, len(vocab), ids.shape)
    other = vocab[place]
    other = np.where(other == ids, vocab[(place + 1) % len(vocab)], other)
    return np.asarray(other.astype(ids.dtype))
