"""Conditions: what probes run under besides the example as it is. Other code paths, training mode, a longer example, the compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lowtri.auditing.context import FEW, Condition, Context, describe_difference
from lowtri.auditing.example import Array, Inputs, first_line
from lowtri.auditing.neighbours import batch, packing
from lowtri.auditing.pads import libraries, pad, pad_keyword, padding, source
from lowtri.auditing.probe import Probe, ProbeResult, Skipped, Status, run_probes
from lowtri.auditing.probes import change, gradient, prefix
from lowtri.auditing.reading import extended
from lowtri.compat.transformers_private import attention_name
from lowtri.errors import CallError, MaskError

_KEYWORDS = ("output_attentions", "output_hidden_states", "return_weights", "need_weights", "return_attention")
_SAME = "its outputs equal eval mode's bit for bit: for 4 inputs, in float64 too, and for shorter and padded ones"
_LENGTH = 256
_LIMITS = "max_position_embeddings n_positions max_sequence_length max_seq_len block_size context_length"


class Settled(Skipped):
    """Raised where a condition is known to add nothing, with the reason."""

    status = "clean"


@dataclass(frozen=True)
class ConditionKind:
    """One kind of condition: its contexts, and the probes that run in each."""

    name: str
    does: str
    finds: str
    probes: tuple[Probe, ...]
    contexts: Callable[[Context], Iterable[Context]]  # raises Skipped or Settled, with the reason
    # A model that leaks does so under most other conditions, too: to try them costs as much again and adds nothing.
    skipped_after_leak: bool = False
    same_outputs: bool = False  # as without the condition; others are a warning
    first: bool = False  # whether nothing is run after the first leak

    def run(self, context: Context, chosen: Sequence[Probe]) -> list[ProbeResult]:
        """One result for each condition of this kind and each probe."""
        results = list[ProbeResult]()
        probes = [probe for probe in self.probes if probe in chosen]
        try:
            for under in self.contexts(context) if probes else ():
                results += self._run_in(under, context, probes)
                if self.first and any(result.leaks for result in results):
                    break
        except Skipped as skipped:
            results.append(self.result(skipped.status, str(skipped), skipped.measured))
        return results

    def result(self, status: Status, message: str, measured: dict[str, Any] | None = None) -> ProbeResult:
        """A result of the condition itself."""
        return ProbeResult(status, message, (), measured or {}, under=Condition(name=self.name))

    def _run_in(self, under: Context, context: Context, probes: Sequence[Probe]) -> list[ProbeResult]:
        """The results under one condition; one without a probe where it is refused, or where other outputs show it."""
        results = list[ProbeResult]()
        if self.same_outputs:
            context.base  # noqa: B018 (measured before anything is set)
        try:
            with under.applied():
                if under.noise.broken is not None:
                    return [ProbeResult("skipped", under.noise.broken, under=under.condition)]
                if self.same_outputs and under.base.shape == context.base.shape:
                    difference = context.compare(under.base, context.real)
                    if difference.status == "leak":
                        differs = describe_difference(difference.greatest, "")
                        message = f"other outputs {under.condition.words}, {differs}"
                        results.append(ProbeResult("warning", message, under=under.condition))
                return results + run_probes(under, probes, first=self.first)
        except Exception as error:  # a model of lowtri refuses with lowtri's errors
            return [ProbeResult("skipped", first_line(error).removeprefix("audit: "), under=under.condition)]


def _code_paths(context: Context) -> Iterator[Context]:
    """Other outputs asked for, and other implementations of attention."""
    model, of_transformers = context.tested.model, "transformers" in libraries(context)
    paths = [
        Condition(keyword=(name, value))
        for name in _KEYWORDS
        if context.tested.accepts(name) or (name.startswith("output_") and of_transformers)
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
    yield context.under(Condition(name="training", training=True))


def _same_in_training(context: Context) -> bool:
    """Whether training mode gives bitwise the same outputs: for several inputs, in float64 as well, and for other shapes.

    Rounding cannot hide a leak of training mode alone from both precisions: what is left is below 1e-16 of the answer.
    """
    if context.tested.module is not context.tested.model:
        return False  # no float64 copy of what a function closes over
    inputs, n = context.inputs, context.n
    keyword = pad_keyword(context)
    same = [inputs, context.fresh(700), context.fresh(701, "extreme"), context.repeated_token(n - 1)]
    other = [inputs.span(0, t) for t in context.shorter() if t < n] + [inputs.span(n // 2, n)]
    other += [inputs.rows([0])] if context.tested.signature.batch_axis is not None else []
    try:
        if keyword:
            other += [pad(context, keyword, left, right, 702) for left, right in ((0, 3), (2, 5))]
        if not all(_same_in_both_modes(context, example) for example in [*other, *same]):  # the shortest first
            return False
        copy64 = replace(context, tested=context.tested.in_float64())
        return all(_same_in_both_modes(copy64, example) for example in same)
    except Exception:
        return False


def _same_in_both_modes(context: Context, inputs: Inputs) -> bool:
    """Whether both modes give the same bits, or refuse the inputs with the same type of error."""
    answers = list[Array]()
    for mode in (context, context.under(replace(context.condition, training=True))):
        with mode.applied():
            try:
                answers.append(mode.tested(inputs))
            except Exception as error:
                answers.append(np.array(str(type(error))))
    one, other = answers
    return np.array_equal(one, other, equal_nan=one.dtype.kind == other.dtype.kind == "f")


def _longer(context: Context) -> Iterator[Context]:
    """The example's first row with random inputs behind it, at chosen positions, in eval and in training mode.

    Its length is `length=`, else 256 or twice the example's, less where the model takes less.
    """
    requested, n = context.length, context.n
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
        longest = _longest(context, wanted)
    except (CallError, MaskError) as error:
        raise Skipped(str(error).splitlines()[0].removeprefix("audit: ")) from None
    longest = longest.under(Condition(name="longer", length=longest.n))
    yield longest
    if longest.mode == "eval mode" and "training" in longest.conditions and not _same_in_training(longest):
        yield longest.under(replace(longest.condition, training=True))


def _longest(context: Context, wanted: int) -> Context:
    """The longest example up to `wanted` positions that the model takes."""
    n, reasons = context.n, list[str]()

    def tried(length: int) -> Context | None:
        longer = extended(context, length)
        try:
            longer.tested(longer.inputs)
        except Exception as error:
            reasons.append(first_line(error))
            return None
        return longer

    # Some models take multiples of a chunk alone; the example's length is one.
    for length in dict.fromkeys((wanted, wanted // n * n)):
        if length > n and (whole := tried(length)) is not None:
            return whole
    best: Context | None = None
    low, high = n, wanted
    while high - low > 1:
        middle = (low + high) // 2
        longer = tried(middle)
        if longer is None:
            high = middle
        else:
            best, low = longer, middle
    if best is None:
        raise Skipped(f"the model takes no longer example: {next(iter(reasons), '')}")
    return best


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
        skipped_after_leak=True,
    ),
    ConditionKind(
        "longer",
        "chosen positions of a longer example (`length=`), in each mode",
        "leaks that begin past the end of the example",
        (change, gradient, prefix),
        _longer,
        skipped_after_leak=True,
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
