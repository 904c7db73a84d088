"""Conditions: what probes run under besides the example as it is. Other code paths, training mode, a longer example, the compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lowtri.auditing.context import FEW, Condition, Context, describe_difference
from lowtri.auditing.example import Array, Bools, Inputs, first_line
from lowtri.auditing.neighbours import batch, packing
from lowtri.auditing.pads import pad, pad_keyword, padding, source
from lowtri.auditing.probe import Probe, ProbeResult, Skipped, run_probes
from lowtri.auditing.probes import change, gradient, prefix
from lowtri.compat.transformers_private import attention_name
from lowtri.errors import CallError, LowtriError, MaskError

_KEYWORDS = ("output_attentions", "output_hidden_states", "return_weights", "need_weights", "return_attention")
_SAME = "its outputs equal eval mode's bit for bit: for 4 inputs, in float64 too, and for shorter and padded ones"
_LENGTH = 256
_LIMITS = "max_position_embeddings n_positions max_sequence_length max_seq_len block_size context_length"


class Settled(Exception):
    """Raised where a condition is known to add nothing, with the reason."""


@dataclass(frozen=True)
class ConditionKind:
    """One kind of condition: its contexts, and the probes that run in each."""

    name: str
    does: str
    finds: str
    probes: tuple[Probe, ...]
    contexts: Callable[[Context], Iterable[Context]]  # raises Skipped or Settled, with the reason
    # A model that leaks does so under most other conditions, too: to try them costs as much again and adds nothing.
    skipped_after: tuple[str, ...] = ()
    same_outputs: bool = False  # as without the condition; others are a warning
    first: bool = False  # whether nothing is run after the first leak

    def run(self, context: Context, chosen: Sequence[Probe]) -> tuple[list[ProbeResult], list[str]]:
        """One result for each condition of this kind and each probe, and notes."""
        results, notes = list[ProbeResult](), list[str]()
        probes = [probe for probe in self.probes if probe in chosen]
        try:
            for under in self.contexts(context) if probes else ():
                some, more = self._run_in(under, context, probes)
                results += some
                notes += more
                if self.first and any(result.leaks for result in some):
                    break
        except Settled as settled:
            mode = "training mode" if self.name == "training" else ""
            results.append(ProbeResult("clean", str(settled), condition=self.name, mode=mode))
        except Skipped as skipped:
            results.append(ProbeResult("skipped", str(skipped), (), skipped.measured, condition=self.name))
        return results, notes

    def _run_in(self, under: Context, context: Context, probes: Sequence[Probe]) -> tuple[list[ProbeResult], list[str]]:
        """The results under one condition; one without a probe where it is refused, or where other outputs show it."""
        words, results = under.condition.words, list[ProbeResult]()

        def said(status: str, message: str) -> ProbeResult:
            return ProbeResult(status, message, condition=self.name, words=words)  # type: ignore[arg-type]

        if self.same_outputs:
            context.base  # noqa: B018 (measured before anything is set)
        try:
            with under.applied():
                if under.noise.broken is not None:
                    return [said("skipped", under.noise.broken)], []
                if self.same_outputs and under.base.shape == context.base.shape:
                    difference = context.compare(under.base, ~context.ignored)
                    if difference.status == "leak":
                        message = f"other outputs {words}, {describe_difference(difference.greatest, '')}"
                        results.append(said("warning", message))
                some, notes = run_probes(under, probes, first=self.first)
        except Exception as error:
            if isinstance(error, LowtriError) and not isinstance(error, CallError):
                raise
            return [said("skipped", first_line(error).removeprefix("audit: "))], []
        return results + some, notes


def _code_paths(context: Context) -> Iterator[Context]:
    """Other outputs asked for, and other implementations of attention."""
    model = context.tested.model
    named = any(part.__module__.split(".")[0] == "transformers" for part in type(model).__mro__)
    paths = [
        Condition(keyword=(name, value))
        for name in _KEYWORDS
        if context.tested.accepts(name) or (name.startswith("output_") and named)
        for value in ((True, False) if name == "need_weights" else (True,))
    ]
    if hasattr(model, "set_attn_implementation"):
        paths += [Condition(attention=name) for name in ("eager", "sdpa") if name != attention_name(model)]
    if not paths:
        raise Skipped("no other code path is known")
    context = context.with_fewer_queries() if context.is_large else replace(context, chosen=tuple(context.sample(FEW)))
    for path in paths:
        yield context.under(replace(path, name="code_paths"))


def _compiled(context: Context) -> Iterator[Context]:
    yield context.under(Condition(name="compiled", compiled=True))


def _training(context: Context) -> Iterator[Context]:
    if context.mode != "eval mode":
        raise Skipped("the whole audit is in training mode" if context.mode else "the model has no training mode")
    if _same_in_training(context):
        raise Settled(_SAME)
    context = context.with_fewer_queries() if context.is_large else context
    yield _in_training(replace(context, condition=Condition(name="training")))


def _in_training(context: Context) -> Context:
    return context.under(replace(context.condition, training=True))


def _same_in_training(context: Context) -> bool:
    """Whether training mode gives bitwise the same outputs: for several inputs, in float64 as well, and for other shapes.

    Rounding cannot hide a leak of training mode alone from both precisions: what is left is below 1e-16 of the answer.
    """
    if context.tested.module is not context.tested.model:
        return False  # no float64 copy of what a function closes over
    inputs, n = context.inputs, context.n
    same = [inputs, context.fresh(700), context.fresh(701, "extreme"), context.repeated_token(n - 1)]
    other = [inputs.span(0, t) for t in context.shorter() if t < n] + [inputs.span(n // 2, n)]
    other += [inputs.rows([0])] if context.tested.signature.batch_axis is not None else []
    keyword = pad_keyword(context)
    try:
        if keyword:
            other += [pad(context, keyword, left, right, 702) for left, right in ((0, 3), (2, 5))]
        if not _same_in_both_modes(context, [*same, *other]):
            return False
        return _same_in_both_modes(replace(context, tested=context.tested.in_float64()), same)
    except Exception:
        return False


def _same_in_both_modes(context: Context, examples: list[Inputs]) -> bool:
    """Whether both modes give the same bits, or refuse an example with the same type of error; up to the first that differs."""

    def answer(mode: Context, inputs: Inputs) -> Array:
        with mode.applied():
            try:
                return mode.tested(inputs)
            except Exception as error:
                return np.array(str(type(error)))

    training = _in_training(context)
    for inputs in examples:
        one, other = answer(context, inputs), answer(training, inputs)
        if not np.array_equal(one, other, equal_nan=one.dtype.kind == other.dtype.kind == "f"):
            return False
    return True


def _longer(context: Context) -> Iterator[Context]:
    """The example's first row with random inputs behind it, at chosen positions, in eval and in training mode.

    Its length is `length=`, else 256 or twice the example's, less where the model takes less.
    """
    requested, n = context.options.length, context.n
    config = getattr(context.tested.module, "config", None)
    limits = [getattr(config, name, None) for name in _LIMITS.split()]
    sizes = [size for size in limits if isinstance(size, int) and size > 1]
    wanted = min([max(_LENGTH, 2 * n), *sizes]) if requested is None else requested
    if wanted <= n:
        size = wanted if requested is None else f"length={requested}"
        why = f"{size} is no longer than the example's {n} positions" if requested != 0 else "length=0 leaves it out"
        raise Skipped(why, {"length": n})
    device = getattr(context.tested.signature.device, "type", "cpu")
    if requested is None and not sizes and device != "cpu":
        # An index beyond a table of positions is no error to catch there: it ends every later call, too.
        raise Skipped(f"how many positions the model takes on {device} cannot be inferred; pass length=")
    try:
        longest, why = _longest(context, wanted)
    except (CallError, MaskError) as error:
        raise Skipped(str(error).splitlines()[0].removeprefix("audit: ")) from None
    if longest is None:
        raise Skipped(f"the model takes no longer example: {why}")
    longest = longest.under(Condition(name="longer", length=longest.n))
    yield longest
    if longest.mode == "eval mode" and "training" in longest.options.conditions and not _same_in_training(longest):
        yield _in_training(longest)


def too_short(results: Sequence[ProbeResult], length: int) -> str | None:
    """Why the longer example is not as long as `length=` requests; None where it is, or where it leaks."""
    ran = [result for result in results if result.condition == "longer"]
    if any(result.status == "leak" for result in ran):
        return None
    tried = max((result.length or result.measured.get("length", -1) for result in ran), default=-1)
    if tried >= length:
        return None
    skipped = next((result.message for result in ran if result.status == "skipped"), "conditions= leaves it out")
    return skipped if tried < 0 else f"the model takes no more than {tried} positions"


def _longest(context: Context, wanted: int) -> tuple[Context | None, str]:
    """The longest example up to `wanted` positions that the model takes, and why it takes no longer one."""
    reasons: list[str] = []

    def tried(length: int) -> Context | None:
        longer = extended(context, length)
        try:
            longer.tested(longer.inputs)
        except Exception as error:
            reasons.append(first_line(error))
            return None
        return longer

    low, high = context.n, wanted
    best: Context | None = None
    # Some models take multiples of a chunk alone; the example's length is one.
    for length in dict.fromkeys((wanted, wanted // low * low)):
        if length > low and (best := tried(length)) is not None:
            return best, next(iter(reasons), "")
    while high - low > 1:
        middle = (low + high) // 2
        longer = tried(middle)
        if longer is None:
            high = middle
        else:
            best, low = longer, middle
    return best, next(iter(reasons), "")


def extended(context: Context, length: int) -> Context:
    """The real tokens of the first row with inputs drawn at random behind them."""
    inputs = context.inputs.rows([0])
    keyword = pad_keyword(context)
    marks = inputs.settings.get(keyword) if keyword else None
    if marks is not None and marks.ndim == 2 and not context.real[0].all() and context.real[0].any():
        inputs = inputs.at(np.flatnonzero(context.real[0]))
    n = inputs.n
    declared = context.options.mask.pairs(length, context.inputs.batch)[:1]
    before = context.options.mask.pairs(context.n, context.inputs.batch)[0][:n, :n]
    inputs = inputs.with_lengths(lambda lengths: np.full_like(lengths, length))
    settings = {key: _continued(value, before, length, declared[0]) for key, value in inputs.settings.items()}
    repeated = tuple(np.concatenate([a, np.repeat(a[:, -1:], length - n, axis=1)], axis=1) for a in inputs.sequences)
    inputs = replace(inputs, sequences=repeated, settings=settings)
    inputs = inputs.change(np.arange(length) >= n, context.fresh(600, inputs=inputs))
    real = np.ones((1, length), bool)
    if keyword not in settings:
        real[:, : context.n] = context.real[:1]
    # Queries behind the example: the last ones, the ones before powers of two, and a spread.
    edges = [2**power - 1 for power in range(length.bit_length())]
    spread = np.linspace(n - 1, length - 2, 4).astype(int).tolist()
    chosen = tuple(sorted({position for position in [*edges, *spread, length - 1] if n - 1 <= position < length}))
    return replace(context, inputs=inputs, declared=declared, real=real, chosen=chosen)


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
    raise CallError("audit: other inputs follow the positions, and how they go on cannot be inferred")


KINDS: tuple[ConditionKind, ...] = (  # in the order in which they run
    ConditionKind(
        "code_paths",
        "weights or hidden states returned, other attention implementations",
        "code paths that do not apply the mask",
        (change, gradient),
        _code_paths,
        same_outputs=True,
    ),
    ConditionKind(
        "training",
        "training mode",
        "leaks that occur in training mode only",
        (change, gradient, prefix, batch, padding, source, packing),
        _training,
        skipped_after=("change", "gradient", "prefix"),
    ),
    ConditionKind(
        "longer",
        "chosen positions of a longer example (`length=`), in each mode",
        "leaks that begin past the end of the example",
        (change, gradient, prefix),
        _longer,
        skipped_after=("change", "gradient", "prefix"),
        first=True,
    ),
    ConditionKind(
        "compiled",
        "`torch.compile`; only where it is asked for",
        "leaks that the compiler makes",
        (change,),  # the backward pass would be compiled as well, which takes minutes
        _compiled,
    ),
)
