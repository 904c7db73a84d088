"""`audit`: measure the noise, run every probe, let the float64 copy decide what is in doubt, and say where it enters."""

from __future__ import annotations

import copy
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.context import Context
from lowtri.auditing.declared import allowed_pairs, has_token
from lowtri.auditing.finding import Finding, Leak
from lowtri.auditing.inputs import Inputs, read_example
from lowtri.auditing.noise import measure_noise, movement
from lowtri.auditing.probes import PROBES, RESHAPED
from lowtri.auditing.report import AuditReport
from lowtri.auditing.subject import Subject, module_behind
from lowtri.errors import CallError
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
    probes: Sequence[str] | None = None,
    draws: int = 2,
    exact: int = 128,
    seed: int = 0,
    progress: bool | None = None,
) -> AuditReport:
    """Find what a model's outputs depend on, and hold it against the mask.

    >>> import numpy as np
    >>> from lowtri import audit
    >>> x = np.random.default_rng(0).standard_normal((6, 4))
    >>> print(audit(lambda x: np.cumsum(x, axis=0), x).verdict)
    no leak found
    >>> print(audit(lambda x: x - x.mean(axis=0), x).message)
    position 0 sees position 1: changing input 1 moves output 0 by 0.2 (noise 0). (15 pairs in all.)

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
        input: which entries of a tuple or dict example are the sequence.
        position_axis, batch_axis, output_axis: where positions and batch are, when that is not plain.
        alone: how one document runs alone, for the packing probe.
        pad_mask: the keyword that marks real positions (1 = real), for the padding probe.
        train: audit in training mode instead of in eval mode.
        redraw: audit a copy with its weights redrawn (standard deviation 0.15, or the number given), since fresh
            initialisation hides leaks.
        compile: also audit the model under `torch.compile`.
        probes: names of the probes to run; by default all.
        draws: how many random values are put in the place of each input, for each row of the batch.
        exact: up to this length every pair is looked at.
        seed: of every random draw.
        progress: show progress on stderr; by default when it is a terminal.

    Returns:
        AuditReport: `ok`, `leaks` (query, key, size, module), `draw()`, `to_json()`, `save(path)`, `exit_code`.

    Raises:
        CallError: if the example or the answer has no clear axis of positions; the message says which argument tells.
    """
    started = time.monotonic()
    inputs, form = read_example(example, model=model, input=input, position_axis=position_axis, batch_axis=batch_axis)
    chosen = _chosen(probes)
    audited = _redrawn(model, 0.15 if redraw is True else float(redraw), seed) if redraw else model
    subject = Subject(audited, form, output, output_axis, train, seed)
    allowed = allowed_pairs(mask, inputs.n, inputs.batch, layers)
    options = {"step": step, "alone": alone, "pad_mask": pad_mask, "compile": compile}
    with subject.prepared():
        noise = measure_noise(subject, inputs, ~has_token(allowed))
        context = Context(
            subject, inputs, allowed, noise, _vocabulary(model, inputs, vocab_size), draws, exact, seed,
            _progress(progress, started), options,
        )  # fmt: skip
        findings: list[Finding] = []
        notes: list[str] = []
        if noise.broken is None:
            findings, notes = _run(context, chosen)
    leaks: dict[tuple[int, int], Leak] = {}
    for leak in (leak for finding in findings for leak in finding.leaks):
        leaks.setdefault((leak.query, leak.key), leak)  # one for each pair, from the first probe that found it
    undecided = [f"{finding.probe}: {finding.message}" for finding in findings if finding.status == "undecided"]
    return AuditReport(
        model=_name(model),
        mask=_mask_text(mask, layers),
        n=inputs.n,
        batch=inputs.batch,
        noise=noise,
        findings=tuple(findings),
        leaks=tuple(sorted(leaks.values(), key=_order)),
        allowed=np.asarray(allowed.any(axis=0)),
        seen=context.seen,
        reason=noise.broken or (undecided[0] if undecided else None),
        seconds=time.monotonic() - started,
        notes=tuple(notes + _notes(context, layers)),
    )


def assert_causal(model: Any, example: Any, **arguments: Any) -> None:
    """For tests: raise LeakError naming the first leaking pair, UndecidedError when nothing can be said.

    >>> import numpy as np
    >>> from lowtri import assert_causal
    >>> assert_causal(lambda x: np.cumsum(x, axis=0), np.ones((5, 2)))

    Takes `audit`'s arguments; `mask=` makes it an assertion about any other mask.
    """
    audit(model, example, **arguments).raise_for_leak()


def _run(context: Context, chosen: list[str]) -> tuple[list[Finding], list[str]]:
    """Every probe; those in doubt again on the float64 copy."""
    findings, notes = [], []
    twin = _Twin(context)
    for name in chosen:
        finding = PROBES[name](context)
        asked = context
        if finding.status == "doubt" or (finding.status == "leak" and name in RESHAPED):
            finding, asked, note = twin.decide(name, finding)
            if note:
                notes.append(note)
        findings.append(_with_module(asked, finding))
    return findings, notes


class _Twin:
    """The float64 copy, made when the first finding needs it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.copy: Context | None = None
        self.why_not: str | None = None

    def decide(self, name: str, finding: Finding) -> tuple[Finding, Context, str]:
        """The probe's answer in float64, or an honest one without it."""
        copy_ = self._made()
        if copy_ is None:
            return self._without(name, finding)
        second = PROBES[name](copy_)
        size = finding.measured.get("greatest", 0.0)
        if second.status == "skipped":
            self.why_not = self.why_not or second.message
            return self._without(name, finding)
        if second.status == "clean":
            return (
                second,
                self.context,
                f"{name}: up to {size:.2g} in the model's precision vanishes in float64: rounding",
            )
        if second.status in ("doubt", "undecided"):
            left = second.measured.get("greatest", 0.0)
            # In float64 rounding is some 1e-15; what shrank with the precision is noise that the copy still rounds.
            if left < size / 30:
                text = f"nothing beyond rounding ({size:.2g} in the model's precision, {left:.2g} in float64)"
                return dataclasses.replace(second, status="clean", message=text, leaks=()), self.context, ""
            return dataclasses.replace(second, status="undecided", leaks=()), copy_, ""
        return second, copy_, f"{name}: confirmed in float64"

    def _without(self, name: str, finding: Finding) -> tuple[Finding, Context, str]:
        if finding.status == "leak" and not (name in RESHAPED and self.context.discrete_output):
            return finding, self.context, ""
        if (
            finding.status == "doubt"
            and self.context.noise.eps <= np.finfo(np.float64).eps
            and not self.context.discrete_output
        ):
            size = finding.measured.get("greatest", 0.0)
            text = f"nothing beyond the rounding of float64 ({size:.2g})"
            return dataclasses.replace(finding, status="clean", message=text, leaks=()), self.context, ""
        reason = f"{finding.message}, near the noise, and no float64 copy could settle it ({self.why_not})"
        return dataclasses.replace(finding, status="undecided", message=reason, leaks=()), self.context, ""

    def _made(self) -> Context | None:
        if self.copy is not None or self.why_not is not None:
            return self.copy
        context = self.context
        if context.subject.form.dtypes[0] in (np.dtype(np.float64),):
            self.why_not = "it is float64 already"
            return None
        try:
            made = context.twin()
            apart, scale = float(np.nanmax(movement(context.base, made.base))), max(context.noise.magnitude, 1e-30)
        except Exception as error:
            self.why_not = (str(error).strip().splitlines() or [type(error).__name__])[0][:100]
            return None
        if made.base.dtype.kind != "f" or made.noise.broken:
            self.why_not = made.noise.broken or "its output is not made of floats"
        elif apart > 0.05 * scale:
            self.why_not = f"the copy answers differently, by {apart:.2g}"
        else:
            self.copy = made
        return self.copy


def _with_module(context: Context, finding: Finding) -> Finding:
    """Name the module where each leak enters, from the probe's witness or from a change of the key."""
    if not finding.leaks or context.subject.module is None:
        return finding
    from lowtri.auditing.where import locate

    first = finding.leaks[0]
    before, after, row = finding.witness or (context.inputs, None, first.row)
    if after is None or finding.probe == "change":
        after = context.inputs.change(np.arange(context.n) == first.key, context.fresh(0))
        row = first.row
    if finding.probe not in ("change", "gradient", "prefix"):
        return finding
    try:
        name = locate(context.subject, before, after, row, first.query)
        if name is None and finding.witness is not None:
            name = locate(context.subject, finding.witness[0], finding.witness[1], finding.witness[2], first.query)
    except Exception:
        name = None
    if name is None:
        return finding
    return dataclasses.replace(finding, leaks=tuple(leak.at(name) for leak in finding.leaks))


def _order(leak: Leak) -> tuple[bool, int, int]:
    """Pairs of positions come before lengths, pads, neighbours and caches."""
    return leak.probe not in ("change", "gradient"), leak.query, leak.key


def _chosen(probes: Sequence[str] | None) -> list[str]:
    unknown = [name for name in probes or () if name not in PROBES]
    if unknown:
        raise CallError(f"audit: no probe is called {unknown[0]!r}; there are {', '.join(PROBES)}.")
    return [name for name in PROBES if probes is None or name in probes]


def _redrawn(model: Any, std: float, seed: int) -> Any:
    """A copy whose matrices are drawn anew; vectors (norms, biases) stay."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise CallError(f"audit: redraw= needs a torch module, got {type(model).__name__}.\nFix: drop redraw=.")
    redrawn = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in redrawn.parameters():
            if parameter.dim() >= 2 and parameter.is_floating_point():
                fresh = torch.randn(parameter.shape, generator=generator) * std
                parameter.copy_(fresh.to(parameter))
    return redrawn


def _vocabulary(model: Any, inputs: Inputs, asked: int | None) -> npt.NDArray[np.int64]:
    """The ids to draw from."""
    present = np.unique(inputs.sequences[0]).astype(np.int64) if inputs.discrete else np.zeros(2, np.int64)
    size = asked
    if size is None and inputs.discrete:
        module = module_behind(model)
        config = getattr(module, "config", None)
        size = getattr(config, "vocab_size", None)
        if not isinstance(size, int) and module is not None:
            tables = [part.num_embeddings for part in module.modules() if hasattr(part, "num_embeddings")]
            size = tables[0] if tables else None
    if isinstance(size, int):
        if size < 2:
            raise CallError(f"audit: vocab_size={size}, expected at least 2.")
        return np.arange(size)
    if inputs.discrete and len(present) < 2:
        raise CallError(
            "audit: the example repeats one id, and how many ids there are is not known.\nFix: say vocab_size=."
        )
    return present


def _progress(asked: bool | None, started: float) -> Callable[[str, int, int], None]:
    """A line on stderr once an audit takes more than two seconds."""
    show = sys.stderr.isatty() if asked is None else asked
    last = [started + 2.0]

    def tick(probe: str, done: int, of: int) -> None:
        now = time.monotonic()
        if show and now > last[0]:
            last[0] = now + 0.2
            sys.stderr.write(f"\raudit: {probe} {done} of {of}, {now - started:.0f} s\x1b[K")
            if done >= of:
                sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    return tick


def _notes(context: Context, layers: int | None) -> list[str]:
    notes = []
    config = getattr(context.subject.model, "config", None)
    for name in ("sliding_window", "attention_chunk_size", "chunk_size"):
        size = getattr(config, name, None)
        if isinstance(size, int) and size >= context.n and not isinstance(size, bool):
            notes.append(
                f"{context.n} positions do not go past the model's {name} of {size}; faults at its edge would not show"
            )
    if context.noise.random:
        notes.append("the model draws random numbers; every call was seeded alike")
    if layers is not None:
        notes.append(f"the mask is one layer's, widened to what {layers} layers reach")
    return notes


def _name(model: Any) -> str:
    return getattr(model, "__name__", None) or type(model).__name__


def _mask_text(mask: Any, layers: int | None) -> str:
    text = (
        f"a table of {mask.shape}"
        if isinstance(mask, np.ndarray)
        else str(mask if isinstance(mask, str) else repr(mask))
    )
    return text if layers is None else f"{text} x {layers} layers"
