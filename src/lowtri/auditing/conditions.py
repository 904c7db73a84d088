"""The same trials under other conditions: other code paths, and training mode.

The same trials in a longer example: faults that begin at a position, a length or an edge that the example does not reach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from lowtri.auditing.content import CHANGE, GRADIENT, PREFIX
from lowtri.auditing.context import Bools, Condition, Context, Need
from lowtri.auditing.finding import Finding
from lowtri.auditing.inputs import Array, Inputs, first_line
from lowtri.auditing.rows import BATCH_ROWS, PACKING, PADDING, pad, pad_keyword
from lowtri.auditing.trial import Trial, run_under
from lowtri.compat.transformers_private import attention_name
from lowtri.errors import CallError

__all__ = ["CODE_PATHS", "LONGER", "TRAINING", "extended", "same_in_training"]

_KEYWORDS = ("output_attentions", "output_hidden_states", "return_weights", "need_weights", "return_attention")
_TRAINING = "training mode"
_SAME = "its answers are eval mode's to the last bit: to 4 inputs, in float64 too, and to shorter and padded ones"


def _code_paths(context: Context) -> Finding:
    """The mask must hold on each; another output under an unbroken mask is a warning."""
    outcome = run_under(_other_paths(context), (CHANGE, GRADIENT), without=context)
    measured = {"opened": list(outcome.tried), "not_offered": outcome.refused}
    return outcome.finding(f"the mask holds ({', '.join(outcome.tried)})", measured, "no other code path is known")


def _other_paths(context: Context) -> Iterator[Context]:
    system = context.system
    for name in _KEYWORDS:
        if system.accepts(name) or (name.startswith("output_") and hasattr(system.model, "config")):
            for value in (True, False) if name == "need_weights" else (True,):
                yield context.under(Condition(keyword=(name, value), name=f"{name}={value}"))
    if hasattr(system.model, "set_attn_implementation"):
        current = attention_name(system.model)
        for name in ("eager", "sdpa"):
            if name != current:
                yield context.under(Condition(attention=name, name=f"attn_implementation={name}"))
    if context.options.compile:
        yield context.under(Condition(compiled=True, name="torch.compile"))


def _not_compiled(finding: Finding, value: object) -> str | None:
    reason = finding.measured.get("not_offered", {}).get("torch.compile")
    return None if finding.status == "leak" else reason


def _training(context: Context) -> Finding:
    """Every trial that does not decode, in training mode, as sensitive as in eval mode."""
    if same_in_training(context):
        return Finding("clean", _SAME, (), {"tried": {_TRAINING: ["answers"]}}, mode=_TRAINING)
    trials = (CHANGE, GRADIENT, PREFIX, BATCH_ROWS, PADDING, PACKING)
    outcome = run_under([_in_training(context)], trials)
    finding = outcome.finding(f"the mask holds ({', '.join(outcome.tried.get(_TRAINING, []))})", {})
    return replace(finding, mode=_TRAINING if outcome.tried else "")


def _no_training(context: Context) -> str | None:
    if context.options.train is False:
        return "train=False leaves it out"
    return {"": "the model has no training mode", _TRAINING: "the whole audit is in training mode"}.get(context.mode)


def _in_training(context: Context) -> Context:
    return context.under(replace(context.condition, training=True, name=_TRAINING))


def same_in_training(context: Context) -> bool:
    """Whether training mode gives bitwise the same outputs: for several inputs, in float64 as well, and for other shapes.

    Rounding cannot hide a leak of training mode alone from both precisions: what is left is below 1e-16 of the answer.
    """
    if context.system.module is not context.system.model:
        return False  # no float64 copy of what a function closes over
    inputs, n = context.inputs, context.n
    same = [inputs, context.fresh(700), context.fresh(701, "extreme"), context.echoed(n - 1)]
    other = [inputs.span(0, t) for t in context.chosen or context.sample(16) if 0 < t < n] + [inputs.span(n // 2, n)]
    other += [inputs.rows([0])] if context.system.signature.batch_axis is not None else []
    keyword = pad_keyword(context)
    try:
        other += [pad(context, keyword, left, right, 702) for left, right in ((0, 3), (2, 5))] if keyword else []
        copy64 = replace(context, system=context.system.in_float64())
        return _alike(context, [*same, *other]) and _alike(copy64, same)
    except Exception:
        return False


def _alike(context: Context, examples: list[Inputs]) -> bool:
    answers: list[list[Any]] = []
    for mode in (context, _in_training(context)):
        with mode.set():
            answers.append([_answer(mode, inputs) for inputs in examples])
    return all(
        a is b if isinstance(a, type) or isinstance(b, type) else np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        for a, b in zip(*answers, strict=True)
    )


def _answer(context: Context, inputs: Inputs) -> Any:
    """The rows, or the type of the error: a model may refuse a shape, in either mode."""
    try:
        return context.system(inputs)
    except Exception as error:
        return type(error)


CODE_PATHS = Trial(
    name="code_paths",
    does="runs change and gradient with weights or hidden states returned, other attention implementations, "
    "`compile=True`",
    finds="code paths that do not apply the mask",
    function=_code_paths,
    argument="compile",
    not_run=_not_compiled,
)
TRAINING = Trial(
    name="training",
    does="runs change, gradient, prefix, batch, padding and packing in training mode",
    finds="leaks that occur in training mode only",
    function=_training,
    needs=(Need("a training mode", _no_training),),
    skipped_after=("change", "gradient", "prefix"),
)


_LENGTH = 256
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
    device = getattr(context.system.signature.device, "type", "cpu")
    if requested is None and limit is None and device != "cpu":
        # An index beyond a table of positions is no error to catch there: it ends every later call, too.
        return Finding("skipped", f"how many positions the model takes on {device} is not known (say length=)")
    try:
        longer, why = _longest(context, wanted)
    except CallError as error:
        return Finding("skipped", str(error).removeprefix("audit: "))
    if longer is None:
        return Finding("skipped", f"the model takes no longer example: {why}")
    outcome = run_under(_modes(longer), (CHANGE, GRADIENT, PREFIX), first=True)
    positions = list(longer.chosen or ())
    measured = {"length": longer.n if outcome.tried else -1, "places": positions}
    clean = f"the mask holds at {longer.n} positions ({len(positions)} of them looked at, {', '.join(outcome.tried)})"
    finding = outcome.finding(clean + (f"; {wanted} were not taken: {why}" if why else ""), measured)
    if finding.status == "undecided" and requested is None:
        # The caller did not request it: numbers near the noise there leave the verdict on the example as it is.
        message = f"at {longer.n} positions the numbers are too near the noise to decide: {finding.message}"
        return Finding("skipped", f"{message} (length={longer.n} makes it part of the verdict)")
    leaks = tuple(replace(leak, drawn=False) for leak in finding.leaks)
    return replace(finding, leaks=leaks, length=longer.n if outcome.tried else None)


def _too_short(finding: Finding, length: int) -> str | None:
    tried = finding.measured.get("length", -1)
    if finding.status == "leak" or tried >= length:
        return None
    return finding.message if tried < 0 else f"the model takes no more than {tried} positions"


def _modes(longer: Context) -> Iterator[Context]:
    yield longer.under(Condition(length=longer.n, name=longer.mode or "as it is"))
    both = longer.mode == "eval mode" and longer.options.train is None
    if both and not same_in_training(longer):
        yield longer.under(Condition(length=longer.n, training=True, name="training mode"))


def _longest(context: Context, wanted: int) -> tuple[Context | None, str]:
    """The longest example up to `wanted` positions that the model takes, and why it takes no longer one."""
    reasons: list[str] = []

    def tried(length: int) -> Context | None:
        longer = extended(context, length)
        try:
            longer.system(longer.inputs)
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


def extended(context: Context, length: int) -> Context:
    """The real tokens of the first row with inputs drawn at random behind them."""
    inputs = context.inputs.rows([0])
    keyword = pad_keyword(context)
    marks = inputs.settings.get(keyword) if keyword else None
    if marks is not None and marks.ndim == 2 and not context.real[0].all() and context.real[0].any():
        tokens = np.flatnonzero(context.real[0])
        cut = {key: _taken(value, tokens, context.n) for key, value in inputs.settings.items()}
        inputs = replace(inputs, sequences=tuple(a[:, tokens] for a in inputs.sequences), settings=cut)
    n = inputs.n
    declared, _ = context.options.declared(length, context.inputs.batch)
    allowed = declared[:1]
    before = context.declared[0][:n, :n]
    settings = {key: _continued(value, before, length, allowed[0]) for key, value in inputs.settings.items()}
    repeated = tuple(np.concatenate([a, np.repeat(a[:, -1:], length - n, axis=1)], axis=1) for a in inputs.sequences)
    inputs = replace(inputs, sequences=repeated, settings=settings)
    inputs = inputs.change(np.arange(length) >= n, context.fresh(600, inputs=inputs))
    real = (
        np.ones((1, length), bool)
        if keyword in settings
        else np.pad(context.real[:1], ((0, 0), (0, length - n)), constant_values=True)
    )
    places = _chosen(min(n, context.n), length)
    return replace(context, inputs=inputs, allowed=allowed, declared=allowed, real=real, chosen=places)


def _taken(value: Array, positions: Any, n: int) -> Array:
    for axis, size in enumerate(value.shape):
        if size == n:
            value = np.take(value, positions, axis=axis)
    return value


def _continued(value: Array, before: Bools, length: int, allowed: Bools) -> Array:
    """An array along the positions, continued to more of them: a table that says what the mask says, a constant, a count."""
    n = len(before)
    if value.shape[-2:] == (n, n):
        shown, hidden = value[..., before], value[..., ~before]
        if all(len(np.unique(part)) <= 1 for part in (shown, hidden)) and shown.size:
            table = np.where(allowed, shown.flat[0], hidden.flat[0] if hidden.size else shown.flat[0])
            return np.broadcast_to(table.astype(value.dtype), (*value.shape[:-2], length, length))
    elif value.shape.count(n) == 1:
        axis = value.shape.index(n)
        first = np.take(value, [0], axis)
        continued = np.repeat(first, length, axis)
        if value.dtype != bool and n > 1:
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
    config = getattr(context.system.module, "config", None)
    sizes = [size for size in (getattr(config, name, None) for name in _LIMITS) if isinstance(size, int) and size > 1]
    return min(sizes, default=None)


LONGER = Trial(
    name="longer",
    does="runs change, gradient and prefix at chosen positions of a longer example (`length=`), in eval and "
    "training mode",
    finds="leaks that begin past the end of the example",
    function=_longer,
    skipped_after=("change", "gradient", "prefix", "training"),
    argument="length",
    not_run=_too_short,
)
