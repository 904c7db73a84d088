"""An audit's trials under other conditions: other code paths, training mode, and a longer example."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from lowtri.auditing.context import Condition, Context, describe_difference
from lowtri.auditing.system import Array, Bools, Inputs, first_line
from lowtri.auditing.trial import Finding, Skipped, Trial, run_trials, trial
from lowtri.auditing.trials import batch, change, gradient, packing, pad, pad_keyword, padding, prefix
from lowtri.compat.transformers_private import attention_name
from lowtri.errors import CallError

_KEYWORDS = ("output_attentions", "output_hidden_states", "return_weights", "need_weights", "return_attention")
_TRAINING = "training mode"
_SAME = "its outputs equal eval mode's bit for bit: for 4 inputs, in float64 too, and for shorter and padded ones"
_LENGTH = 256
_LIMITS = "max_position_embeddings n_positions max_sequence_length max_seq_len block_size context_length"


def _under(
    contexts: Iterable[Context],
    trials: Sequence[Trial],
    clean: str,
    *,
    without: Context | None = None,
    first: bool = False,
) -> Finding:
    """Run the trials under each context's condition, and make one finding of them all.

    A condition that fails, or under which the model does not repeat itself, is refused.

    Args:
        clean: the message where no leak was found, with `{conditions}` and `{trials}` for those that ran.
        without: the context without the conditions, where the answers have to be equal; else the finding is a warning.
        first: whether to run nothing after the first leak.
    """
    tried, refused, differ = dict[str, list[str]](), dict[str, str](), dict[str, float]()
    findings: list[Finding] = []
    if without is not None:
        without.base  # noqa: B018 (measured before anything is set)
    for context in contexts:
        condition = context.condition
        name = condition.added or (_TRAINING if condition.training else context.mode or "as it is")
        try:
            with context.applied():
                if context.noise.broken is not None:
                    refused[name] = context.noise.broken
                    continue
                if without is not None and context.base.shape == without.base.shape:
                    difference = without.compare(context.base, ~without.ignored)
                    differ |= {name: difference.greatest} if difference.status == "leak" else {}
                # The backward pass of a compiled model would be compiled as well, which takes minutes.
                some, _ = run_trials(context, trials[:1] if condition.compiled else trials, first=first)
        except Exception as error:
            differ.pop(name, None)
            refused[name] = first_line(error)
            continue
        tried[name] = [finding.probe for finding in some if finding.status not in ("skipped", "undecided")]
        findings += some
        if first and any(finding.leaks for finding in some):
            break
    measured = {"tried": tried, "refused": refused, "differ": differ}
    leaks = tuple(leak for finding in findings for leak in finding.leaks)
    undecided = next((finding for finding in findings if finding.status == "undecided"), None)
    if leaks:
        return Finding("leak", leaks[0].what, leaks, measured)
    if undecided is not None:
        message = f"{undecided.condition}, {undecided.probe}: {undecided.message}"
        return Finding("undecided", message, (), measured)
    if differ:
        text = "; ".join(f"{name}, {describe_difference(size, '')}" for name, size in differ.items())
        return Finding("warning", f"other outputs with {text}", (), measured)
    if not tried:
        return Finding("skipped", next(iter(refused.values()), "no other code path is known"), (), measured)
    message = clean.format(conditions=", ".join(tried), trials=", ".join(next(iter(tried.values()))))
    return Finding("clean", message + "".join(f"; not tried: {n} ({why})" for n, why in refused.items()), (), measured)


def _not_compiled(finding: Finding, value: object) -> str | None:
    return None if finding.status == "leak" else finding.measured.get("refused", {}).get("torch.compile")


@trial(
    "code_paths",
    "runs change and gradient with weights or hidden states returned, other attention implementations, `compile=True`",
    "code paths that do not apply the mask",
    argument="compile",
    not_run=_not_compiled,
)
def code_paths(context: Context) -> Finding:
    """Each must respect the mask; one that does and has another output is a warning."""
    model = context.system.model
    paths = [
        Condition(keyword=(name, value))
        for name in _KEYWORDS
        if context.system.accepts(name) or (name.startswith("output_") and hasattr(model, "config"))
        for value in ((True, False) if name == "need_weights" else (True,))
    ]
    if hasattr(model, "set_attn_implementation"):
        paths += [Condition(attention=name) for name in ("eager", "sdpa") if name != attention_name(model)]
    if context.options.compile:
        paths.append(Condition(compiled=True))
    return _under(map(context.under, paths), (change, gradient), "no leak ({conditions})", without=context)


@trial(
    "training",
    "runs change, gradient, prefix, batch, padding and packing in training mode",
    "leaks that occur in training mode only",
    needs="a training mode",
    skipped_after=("change", "gradient", "prefix"),
)
def training(context: Context) -> Finding:
    """Every trial that does not decode, in training mode, as sensitive as in eval mode."""
    if context.options.train is False:
        raise Skipped("train=False leaves it out")
    if context.mode != "eval mode":
        raise Skipped("the whole audit is in training mode" if context.mode else "the model has no training mode")
    if _same_in_training(context):
        return Finding("clean", _SAME, (), {"tried": {_TRAINING: ["answers"]}}, mode=_TRAINING)
    trials = (change, gradient, prefix, batch, padding, packing)
    finding = _under([_in_training(context)], trials, "no leak ({trials})")
    return replace(finding, mode=_TRAINING if finding.measured["tried"] else "")


def _in_training(context: Context) -> Context:
    return context.under(replace(context.condition, training=True))


def _same_in_training(context: Context) -> bool:
    """Whether training mode gives bitwise the same outputs: for several inputs, in float64 as well, and for other shapes.

    Rounding cannot hide a leak of training mode alone from both precisions: what is left is below 1e-16 of the answer.
    """
    if context.system.module is not context.system.model:
        return False  # no float64 copy of what a function closes over
    inputs, n = context.inputs, context.n
    same = [inputs, context.fresh(700), context.fresh(701, "extreme"), context.repeated_token(n - 1)]
    other = [inputs.span(0, t) for t in context.shorter() if t < n] + [inputs.span(n // 2, n)]
    other += [inputs.rows([0])] if context.system.signature.batch_axis is not None else []
    keyword = pad_keyword(context)
    try:
        other += [pad(context, keyword, left, right, 702) for left, right in ((0, 3), (2, 5))] if keyword else []
        copy64 = replace(context, system=context.system.in_float64())
        return _alike(context, [*same, *other]) and _alike(copy64, same)
    except Exception:
        return False


def _alike(context: Context, examples: list[Inputs]) -> bool:
    """Whether both modes give the same bits, or refuse an example with the same type of error."""

    def answer(mode: Context, inputs: Inputs) -> Array:
        try:
            return mode.system(inputs)
        except Exception as error:
            return np.array(str(type(error)))

    answers: list[list[Array]] = []
    for mode in (context, _in_training(context)):
        with mode.applied():
            answers.append([answer(mode, inputs) for inputs in examples])
    return all(
        np.array_equal(a, b, equal_nan=a.dtype.kind == b.dtype.kind == "f") for a, b in zip(*answers, strict=True)
    )


def _too_short(finding: Finding, length: int) -> str | None:
    tried = finding.measured.get("length", -1)
    if finding.status == "leak" or tried >= length:
        return None
    return finding.message if tried < 0 else f"the model takes no more than {tried} positions"


@trial(
    "longer",
    "runs change, gradient and prefix at chosen positions of a longer example (`length=`), in eval and training mode",
    "leaks that begin past the end of the example",
    skipped_after=("change", "gradient", "prefix", "training"),
    argument="length",
    not_run=_too_short,
)
def longer(context: Context) -> Finding:
    """The example's first row with random inputs behind it, at chosen positions, in eval and in training mode.

    Its length is `length=`, else 256 or twice the example's, less where the model takes less.
    """
    requested, n = context.options.length, context.n
    config = getattr(context.system.module, "config", None)
    limits = [getattr(config, name, None) for name in _LIMITS.split()]
    sizes = [size for size in limits if isinstance(size, int) and size > 1]
    wanted = min([max(_LENGTH, 2 * n), *sizes]) if requested is None else requested
    if wanted <= n:
        size = wanted if requested is None else f"length={requested}"
        why = f"{size} is no longer than the example's {n} positions" if requested != 0 else "length=0 leaves it out"
        raise Skipped(why, {"length": n})
    device = getattr(context.system.signature.device, "type", "cpu")
    if requested is None and not sizes and device != "cpu":
        # An index beyond a table of positions is no error to catch there: it ends every later call, too.
        raise Skipped(f"how many positions the model takes on {device} is not known (say length=)")
    try:
        longest, why = _longest(context, wanted)
    except CallError as error:
        raise Skipped(str(error).removeprefix("audit: ")) from None
    if longest is None:
        raise Skipped(f"the model takes no longer example: {why}")
    length = longest.n
    clean = f"no leak at {length} positions ({len(longest.chosen or ())} of them measured, {{conditions}})"
    finding = _under(_modes(longest), (change, gradient, prefix), clean, first=True)
    if finding.status == "undecided" and requested is None:
        # The caller did not request it: numbers near the noise there leave the verdict on the example as it is.
        message = f"at {length} positions the differences are too near the noise to decide: {finding.message}"
        raise Skipped(f"{message} (length={length} makes it part of the verdict)")
    tried = bool(finding.measured["tried"])
    return replace(
        finding,
        message=finding.message + (f"; {wanted} were not taken: {why}" if why and finding.status == "clean" else ""),
        measured={**finding.measured, "length": length if tried else -1},
        length=length if tried else None,
    )


def _modes(longest: Context) -> Iterator[Context]:
    longest = longest.under(Condition(length=longest.n))
    yield longest
    if longest.mode == "eval mode" and longest.options.train is None and not _same_in_training(longest):
        yield _in_training(longest)


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

    low, high, best = context.n, wanted, None
    # Some models take multiples of a chunk alone; the example's length is one.
    for length in dict.fromkeys((wanted, wanted // low * low)):
        if length > low and (best := tried(length)) is not None:
            return best, next(iter(reasons), "")
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
        inputs = inputs.at(np.flatnonzero(context.real[0]))
    n = inputs.n
    declared = context.options.declared(length, context.inputs.batch)[0][:1]
    before = context.declared[0][:n, :n]
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
    raise CallError("audit: other inputs follow the positions, and how they go on is not known")
