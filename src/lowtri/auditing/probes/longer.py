"""A longer example: faults that begin at a position, a length or an edge that the example does not reach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lowtri.auditing.conditions import Condition, probe_under
from lowtri.auditing.context import Context, draw
from lowtri.auditing.finding import Finding, first_line
from lowtri.auditing.inputs import Array
from lowtri.auditing.probe import Probe
from lowtri.auditing.probes.change import PROBE as CHANGE
from lowtri.auditing.probes.gradient import PROBE as GRADIENT
from lowtri.auditing.probes.prefix import PROBE as PREFIX
from lowtri.auditing.probes.training import PROBE as TRAINING
from lowtri.auditing.probes.training import in_training, same_in_training
from lowtri.errors import CallError

__all__ = ["PROBE"]

_LENGTH = 256
_PROBES = (CHANGE, GRADIENT, PREFIX)
_MOST = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "block_size", "context_length")


def _longer(context: Context) -> Finding:
    """The example's first row with random inputs behind it, at chosen places, in eval and in training mode.

    Its length is `length=`, else 256 or twice the example's, less where the model takes less.
    """
    requested, n = context.options.get("length"), context.n
    most = _most(context)
    wanted = max(_LENGTH, 2 * n) if requested is None else requested
    if requested is None and most is not None:
        wanted = min(wanted, most)
    if wanted <= n:
        why = "length=0 leaves it out" if requested == 0 else f"the example's {n} positions are as many"
        return Finding("skipped", why, (), {"length": n})
    device = getattr(context.adapter.signature.device, "type", "cpu")
    if requested is None and most is None and device != "cpu":
        # An index beyond a table of positions is no error to catch there: it ends every later call, too.
        return Finding("skipped", f"how many positions the model takes on {device} is not known (say length=)")
    try:
        wide, why = _longest(context, wanted)
    except CallError as error:
        return Finding("skipped", str(error).removeprefix("audit: "))
    if wide is None:
        return Finding("skipped", f"the model takes no longer example: {why}")
    outcome = probe_under(_conditions(wide), first=True)
    places = list(wide.chosen or ())
    measured = {"length": wide.n if outcome.tried else -1, "places": places}
    clean = f"the mask holds at {wide.n} positions ({len(places)} of them looked at, {', '.join(outcome.tried)})"
    outcome.leaks = [replace(leak, drawn=False) for leak in outcome.leaks]
    found = outcome.finding(clean + (f"; {wanted} were not taken: {why}" if why else ""), measured, "")
    if found.status == "undecided" and requested is None:
        # Tried unasked: numbers near the noise there leave the verdict on the example as it is, and say so.
        note = f"at {wide.n} positions the numbers are too near the noise to decide: {found.message}"
        return Finding("skipped", f"{note} (length={wide.n} makes it part of the verdict)")
    return replace(found, length=wide.n if outcome.tried else None)


def _too_short(finding: Finding, length: int) -> str | None:
    tried = finding.measured.get("length", -1)
    if finding.status == "leak" or tried >= length:
        return None
    return finding.message if tried < 0 else f"the model takes no more than {tried} positions"


def _conditions(wide: Context) -> Iterator[Condition]:
    example = f"in an example of {wide.n} positions"
    yield Condition(wide.mode or "as it is", example, _PROBES, wide)
    if wide.mode == "eval mode" and not same_in_training(wide):
        yield Condition("training mode", f"in training mode, {example}", _PROBES, in_training(wide))


def _longest(context: Context, wanted: int) -> tuple[Context | None, str]:
    """The longest example up to `wanted` positions that the model takes, and why it takes no longer one."""
    reasons: list[str] = []

    def tried(length: int) -> Context | None:
        wide = _extended(context, length)
        try:
            wide.adapter(wide.inputs)
        except Exception as error:
            reasons.append(first_line(error))
            return None
        return wide

    low, high = context.n, wanted
    # Some models take multiples of a chunk alone; the example's length is one.
    for length in dict.fromkeys((wanted, wanted // low * low)):
        wide = tried(length) if length > low else None
        if wide is not None:
            return wide, next(iter(reasons), "")
    best = None
    while high - low > 1:
        middle = (low + high) // 2
        wide = tried(middle)
        best, low, high = (best, low, middle) if wide is None else (wide, middle, high)
    return best, next(iter(reasons), "")


def _extended(context: Context, length: int) -> Context:
    """The first row with inputs drawn at random behind it."""
    n, inputs = context.n, context.inputs.rows([0])
    allowed = context.options["declared"](length)[:1]
    settings = {key: _continued(value, context, length, allowed[0]) for key, value in inputs.settings.items()}
    repeated = tuple(np.concatenate([a, np.repeat(a[:, -1:], length - n, axis=1)], axis=1) for a in inputs.sequences)
    inputs = replace(inputs, sequences=repeated, settings=settings)
    fresh = draw(inputs, context.vocab, np.random.default_rng([context.seed, 600]), "random")
    inputs = inputs.change(np.arange(length) >= n, fresh)
    return replace(context, inputs=inputs, allowed=allowed, chosen=_places(n, length))


def _continued(value: Array, context: Context, length: int, allowed: npt.NDArray[np.bool_]) -> Array:
    """An array along the positions, continued to more of them: a table that says what the mask says, a constant, or a count."""
    n, before = context.n, context.allowed[0]
    if value.shape[-2:] == (n, n):
        shown, hidden = value[..., before], value[..., ~before]
        if all(len(np.unique(part)) <= 1 for part in (shown, hidden)) and shown.size:
            table = np.where(allowed, shown.flat[0], hidden.flat[0] if hidden.size else shown.flat[0])
            return np.broadcast_to(table.astype(value.dtype), (*value.shape[:-2], length, length))
    elif value.shape.count(n) == 1:
        axis = value.shape.index(n)
        first, second = np.take(value, [0], axis), np.take(value, [1], axis)
        step = np.zeros_like(first) if value.dtype == bool else second - first
        count = np.arange(length).reshape([-1 if i == axis else 1 for i in range(value.ndim)])
        continued = (
            np.asarray(first + step * count, value.dtype) if value.dtype != bool else np.repeat(first, length, axis)
        )
        if np.array_equal(np.take(continued, np.arange(n), axis), value):
            return continued
    raise CallError("audit: other inputs follow the positions, and how they go on is not known")


def _places(n: int, length: int) -> tuple[int, ...]:
    """Queries behind the example: the last ones, the ones before powers of two, and a spread."""
    edges = [2**power - 1 for power in range(length.bit_length())]
    spread = np.linspace(n - 1, length - 2, 4).astype(int).tolist()
    return tuple(sorted({place for place in [*edges, *spread, length - 1] if n - 1 <= place < length}))


def _most(context: Context) -> int | None:
    """The limit on positions in the model's config."""
    config = getattr(context.adapter.module, "config", None)
    sizes = [size for size in (getattr(config, name, None) for name in _MOST) if isinstance(size, int) and size > 1]
    return min(sizes, default=None)


PROBE = Probe(
    name="longer",
    does="change, gradient and prefix at chosen places of 256 positions (`length=`), in eval and training mode",
    finds="what begins behind the example's end",
    function=_longer,
    skipped_after=(CHANGE, GRADIENT, PREFIX, TRAINING),
    argument="length",
    not_run=_too_short,
)
