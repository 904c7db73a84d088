"""A longer example: faults that begin at a position, a length or an edge that the example does not reach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lowtri.auditing.conditions import Condition, probe_under
from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding, first_line
from lowtri.auditing.inputs import Array
from lowtri.auditing.options import Bools
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
_LIMITS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "block_size",
    "context_length",
)


def _longer(context: Context) -> Finding:
    """The example's first row with random inputs behind it, at chosen positions, in eval and in training mode.

    Its length is `length=`, else 256 or twice the example's, less where the model takes less.
    """
    requested, n, limit = context.options.length, context.n, _limit(context)
    wanted = max(_LENGTH, 2 * n) if requested is None else requested
    if requested is None and limit is not None:
        wanted = min(wanted, limit)
    if wanted <= n:
        why = "length=0 leaves it out" if requested == 0 else f"the example's {n} positions are as many"
        return Finding("skipped", why, (), {"length": n})
    device = getattr(context.adapter.signature.device, "type", "cpu")
    if requested is None and limit is None and device != "cpu":
        # An index beyond a table of positions is no error to catch there: it ends every later call, too.
        return Finding("skipped", f"how many positions the model takes on {device} is not known (say length=)")
    try:
        longer, why = _longest(context, wanted)
    except CallError as error:
        return Finding("skipped", str(error).removeprefix("audit: "))
    if longer is None:
        return Finding("skipped", f"the model takes no longer example: {why}")
    outcome = probe_under(_conditions(longer), first=True)
    positions = list(longer.chosen or ())
    measured = {"length": longer.n if outcome.tried else -1, "places": positions}
    clean = f"the mask holds at {longer.n} positions ({len(positions)} of them looked at, {', '.join(outcome.tried)})"
    outcome.leaks = [replace(leak, drawn=False) for leak in outcome.leaks]
    finding = outcome.finding(clean + (f"; {wanted} were not taken: {why}" if why else ""), measured)
    if finding.status == "undecided" and requested is None:
        # The caller did not request it: numbers near the noise there leave the verdict on the example as it is.
        message = f"at {longer.n} positions the numbers are too near the noise to decide: {finding.message}"
        return Finding("skipped", f"{message} (length={longer.n} makes it part of the verdict)")
    return replace(finding, length=longer.n if outcome.tried else None)


def _too_short(finding: Finding, length: int) -> str | None:
    tried = finding.measured.get("length", -1)
    if finding.status == "leak" or tried >= length:
        return None
    return finding.message if tried < 0 else f"the model takes no more than {tried} positions"


def _conditions(longer: Context) -> Iterator[Condition]:
    example = f"in an example of {longer.n} positions"
    yield Condition(longer.mode or "as it is", example, _PROBES, longer)
    if longer.mode == "eval mode" and not same_in_training(longer):
        yield Condition("training mode", f"in training mode, {example}", _PROBES, in_training(longer))


def _longest(context: Context, wanted: int) -> tuple[Context | None, str]:
    """The longest example up to `wanted` positions that the model takes, and why it takes no longer one."""
    reasons: list[str] = []

    def tried(length: int) -> Context | None:
        longer = _extended(context, length)
        try:
            longer.adapter(longer.inputs)
        except Exception as error:
            reasons.append(first_line(error))
            return None
        return longer

    low, high = context.n, wanted
    # Some models take multiples of a chunk alone; the example's length is one.
    for length in dict.fromkeys((wanted, wanted // low * low)):
        longer = tried(length) if length > low else None
        if longer is not None:
            return longer, next(iter(reasons), "")
    best = None
    while high - low > 1:
        middle = (low + high) // 2
        longer = tried(middle)
        best, low, high = (best, low, middle) if longer is None else (longer, middle, high)
    return best, next(iter(reasons), "")


def _extended(context: Context, length: int) -> Context:
    """The first row with inputs drawn at random behind it."""
    n, inputs = context.n, context.inputs.rows([0])
    allowed = context.options.allowed(length, context.inputs.batch)[:1]
    settings = {key: _continued(value, context, length, allowed[0]) for key, value in inputs.settings.items()}
    repeated = tuple(np.concatenate([a, np.repeat(a[:, -1:], length - n, axis=1)], axis=1) for a in inputs.sequences)
    inputs = replace(inputs, sequences=repeated, settings=settings)
    inputs = inputs.change(np.arange(length) >= n, context.fresh(600, inputs=inputs))
    return replace(context, inputs=inputs, allowed=allowed, chosen=_chosen(n, length))


def _continued(value: Array, context: Context, length: int, allowed: Bools) -> Array:
    """An array along the positions, continued to more of them: a table that says what the mask says, a constant, a count."""
    n, before = context.n, context.allowed[0]
    if value.shape[-2:] == (n, n):
        shown, hidden = value[..., before], value[..., ~before]
        if all(len(np.unique(part)) <= 1 for part in (shown, hidden)) and shown.size:
            table = np.where(allowed, shown.flat[0], hidden.flat[0] if hidden.size else shown.flat[0])
            return np.broadcast_to(table.astype(value.dtype), (*value.shape[:-2], length, length))
    elif value.shape.count(n) == 1:
        axis = value.shape.index(n)
        first = np.take(value, [0], axis)
        continued = np.repeat(first, length, axis)
        if value.dtype != bool:
            count = np.arange(length).reshape([-1 if i == axis else 1 for i in range(value.ndim)])
            continued = np.asarray(first + (np.take(value, [1], axis) - first) * count, value.dtype)
        if np.array_equal(np.take(continued, np.arange(n), axis), value):
            return continued
    raise CallError("audit: other inputs follow the positions, and how they go on is not known")


def _chosen(n: int, length: int) -> tuple[int, ...]:
    """Queries behind the example: the last ones, the ones before powers of two, and a spread."""
    edges = [2**power - 1 for power in range(length.bit_length())]
    spread = np.linspace(n - 1, length - 2, 4).astype(int).tolist()
    return tuple(sorted({position for position in [*edges, *spread, length - 1] if n - 1 <= position < length}))


def _limit(context: Context) -> int | None:
    """The limit on positions in the model's config."""
    config = getattr(context.adapter.module, "config", None)
    sizes = [size for size in (getattr(config, name, None) for name in _LIMITS) if isinstance(size, int) and size > 1]
    return min(sizes, default=None)


PROBE = Probe(
    name="longer",
    does="runs change, gradient and prefix at chosen positions of a longer example (`length=`), in eval and "
    "training mode",
    finds="leaks that begin past the end of the example",
    function=_longer,
    skipped_after=(CHANGE, GRADIENT, PREFIX, TRAINING),
    argument="length",
    not_run=_too_short,
)
