"""What trials work on: a system under one condition, its inputs, the pairs that the mask allows, the noise, and random inputs."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowtri.auditing.finding import Difference, Noise, compare, measure_noise, movement
from lowtri.auditing.inputs import Array, Inputs, first_line
from lowtri.auditing.system import Rows, System, in_mode, module_behind, parameters
from lowtri.compat.transformers_private import attention_name
from lowtri.errors import CallError, MaskError
from lowtri.extras import require

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Options:
    """What trials read of `audit`'s arguments, where they are described."""

    mask: Any = "full"
    layers: int | None = None
    step: Callable[[Any, Any], Any] | None = None
    prefill: Callable[[Any], Any] | None = None
    alone: Callable[..., Any] | None = None
    pad_mask: str | None = None
    train: bool | None = False
    compile: bool = False
    length: int | None = 0
    draws: int = 1
    exact: int = 0
    seed: int = 0

    def declared(self, n: int, batch: int) -> tuple[Bools, Bools]:
        """The pairs (1 or B, N, N) that the mask allows from end to end, and the keys (1 or B, N) that it shows to no query.

        A mask that differs from head to head allows what any head allows. With `layers`, the mask is one layer's, and every
        layer passes its own position on: the pairs are those that a path of at most `layers` steps joins.
        """
        if isinstance(self.mask, np.ndarray):
            table = wide = self.mask.astype(bool)
        else:
            from lowtri.masks import as_mask

            formula = as_mask(self.mask)
            table = wide = np.array(formula.dense(n), dtype=bool)
            with contextlib.suppress(MaskError):  # a strict mask shows the last key to later queries
                wide = np.array(formula.dense(2 * n), dtype=bool)[..., :n]
        table, wide = _with_batch(table), _with_batch(wide)
        if table.shape[0] not in (1, batch) or table.shape[1:] != (n, n):
            raise CallError(
                f"audit: mask gives a table of {tuple(table.shape)}, the example has {batch} row(s) of {n} positions.\n"
                "Fix: use a mask without a batch, or one whose batch is the example's."
            )
        return self._reached(table), np.logical_not(wide.any(axis=1))

    def _reached(self, table: Bools) -> Bools:
        if self.layers is None:
            return table
        step = reach = table | np.eye(table.shape[-1], dtype=bool)
        for _ in range(min(self.layers, table.shape[-1]) - 1):
            wider = (reach.astype(np.float32) @ step.astype(np.float32)) > 0
            if (wider == reach).all():
                break
            reach = wider
        return reach


def _with_batch(table: Bools) -> Bools:
    """(1 or B, N, N), of a table that may have heads or no batch."""
    return np.asarray(table.any(axis=1)) if table.ndim == 4 else table[None] if table.ndim == 2 else table


def check_arguments(model: Any, arguments: Mapping[str, Any]) -> None:
    """Raise CallError, with its name, for an argument of `audit` or `infer_mask` that cannot be used."""
    if isinstance(model, type):
        raise CallError(f"audit: model is the class {model.__name__}.\nFix: make one of it, {model.__name__}(...).")
    if not callable(model):
        kind = f"the text {model!r}" if isinstance(model, str) else f"a {type(model).__name__}"
        raise CallError(
            f"audit: model is {kind}, expected a module or a function.\nFix: load or build the model first."
        )
    module = module_behind(model)
    tensors = [] if module is None else [*module.named_parameters(), *module.named_buffers()]
    empty = next((name for name, value in tensors if value.is_meta), None)
    if empty is not None:
        raise CallError(
            f"audit: {empty} of the model is on the device meta, which stores no values.\n"
            "Fix: load its weights, or make it with .to_empty(device='cpu') and initialise it."
        )
    for names, fits, expected in _EXPECTED:
        for name in names.split():
            value = arguments.get(name)
            if name in arguments and not fits(value) and (value is not None or not expected.endswith("None")):
                raise CallError(f"audit: {name}={value!r}, expected {expected}.")
    for name in ("redraw", "compile"):
        if arguments.get(name):
            require(f"audit: {name}=", "torch")
    if arguments.get("prefill") is not None and arguments.get("step") is None:
        raise CallError("audit: prefill= was given without step=.\nFix: say how decoding continues, step(state, x).")
    takes, mark = parameters(model), arguments.get("pad_mask")
    if mark is not None and takes and mark not in takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        raise CallError(
            f"audit: pad_mask={mark!r}, but the model takes ({', '.join(takes)}).\n"
            "Fix: name the one that marks real positions."
        )


def check_memory(n: int) -> None:
    """Raise CallError where the table of all pairs of n positions does not fit into memory."""
    try:
        np.empty((n, n), bool)
    except (MemoryError, ValueError):
        raise CallError(
            f"audit: {n:,} positions have {float(n) ** 2:,.0f} pairs, more than this machine's memory can represent.\n"
            "Fix: a shorter example, or a smaller length= (--length)."
        ) from None


def _whole(least: float) -> Callable[[Any], bool]:
    return lambda value: hasattr(value, "__index__") and not isinstance(value, bool) and operator.index(value) >= least


# Arguments, what their values must be, and how an error says so; those that end with None may be None.
_EXPECTED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("output step prefill alone", callable, "something to call, or None"),
    ("exact seed", _whole(0), "a whole number of at least 0"),
    ("draws", _whole(1), "a whole number of at least 1"),
    ("vocab_size", _whole(2), "a whole number of at least 2, or None"),
    ("layers", _whole(1), "a whole number of at least 1, or None"),
    ("length", _whole(0), "a whole number, 0 for no longer example, or None"),
    ("position_axis output_axis", _whole(-math.inf), "the number of an axis, or None"),
    ("batch_axis", lambda value: value == "auto" or _whole(-math.inf)(value), 'the number of an axis, "auto" or None'),
    ("train", lambda value: isinstance(value, bool), "True, False (eval mode alone) or None"),
    ("compile", lambda value: isinstance(value, bool), "True or False"),
    ("pad_mask", lambda value: isinstance(value, str) and value != "", "the name of a keyword of the model's, or None"),
    ("probes", lambda value: isinstance(value, (str, list, tuple, set)), "a list of names, or None"),
    (
        "redraw",
        lambda value: isinstance(value, (bool, int, float)) and 0 <= value < math.inf,
        "True, False or a standard deviation above 0",
    ),
)


def vocabulary(system: System, inputs: Inputs, requested: int | None) -> npt.NDArray[np.int64]:
    """The ids to draw from: those of the table in which the example's are looked up, else those that the config names."""
    present = np.unique(inputs.sequences[0]).astype(np.int64) if inputs.discrete else np.zeros(2, np.int64)
    size = requested
    if size is None and inputs.discrete:
        size = vocabulary_size(system.module)
        if system.in_torch:
            from lowtri.auditing.torch_hooks import looked_up

            with contextlib.suppress(Exception):  # the example's own run reports it
                size = min(filter(None, (size, looked_up(system, inputs))), default=None)
    if size is not None:
        return np.arange(size)
    if len(present) < 2:
        raise CallError(
            "audit: the example repeats one id, and how many ids there are is not known.\nFix: say vocab_size=."
        )
    return present


def vocabulary_size(model: Any) -> int | None:
    """How many ids a model's config names, or else its first embedding; None where neither is there."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(size, int) or not hasattr(model, "modules"):
        return size if isinstance(size, int) else None
    return next((part.num_embeddings for part in model.modules() if hasattr(part, "num_embeddings")), None)


def progress_line(requested: bool | None, started: float) -> Callable[[str, int], None]:
    """A line on stderr once an audit takes more than two seconds; an empty name clears it."""
    show = sys.stderr.isatty() if requested is None else requested
    shown = started + 1.8

    def tick(probe: str, run: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if show and (now > shown + 0.2 if probe else shown > started + 1.8):
            shown = now
            sys.stderr.write(f"\raudit: {probe}, run {run}, {now - started:.0f} s\x1b[K" if probe else "\r\x1b[K")
            sys.stderr.flush()

    return tick


_LONG = 48  # positions looked at when the input is too long for all of them


@dataclass(frozen=True)
class Condition:
    """What trials run under. The example as it is has none of these."""

    training: bool = False  # else the mode that is set
    keyword: tuple[str, Any] | None = None  # added to the call
    attention: str = ""  # the implementation that is set
    compiled: bool = False
    length: int | None = None  # of a longer example

    @property
    def added(self) -> str:
        """What is added to the call."""
        if self.keyword is not None:
            return "{}={}".format(*self.keyword)
        attention = f"attn_implementation={self.attention}" if self.attention else ""
        return attention or ("torch.compile" if self.compiled else "")

    @property
    def words(self) -> str:
        """As the start of a sentence."""
        parts = [
            "in training mode" if self.training else "",
            f"with {self.added}" if self.added else "",
            f"in an example of {self.length} positions" if self.length else "",
        ]
        return ", ".join(part for part in parts if part)


@dataclass
class Context:
    """A system under one condition. Trials read it, and write to `seen` alone.

    `base`, `noise` and `float64` are measured when they are first read, and anew in every copy that `replace` makes.
    """

    system: System
    inputs: Inputs
    allowed: Bools  # (1 or B, N, N): the declared mask, without the pads
    declared: Bools  # (1 or B, N, N): the mask alone
    real: Bools  # (B, N): False at pads, whose own output means nothing
    options: Options
    vocabulary: npt.NDArray[np.int64]  # ids to draw from
    show_progress: Callable[[str, int], None]
    condition: Condition = field(default_factory=Condition)
    chosen: tuple[int, ...] | None = None  # the queries to look at, where `exact` does not say
    pristine: Any = None  # a copy of the model that has never been called
    trial: str = ""  # the one that runs
    seen: npt.NDArray[np.float64] = field(init=False)  # (Nq, Nk): how far outputs moved, NaN where not looked at

    def __post_init__(self) -> None:
        self.seen = np.full((self.n, self.n), np.nan)

    @property
    def n(self) -> int:
        return self.inputs.n

    @property
    def by_pair(self) -> bool:
        """Whether each key is changed alone as well, and not only all that is hidden from a query."""
        return self.condition == Condition()

    @property
    def mode(self) -> str:
        """The mode that a torch module is in, as its flags say; empty for anything else."""
        module = self.system.module
        if module is None:
            return ""
        return "training mode" if all(part.training for part in module.modules()) else "eval mode"

    def under(self, condition: Condition) -> Context:
        """This context under a condition (of which `applied` sets the mode and the attention)."""
        system, inputs = self.system, self.inputs
        if condition.training:
            system = replace(system, training=True)
        if condition.compiled:
            import torch

            system = replace(system, model=torch.compile(system.model))
        if condition.keyword is not None:
            inputs = replace(inputs, options={**inputs.options, condition.keyword[0]: condition.keyword[1]})
        return replace(self, system=system, inputs=inputs, condition=condition)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The condition's mode and attention, and what was set before afterwards."""
        module, attention = self.system.module, self.condition.attention
        before = attention_name(module)
        with in_mode(module, True if self.system.training else None):
            try:
                if attention:
                    module.set_attn_implementation(attention)
                    if attention_name(module) != attention:
                        raise LookupError("the model kept its attention implementation")
                yield
            finally:
                if attention:
                    module.set_attn_implementation(before)

    @functools.cached_property
    def base(self) -> Rows:
        """The rows of the example itself."""
        return self.system(self.inputs)

    @functools.cached_property
    def noise(self) -> Noise:
        """How far the example's outputs move when nothing that matters changes."""
        return measure_noise(self.system, self.inputs, self.ignored)

    @functools.cached_property
    def float64(self) -> Context | str:
        """This context on the float64 copy, or the reason why there is none."""
        if self.system.signature.dtypes[0] == np.dtype(np.float64):
            return "it is float64 already"
        try:
            system = self.system.in_float64()
            step, prefill, alone = (
                _of_copy(value, self.system.model, system.model)
                for value in (self.options.step, self.options.prefill, self.options.alone)
            )
            options = replace(self.options, step=step, prefill=prefill, alone=alone)
            copy64 = replace(self, system=system, options=options)
            broken = copy64.noise.broken
            apart = float(np.nanmax(np.where(self.ignored, 0.0, movement(self.base, copy64.base))))
        except Exception as error:
            return first_line(error, typed=False)
        if copy64.base.dtype.kind != "f" or broken:
            return broken or "its output is not made of floats"
        if apart > 0.05 * max(self.noise.magnitude, 1e-30) and not self.noise.random:  # it may draw other numbers
            return f"the outputs of the copy differ, by {apart:.2g}"
        return copy64

    @property
    def discrete_output(self) -> bool:
        return self.base.dtype.kind != "f"

    @property
    def ignored(self) -> Bools:
        """Positions (B, N) of pads, whose own output means nothing."""
        return np.broadcast_to(~self.real, (self.inputs.batch, self.n))

    def independent_of(self, where: Bools) -> Bools:
        """Positions (B, N) whose output may depend on nothing of `where`, (N,) or (B, N)."""
        sees = np.any(self.allowed & np.atleast_2d(where)[:, None, :], axis=-1)  # (1 or B, N)
        return ~np.broadcast_to(sees, (self.inputs.batch, self.n)) & ~self.ignored

    def compare(self, after: Rows, where: Bools | bool = True, **more: Any) -> Difference:
        """Another run against the example's own rows."""
        return compare(self.base, after, self.noise, where, **more)

    def record_movement(self, sizes: npt.NDArray[np.float64], key: int) -> None:
        """Record how far each output, (N,), moved with one key."""
        self.seen[:, key] = np.fmax(self.seen[:, key], np.nan_to_num(sizes, nan=0.0))

    def fresh(self, salt: int, kind: str = "random", inputs: Inputs | None = None) -> Inputs:
        """Other values for every position of the example (or of `inputs`): `random` ones, or `extreme` ones."""
        inputs, rng = inputs or self.inputs, np.random.default_rng([self.options.seed, salt])
        return replace(
            inputs, sequences=tuple(_drawn(values, self.vocabulary, rng, kind) for values in inputs.sequences)
        )

    def repeated_token(self, query: int) -> Inputs:
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


class Requirement(NamedTuple):
    """What a trial requires; where it is missing, the trial is skipped."""

    what: str  # as the documentation lists it
    why_not: Callable[[Context], str | None]  # the reason why it is missing; None where it is not


BATCH = Requirement("a batch", lambda c: "the example has no batch" if c.system.signature.batch_axis is None else None)
TORCH = Requirement("gradients", lambda c: None if c.system.in_torch else "the model does not compute in torch")
REPEATABLE = Requirement(
    "no random numbers",
    lambda c: "the model draws random numbers, and another length draws others" if c.noise.random else None,
)
