"""`audit`: read the arguments, measure the noise, run the probes, and report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.adapter import ModelAdapter
from lowtri.auditing.context import Context
from lowtri.auditing.example import read_example
from lowtri.auditing.finding import Finding, Leak
from lowtri.auditing.options import Options
from lowtri.auditing.probes import PROBES
from lowtri.auditing.report import AuditReport
from lowtri.auditing.running import chosen_probes, nothing_ran, require_requested, run_probes
from lowtri.auditing.setup import progress_line, redrawn, vocabulary
from lowtri.masks import Mask, causal

__all__ = ["assert_causal", "audit"]


def audit(
    model: Any,
    example: Any,
    *,
    mask: Mask | str | npt.NDArray[np.bool_] = causal(),  # noqa: B008 (a mask is a frozen formula)
    vocab_size: int | None = None,
    output: Callable[[Any], Any] | None = None,
    step: Callable[[Any, Any], Any] | None = None,
    layers: int | None = None,
    input: str | int | Sequence[str | int] | None = None,
    position_axis: int | None = None,
    batch_axis: int | str | None = "auto",
    output_axis: int | None = None,
    alone: Callable[..., Any] | None = None,
    pad_mask: str | None = None,
    train: bool = False,
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
            with one row for each position. It is run as it is; flags, buffers and random states are put back.
        example: ids (N,) or (B, N); vectors (N, D), (B, N, D) or (B, H, N, D); or a tuple of arguments or dict of keywords.
            N should exceed the model's windows, chunks and capacities: that is where faults sit.
        mask: what an output may depend on, from end to end; a Mask, its text, or a bool table (N, N), True = may see.
        vocab_size: how many ids to draw from; by default the model's embedding or config, else the ids in the example.
        output: picks the tensor with one row for each position out of what the model returns; by default a tensor itself,
            `.logits`, or the first element.
        step: how to decode one position, `step(state, x) -> (output, state)`; x is ids (B,) or vectors (B, D), and the state
            is None at first.
        layers: the mask is one layer's; it is widened to what this many layers can reach.
        input: which entries of a tuple or dict example are the sequence; "decoder_input_ids" audits the decoder of an
            encoder-decoder. An array with one entry for each row of the batch, as its source is, goes with the row.
        position_axis, batch_axis, output_axis: where positions and batch are, if that cannot be told from the shapes.
        alone: how one document runs alone, for the packing probe.
        pad_mask: the keyword that marks real positions (1 = real), for the padding probe.
        train: audit in training mode alone; without it, eval mode is audited by every probe and training mode by most.
        redraw: audit a copy with its weights redrawn (standard deviation 0.15, or the number given), since fresh
            initialisation hides leaks.
        compile: also audit the model under `torch.compile`.
        length: how many positions the longer example has, which is the example with random inputs behind it; by default 256
            or twice the example's, less where the model takes less. 0 leaves it out.
        probes: names of the probes to run; by default all.
        draws: how many random values are put in the place of each input, for each row of the batch.
        exact: up to this length every pair is looked at.
        seed: of every random draw.
        progress: show progress on stderr; by default when it is a terminal.

    Returns:
        AuditReport: `ok`, `leaks` (query, key, size, module), `draw()`, `to_json()`, `save(path)`, `exit_code`.

    Raises:
        CallError: if an argument cannot be used, or the example or the answer has no clear axis of positions; the message
            names the argument to set. What `step`, `alone`, `pad_mask`, `compile` or `length` request and cannot be run
            leaves the audit undecided, with the reason.
    """
    started = time.monotonic()
    options = Options(mask, layers, step, alone, pad_mask, compile, length, draws, exact, seed)
    options.check(model, output, redraw)
    chosen = chosen_probes(probes, PROBES)
    inputs, signature = read_example(
        example, model=model, input=input, position_axis=position_axis, batch_axis=batch_axis
    )
    audited = redrawn(model, 0.15 if redraw is True else float(redraw), seed) if redraw else model
    adapter = ModelAdapter(audited, signature, output, output_axis, train, seed)
    allowed = options.allowed(inputs.n, inputs.batch)
    ids = vocabulary(model, inputs, vocab_size)
    context = Context(adapter, inputs, allowed, options, ids, progress_line(progress, started))
    findings: list[Finding] = []
    notes: list[str] = []
    with adapter.prepared():
        mode = context.mode
        if context.noise.broken is None:
            findings, notes = run_probes(context, chosen)
            findings, unused = require_requested(findings, PROBES, options)
            notes += unused
    leaks: dict[tuple[int, int], Leak] = {}
    for leak in (leak for finding in findings for leak in finding.leaks):
        leaks.setdefault((leak.query, leak.key), leak)  # one for each pair, from the first probe that found it
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
    """For tests: raise LeakError naming the first leaking pair, UndecidedError when the audit could not decide.

    >>> import numpy as np
    >>> from lowtri import assert_causal
    >>> assert_causal(lambda x: np.cumsum(x, axis=0), np.ones((5, 2)))

    Takes `audit`'s arguments; `mask=` makes it an assertion about any other mask.
    """
    audit(model, example, **arguments).raise_for_leak()


def _order(leak: Leak) -> tuple[bool, bool, int, int]:
    """The example's own pairs of positions come before other conditions, and pairs before lengths, pads and neighbours."""
    return not leak.direct, not leak.paired, leak.query, leak.key


def _notes(context: Context, findings: Sequence[Finding]) -> list[str]:
    notes = []
    longest = max([context.n, *(finding.measured.get("length", 0) for finding in findings)])
    config = getattr(context.adapter.model, "config", None)
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
