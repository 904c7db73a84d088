"""`audit`: read the arguments, measure the noise, run the probes, and report."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.caches import CACHE, STATE
from lowtri.auditing.conditions import CODE_PATHS, LONGER, TRAINING
from lowtri.auditing.content import CHANGE, GRADIENT, POISON, PREFIX, SENSITIVITY
from lowtri.auditing.context import Context, Options, check_arguments, check_memory, progress_line, vocabulary
from lowtri.auditing.finding import Finding, Leak
from lowtri.auditing.inputs import read_example
from lowtri.auditing.report import AuditReport
from lowtri.auditing.rows import BATCH_ROWS, PACKING, PADDING, real_positions
from lowtri.auditing.system import System, check_axes, redrawn
from lowtri.auditing.trial import Trial, chosen_trials, nothing_ran, require_requested, run_trials, try_example
from lowtri.masks import Mask, as_mask, causal
from lowtri.masks.label_masks import check_row_lengths

TRIALS: tuple[Trial, ...] = (  # in the order in which they run
    CHANGE,
    GRADIENT,
    PREFIX,
    BATCH_ROWS,
    PADDING,
    PACKING,
    CACHE,
    CODE_PATHS,
    TRAINING,
    LONGER,
    STATE,
    POISON,
    SENSITIVITY,
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
    check_memory(max(inputs.n, length or 0))
    if isinstance(mask, Mask | str):
        check_row_lengths("audit", as_mask(mask), inputs.n)
    audited = redrawn(model, 0.15 if redraw is True else float(redraw), seed) if redraw else model
    system = System(audited, signature, output, output_axis, bool(train), seed)
    declared, hidden = options.declared(inputs.n, inputs.batch)
    real = real_positions(inputs, signature.prefix, pad_mask) & ~hidden
    findings: list[Finding] = []
    notes: list[str] = []
    with system.prepared():
        pristine = None
        if STATE in chosen and system.model is system.module:
            with contextlib.suppress(Exception):  # not every model can be copied
                pristine = copy.deepcopy(system.model)
        ids = vocabulary(system, inputs, vocab_size)
        allowed, show = declared & real[:, None, :], progress_line(progress, started)
        context = Context(system, inputs, allowed, declared, real, options, ids, show, pristine=pristine)
        try_example(context)
        if position_axis is None and batch_axis == "auto":
            check_axes(system, inputs, seed)
        mode = context.mode
        if context.noise.broken is None:
            findings, notes = run_trials(context, chosen)
            findings, unused = require_requested(findings, TRIALS, options)
            notes += unused
        elif pristine is not None and not np.isnan(context.base[real]).any():
            findings = [f for f in run_trials(context, [STATE])[0] if f.status == "leak"]
        show("", 0)
    leaks: dict[tuple[int, int, int], Leak] = {}
    for leak in (leak for finding in findings for leak in finding.leaks):
        leaks.setdefault(
            (leak.query, leak.key, -1 if leak.paired else leak.row), leak
        )  # one for each pair, from the first probe that found it
    undecided = [f"{finding.probe}: {finding.message}" for finding in findings if finding.status == "undecided"]
    return AuditReport(
        model=getattr(model, "__name__", None) or type(model).__name__,
        mask=_mask_text(mask, layers),
        n=inputs.n,
        batch=inputs.batch,
        noise=context.noise,
        findings=tuple(findings),
        leaks=tuple(sorted(leaks.values(), key=_order)),
        allowed=np.asarray(allowed.any(axis=0)),
        seen=context.seen,
        reason=context.noise.broken or (undecided[0] if undecided else nothing_ran(findings)),
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
    for trial in TRIALS:
        needs = ", ".join(need.what for need in trial.needs)
        lines.append(f"| {trial.name} | {trial.does} | {trial.finds} | {needs} |")
    return "\n".join(lines)


def _order(leak: Leak) -> tuple[bool, bool, int, int]:
    """The example's own pairs of positions come before other conditions, and pairs before lengths, pads and neighbours."""
    return not leak.direct, not leak.paired, leak.query, leak.key


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


def _mask_text(mask: Any, layers: int | None) -> str:
    text = mask if isinstance(mask, str) else repr(mask)
    if isinstance(mask, np.ndarray):
        text = f"a table of {mask.shape}"
    return text if layers is None else f"{text} x {layers} layers"
