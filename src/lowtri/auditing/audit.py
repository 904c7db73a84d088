"""`audit`: read the arguments, run the trials, and report."""

from __future__ import annotations

import contextlib
import copy
import math
import operator
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.caches import cache, state
from lowtri.auditing.conditions import code_paths, longer, training
from lowtri.auditing.context import Context, Options, vocabulary
from lowtri.auditing.report import AuditReport
from lowtri.auditing.system import System, check_axes, module_behind, parameters, read_example
from lowtri.auditing.trial import Finding, Leak, Trial, chosen_trials, nothing_ran, require_requested, run_trials
from lowtri.auditing.trials import (
    batch,
    change,
    gradient,
    packing,
    padding,
    poison,
    prefix,
    real_positions,
    sensitivity,
)
from lowtri.errors import CallError
from lowtri.extras import require
from lowtri.masks import Mask, as_mask, causal
from lowtri.masks.label_masks import check_row_lengths
from lowtri.masks.tile import shown

TRIALS: tuple[Trial, ...] = (  # in the order in which they run
    change,
    gradient,
    prefix,
    batch,
    padding,
    packing,
    cache,
    code_paths,
    training,
    longer,
    state,
    poison,
    sensitivity,
)


def audit(
    model: Any,
    example: Any,
    *,
    mask: Mask | str | npt.NDArray[np.bool_] = causal(),  # noqa: B008 (a mask is a frozen formula)
    vocab_size: int | None = None,
    output: Callable[[Any], Any] | None = None,
    step: Callable[[Any, Any], Any] | None = None,
    prefill: Callable[[Any], Any] | None = None,
    layers: int | None = None,
    input: str | int | Sequence[str | int] | None = None,
    position_axis: int | None = None,
    batch_axis: int | str | None = "auto",
    output_axis: int | None = None,
    alone: Callable[..., Any] | None = None,
    pad_mask: str | None = None,
    train: bool | None = None,
    redraw: bool | float = False,
    compile: bool = False,
    length: int | None = None,
    probes: Sequence[str] | None = None,
    draws: int = 2,
    exact: int = 128,
    seed: int = 0,
    progress: bool | None = None,
) -> AuditReport:
    """Measure what a model's outputs depend on, and compare it with the mask.

    >>> import numpy as np
    >>> from lowtri import audit
    >>> x = np.random.default_rng(0).standard_normal((6, 4))
    >>> print(audit(lambda x: np.cumsum(x, axis=0), x).verdict)
    no leak found
    >>> print(audit(lambda x: x - x.mean(axis=0), x).message)
    leak against causal: position 0 sees position 1: changing input 1 moves output 0 by 0.2 (noise 0). (15 pairs in all.)

    Args:
        model: a torch module, a transformers model, or any callable from an array of token ids or of vectors to an array
            with one row for each position. It is run unmodified; flags, buffers and random states are restored.
        example: ids (N,) or (B, N); vectors (N, D), (B, N, D) or (B, H, N, D); or a tuple of arguments or dict of keywords.
            N should exceed the model's windows, chunks and capacities, since faults occur at their edges.
        mask: which inputs an output of the whole model may depend on; a Mask, its text, or a bool table (N, N), True = may see.
        vocab_size: how many ids to draw from; by default from the model's embedding or config, else the ids in the example.
        output: a function that selects the tensor with one row for each position from what the model returns; by default the
            returned tensor itself, its `.logits`, or its first element.
        step: a function that decodes, `step(state, x) -> (output, state)`; x is one position, ids (B,) or vectors (B, D), or
            several, (B, n) or (B, n, D), if it takes them; the first state is None.
        prefill: how decoding starts, if not by `step`: `prefill(x) -> (output, state)` of a prompt, (B, n) or (B, n, D).
        layers: states that the mask is that of one layer; it is widened to the inputs that this many layers can reach.
        input: which entries of a tuple or dict example are the sequence; "decoder_input_ids" audits the decoder of an
            encoder-decoder. Arrays with one entry for each row of the batch, such as its source, stay with their rows.
        position_axis, batch_axis, output_axis: where positions and batch are, if that cannot be told from the shapes.
        alone: a function that runs one document alone, for the packing probe.
        pad_mask: the keyword that marks real positions (1 = real), for the padding probe.
        train: True audits in training mode only, False in eval mode only; by default, every probe audits eval mode and most
            probes also training mode.
        redraw: audit a copy with its weights redrawn (standard deviation 0.15, or the number given), since fresh
            initialisation hides leaks.
        compile: also audit the model under `torch.compile`.
        length: the number of positions of the longer example, which is the example followed by random inputs; by default 256
            or twice the example's, fewer if the model accepts fewer. 0 omits the longer example.
        probes: names of the probes to run; by default all.
        draws: how many random values replace each input in turn, for each row of the batch.
        exact: up to this number of positions, every pair is checked.
        seed: the seed of every random draw.
        progress: whether to show progress on stderr; by default only if stderr is a terminal.

    Returns:
        AuditReport: `ok`, `leaks` (query, key, size, module), `draw()`, `to_json()`, `save(path)`, `exit_code`.

    Raises:
        CallError: if an argument cannot be used, or the example or the output has no clear axis of positions; the message
            names the argument to set. If a check requested by `step`, `alone`, `pad_mask`, `compile` or `length` cannot be
            run, the audit does not raise: it is undecided, and the report gives the reason.
    """
    arguments = dict(locals())
    check_arguments(model, arguments)
    started = time.monotonic()
    options = Options(**{name: arguments[name] for name in Options.__dataclass_fields__})
    chosen = chosen_trials(probes, TRIALS)
    inputs, signature = read_example(
        example, model=model, input=input, position_axis=position_axis, batch_axis=batch_axis
    )
    _check_memory(max(inputs.n, length or 0))
    if isinstance(mask, Mask | str):
        check_row_lengths("audit", as_mask(mask), inputs.n)
    system = System(redrawn(model, redraw, seed), signature, output, output_axis, bool(train), seed)
    declared, hidden = options.declared(inputs.n, inputs.batch)
    real = real_positions(inputs, signature.prefix, pad_mask) & ~hidden
    findings: list[Finding] = []
    notes: list[str] = []
    with system.prepared():
        pristine = None
        if state in chosen and system.model is system.module:
            with contextlib.suppress(Exception):  # not every model can be copied
                pristine = copy.deepcopy(system.model)
        ids, show = vocabulary(system, inputs, vocab_size), progress_line(progress, started)
        context = Context(system, inputs, declared, real, options, ids, show, pristine=pristine)
        noise = context.try_example()
        if position_axis is None and batch_axis == "auto":
            check_axes(system, inputs, seed)
        mode = context.mode
        if noise.broken is None:
            findings, notes = run_trials(context, chosen)
            findings, unused = require_requested(findings, TRIALS, options)
            notes += unused
        elif pristine is not None and not np.isnan(context.base[real]).any():
            findings = [f for f in run_trials(context, [state])[0] if f.status == "leak"]
        show("", 0)
    leaks: dict[tuple[int, int, int], Leak] = {}  # one for each pair, from the first probe that found it
    for leak in (leak for finding in findings for leak in finding.leaks):
        leaks.setdefault((leak.query, leak.key, -1 if leak.paired else leak.row), leak)
    undecided = [f"{finding.probe}: {finding.message}" for finding in findings if finding.status == "undecided"]
    text = mask if isinstance(mask, str) else f"a table of {mask.shape}" if isinstance(mask, np.ndarray) else repr(mask)
    return AuditReport(
        model=getattr(model, "__name__", None) or type(model).__name__,
        mask=text if layers is None else f"{text} x {layers} layers",
        n=inputs.n,
        batch=inputs.batch,
        noise=noise,
        findings=tuple(findings),
        # The example's own pairs of positions come before other conditions, and pairs before lengths, pads and neighbours.
        leaks=tuple(sorted(leaks.values(), key=lambda k: (not k.direct, not k.paired, k.query, k.key))),
        allowed=np.asarray(context.allowed.any(axis=0)),
        seen=context.seen,
        reason=noise.broken or (undecided[0] if undecided else nothing_ran(findings)),
        seconds=time.monotonic() - started,
        notes=tuple(notes + _notes(context, findings)),
        modes=(mode,) if mode else (),
    )


def assert_causal(model: Any, example: Any, **arguments: Any) -> None:
    """For tests: raise LeakError with the first leaking pair, or UndecidedError if the audit could not decide.

    >>> import numpy as np
    >>> from lowtri import assert_causal
    >>> assert_causal(lambda x: np.cumsum(x, axis=0), np.ones((5, 2)))

    Takes the arguments of `audit`; with `mask=` it asserts any other mask.
    """
    audit(model, example, **arguments).raise_for_leak()


def trial_table() -> str:
    """The trials as the Markdown table of docs/audit.md."""
    lines = ["| probe | what it does | what it finds | what it needs |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {t.name} | {t.does} | {t.finds} | {t.needs} |" for t in TRIALS)])


def _notes(context: Context, findings: Sequence[Finding]) -> list[str]:
    notes = []
    longest = max([context.n, *(finding.measured.get("length", 0) for finding in findings)])
    config = getattr(context.system.model, "config", None)
    for name in ("sliding_window", "attention_chunk_size", "chunk_size"):
        size = getattr(config, name, None)
        if isinstance(size, int) and size >= longest and not isinstance(size, bool):
            notes.append(
                f"{longest} positions do not go past the model's {name} of {size}; faults at its edge would not show"
            )
    if context.noise.random:
        notes.append("the model draws random numbers; every call started from the same seed")
    if context.options.layers is not None:
        notes.append(f"the mask is one layer's, widened to what {context.options.layers} layers reach")
    return notes


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
                raise CallError(f"audit: {name}={shown(value)}, expected {expected}.")
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


def _check_memory(n: int) -> None:
    """Raise CallError where the table of all pairs of n positions does not fit into memory."""
    try:
        np.empty((n, n), bool)
    except (MemoryError, ValueError):
        raise CallError(
            f"audit: {n:,} positions have {float(n) ** 2:,.0f} pairs, more than this machine's memory can represent.\n"
            "Fix: a shorter example, or a smaller length= (--length)."
        ) from None


def _whole(least: float, most: float = math.inf) -> Callable[[Any], bool]:
    def is_one(value: Any) -> bool:
        try:
            return not isinstance(value, bool) and least <= operator.index(value) <= most
        except TypeError:  # no whole number, or an array of several
            return False

    return is_one


_MOST_IDS = 2**24  # they are drawn from a list of all of them: 128 MB


# Arguments, what their values must be, and how an error says so; those that end with None may be None.
_EXPECTED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("output step prefill alone", callable, "something to call, or None"),
    ("exact seed", _whole(0), "a whole number of at least 0"),
    ("draws", _whole(1), "a whole number of at least 1"),
    ("vocab_size", _whole(2, _MOST_IDS), "a whole number between 2 and 2**24, or None"),
    ("layers", _whole(1), "a whole number of at least 1, or None"),
    ("length", _whole(0), "a whole number, 0 for no longer example, or None"),
    ("position_axis output_axis", _whole(-math.inf), "the number of an axis, or None"),
    (
        "batch_axis",
        lambda value: value == "auto" if isinstance(value, str) else _whole(-math.inf)(value),
        'the number of an axis, "auto" or None',
    ),
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


def redrawn(model: Any, redraw: bool | float, seed: int) -> Any:
    """A copy whose matrices are drawn anew; vectors (norms, biases) stay. The model itself where `redraw` is false."""
    if not redraw:
        return model
    import torch

    if not isinstance(model, torch.nn.Module):
        raise CallError(f"audit: redraw= needs a torch module, got {type(model).__name__}.\nFix: drop redraw=.")
    redrawn_copy = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in redrawn_copy.parameters():
            if parameter.dim() >= 2 and parameter.is_floating_point():
                fresh = torch.randn(parameter.shape, generator=generator) * (0.15 if redraw is True else float(redraw))
                parameter.copy_(fresh.to(parameter))
    return redrawn_copy


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
