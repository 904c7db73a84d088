"""`audit`: read the arguments, run every probe under every condition, and report."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.adapter import as_model
from lowtri.auditing.arguments import check_arguments, redrawn
from lowtri.auditing.caches import cache, is_packed
from lowtri.auditing.conditions import KINDS, too_short
from lowtri.auditing.context import FEW, Context, Options, vocabulary
from lowtri.auditing.declared import DeclaredMask, own_positions
from lowtri.auditing.example import Inputs, maybe_array, read_example
from lowtri.auditing.infer import described_mask
from lowtri.auditing.model_under_test import WIDE, ModelUnderTest, check_axes
from lowtri.auditing.neighbours import batch, packing
from lowtri.auditing.pads import padding, real_positions, source
from lowtri.auditing.probe import (
    Leak,
    Probe,
    ProbeResult,
    chosen_names,
    nothing_ran,
    require_requested,
    run_probes,
)
from lowtri.auditing.probes import change, gradient, poison, prefix, sensitivity
from lowtri.auditing.report import AuditReport
from lowtri.auditing.separators import separator
from lowtri.auditing.state import state, state_after
from lowtri.errors import CallError
from lowtri.extras import require
from lowtri.masks import Mask, causal
from lowtri.progress import ProgressLine

PROBES: tuple[Probe, ...] = (  # in the order in which they run
    state,
    change,
    gradient,
    prefix,
    batch,
    padding,
    source,
    packing,
    cache,
    poison,
    sensitivity,
)
_DESCRIBED = 96  # positions up to which the report begins with the model's mask
CONDITIONS = ("eval", *(kind.name for kind in KINDS))


def audit(
    model: Any,
    example: Any,
    *,
    mask: Mask | str | npt.NDArray[np.bool_] = causal(),  # noqa: B008 (a mask is a frozen formula)
    layers: int | None = None,
    probes: str | Sequence[str] | None = None,
    conditions: str | Sequence[str] | None = None,
    length: int | None = None,
    redraw: bool | float = False,
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
            with one row for each position; a :class:`lowtri.Model` says what cannot be found out by itself: how it decodes,
            which tensor is its answer. It is run unmodified, and everything that it keeps is put back.
        example: ids (N,) or (B, N); vectors (N, D), (B, N, D) or (B, H, N, D); or a tuple of arguments or dict of keywords.
            N should exceed the model's windows, chunks and capacities, since faults occur at their edges.
        mask: which inputs an output of the whole model may depend on; a Mask, its text, or a bool table (N, N), True = may see.
        layers: states that the mask is that of one layer; it is widened to the inputs that this many layers can reach.
        probes: which probes run, as a list or a text with commas; by default all.
        conditions: under which conditions, as a list or a text with commas: "eval" (the example as it is), "training",
            "code_paths" (weights returned, other implementations of attention), "longer" (a longer example), "compiled"
            (under `torch.compile`). By default all but "compiled"; where `probes` are named, "eval" alone.
        length: the number of positions of the longer example, which is the example followed by random inputs; by default 256
            or twice the example's, fewer if the model accepts fewer. 0 omits the longer example.
        redraw: audit a copy with its weights redrawn (standard deviation 0.15, or the number given), since fresh
            initialisation hides leaks.
        seed: the seed of every random draw.
        progress: whether to show progress on stderr; by default only if stderr is a terminal.

    Returns:
        AuditReport: `ok`, `leaks` (query, key, size, module), `draw()`, `to_json()`, `save(path)`, `exit_code`.

    Raises:
        CallError: if an argument cannot be used, or the example or the output has no clear axis of positions; the message
            names the argument to set. If a check requested by `step`, `alone` or `pads` of a `Model`, by
            `conditions="compiled"` or by `length` cannot be run, the audit does not raise: it is undecided, and the report
            gives the reason.
    """
    adapter = as_model(model)
    check_arguments("audit", adapter, {"layers": layers, "length": length, "redraw": redraw, "seed": seed})
    started = time.monotonic()
    chosen = chosen_names("probes", probes, [probe.name for probe in PROBES])
    named = chosen_names("conditions", conditions, CONDITIONS)
    if "compiled" in (named or ()):
        require('audit: conditions="compiled"', "torch")
    ran = named or ([name for name in CONDITIONS if name != "compiled"] if chosen is None else ["eval"])
    ran += ["longer"] if length and "longer" not in ran else []
    adapter = replace(adapter, call=redrawn(adapter.call, redraw, seed))
    inputs, signature = read_example(example, adapter)
    _check_memory(max(inputs.n, length or 0))
    declared = DeclaredMask.read(mask, layers, inputs.n)
    options = Options(adapter, declared, tuple(ran), length, seed)
    training = "training" in ran and "eval" not in ran
    parts = tuple(part for part in (adapter.step, adapter.prefill, adapter.alone) if part is not None)
    tested = ModelUnderTest(adapter.call, signature, adapter, training, seed=seed, parts=parts)
    with ProgressLine("audit", progress) as line, tested.prepared(inputs):
        run = _Run(options, [probe for probe in PROBES if chosen is None or probe.name in chosen], line.show)
        context = run.prepare(tested, inputs)
        mode = context.mode if {"eval", "training"} & set(ran) else ""
        if context.noise.broken is None:
            run.everything(context)
        else:
            run.state_alone(context)
    leaks: dict[tuple[int, int, int], Leak] = {}  # one for each pair, from the first probe that found it
    for leak in (leak for result in run.results for leak in result.leaks):
        leaks.setdefault((leak.query, leak.key, -1 if leak.paired else leak.row), leak)
    undecided = [f"{result.title}: {result.message}" for result in run.results if result.status == "undecided"]
    text = mask if isinstance(mask, str) else f"a table of {mask.shape}" if isinstance(mask, np.ndarray) else repr(mask)
    return AuditReport(
        model=adapter.name,
        mask=text if layers is None else f"{text} x {layers} layers",
        n=inputs.n,
        batch=inputs.batch,
        noise=context.noise,
        findings=tuple(run.results),
        measured_mask=run.measured,
        # The example's own pairs of positions come before other conditions, and pairs before lengths, pads and neighbours.
        leaks=tuple(sorted(leaks.values(), key=lambda k: (not k.direct, not k.paired, k.query, k.key))),
        allowed=np.asarray(context.allowed.any(axis=0)),
        seen=context.seen,
        reason=context.noise.broken or (undecided[0] if undecided else nothing_ran(run.results)),
        seconds=time.monotonic() - started,
        notes=tuple(run.notes + _notes(context, run.results)),
        modes=(mode,) if mode else (),
    )


def assert_causal(model: Any, example: Any, **arguments: Any) -> None:
    """For tests: raise LeakError with the first leaking pair, or UndecidedError if the audit could not decide.

    >>> import numpy as np
    >>> from lowtri import assert_causal
    >>> assert_causal(lambda x: np.cumsum(x, axis=0), np.ones((5, 2)))

    Takes the arguments of `audit`; with `mask=` it asserts any other mask.
    """
    __tracebackhide__ = True
    audit(model, example, **arguments).raise_for_leak()


def probe_table() -> str:
    """The probes and the conditions as the Markdown tables of docs/audit.md."""
    lines = ["| probe | what it does | what it finds | what it needs |", "|---|---|---|---|"]
    lines += [f"| {p.name} | {p.does} | {p.finds} | {p.needs} |" for p in PROBES]
    lines += ["", "| condition | what it is | what it finds | probes |", "|---|---|---|---|"]
    lines += ["| eval | the example as it is | leaks that are always there | all |"]
    lines += [f"| {k.name} | {k.does} | {k.finds} | {', '.join(p.name for p in k.probes)} |" for k in KINDS]
    return "\n".join(lines)


class _Run:
    """The product of probes and conditions for one audit, and what it found."""

    def __init__(self, options: Options, probes: list[Probe], show: Callable[[str], None]) -> None:
        self.options, self.probes, self.show = options, probes, show
        self.results: list[ProbeResult] = []
        self.notes: list[str] = []
        self.measured = ""  # the model's mask in words

    def prepare(self, tested: ModelUnderTest, inputs: Inputs) -> Context:
        """What the probes work on: the example's pads, positions and documents, read off it and the mask."""
        adapter, mask, seed = self.options.adapter, self.options.mask, self.options.seed
        prefix_ = tested.signature.prefix
        real = real_positions(inputs, prefix_, adapter.pads) & ~mask.pads(inputs.n)
        fresh_copy = None
        if state in self.probes and tested.model is tested.module:
            with contextlib.suppress(Exception):  # not every model can be copied
                fresh_copy = copy.deepcopy(tested.model)
        table = mask.pairs(inputs.n, inputs.batch)
        ids = vocabulary(tested, inputs)
        context = Context(tested, inputs, table, real, self.options, ids, self.show, fresh_copy=fresh_copy)
        if context.is_large:
            context = replace(context, chosen=tuple(context.sample(FEW)))
        rows = context.on_example(lambda: context.base)
        if rows.shape[-1] > WIDE and rows.dtype.kind == "f" and np.isfinite(rows).all():
            context = replace(context, tested=replace(tested, narrow=True))
        noise = context.on_example(lambda: context.noise)
        if adapter.axes is None:
            check_axes(tested, inputs, seed)
        if noise.broken is None:
            context = self._with_constants(context)
            context = self._from_own_positions(context, own_positions(inputs, real, f"{prefix_}position_ids"))
            token = separator(context)
            if token is not None:
                context = replace(context, separator=token)
                self.notes.append(f"documents end at token {token}: it is neither changed nor drawn")
        return context

    def everything(self, context: Context) -> None:
        """Every probe under every condition."""
        ran, options = self.options.conditions, self.options
        if {"eval", "training"} & set(ran):
            first, rest = [p for p in self.probes if p is state], [p for p in self.probes if p is not state]
            self._add(run_probes(context, first))
            if any(result.leaks for result in self.results):
                # Other probes must not take for a leak what an earlier call left behind.
                context = replace(context, tested=replace(context.tested, restoring=True))
            last = [probe for probe in rest if probe in (poison, sensitivity)]
            self._add(run_probes(context, [probe for probe in rest if probe not in last]))
            if context.depends is not None and context.n <= _DESCRIBED:
                with contextlib.suppress(Exception):  # attention that cannot be read, say
                    inferred = described_mask(context, context.depends)
                    self.measured = "" if inferred is None else inferred.line
        else:
            last = []
        for kind in KINDS:
            if kind.name not in ran or (kind.name == "training" and "eval" not in ran):
                continue
            if any(r.status == "leak" and not r.condition and r.probe in kind.skipped_after for r in self.results):
                why = "not tried, since the model leaks without it"
                self.results.append(ProbeResult("skipped", why, condition=kind.name))
                continue
            self._add(kind.run(context, self.probes))
        self._add(run_probes(context, last))
        results, unused = require_requested(self.results, PROBES, vars(options.adapter))
        self.results = results
        self.notes += unused
        self._require_conditions()
        if state in self.probes and context.fresh_copy is not None and not any(r.leaks for r in self.results):
            after = state_after(context)
            self.results = [r if after is None or r.probe != "state" else after for r in self.results]
        self._advise(context)

    def state_alone(self, context: Context) -> None:
        """A model that does not repeat itself may do so by what it keeps between calls."""
        if context.fresh_copy is not None and not np.isnan(context.base[context.real]).any():
            self.results = [r for r in run_probes(context, [state])[0] if r.status == "leak"]

    def _add(self, found: tuple[list[ProbeResult], list[str]]) -> None:
        self.results += found[0]
        self.notes += found[1]

    def _require_conditions(self) -> None:
        """A condition that an argument requests and that did not run is undecided, never passed over."""
        length, ran = self.options.length, self.options.conditions
        reasons = {}
        if length:
            reasons["longer"] = too_short(self.results, length)
        if "compiled" in ran and not any(r.condition == "compiled" and r.probe for r in self.results):
            skipped = (r.message for r in self.results if r.condition == "compiled")
            reasons["compiled"] = next(skipped, "probes= leaves out what runs there")
        argument = {"longer": "length=", "compiled": 'conditions="compiled"'}
        for name, reason in reasons.items():
            if reason is None:
                continue
            message = f"{argument[name]} was requested and did not run: {reason}"
            self.results = [r for r in self.results if r.condition != name or r.probe or r.status != "skipped"]
            self.results.append(ProbeResult("undecided", message, condition=name))

    def _with_constants(self, context: Context) -> Context:
        """An array (B,) that the model does not take row by row is a constant."""
        inputs, tested = context.inputs, context.tested
        vectors = {key: value for key, value in inputs.per_row.items() if _is_vector(value)}
        if not vectors:
            return context
        others = replace(inputs, per_row={k: v for k, v in inputs.per_row.items() if k not in vectors})
        constants = {**tested.signature.constants, **vectors}
        fixed = replace(tested, signature=replace(tested.signature, constants=constants))
        some = [0] if inputs.batch > 1 else [0, 0]
        try:
            tested(inputs.rows(some))
        except Exception:
            with contextlib.suppress(Exception):
                fixed(others.rows(some))
                return replace(context, tested=fixed, inputs=others)
        return context

    def _from_own_positions(self, context: Context, positions: Any) -> Context:
        """Where rows begin later, a mask of chunks, say, may be meant from the first column or from each row's first token.

        The reading that agrees with the model is taken.
        """
        mask, inputs = self.options.mask, context.inputs
        if positions is None or mask.is_relative:
            return context
        own = mask.pairs(context.n, inputs.batch, positions)
        if (own == context.declared)[
            np.broadcast_to(context.real[:, None] & context.real[:, :, None], own.shape)
        ].all():
            return context
        readings = [context, replace(context, declared=own)]
        wrong = [0, 0]
        fresh = context.fresh(0)
        for key in range(context.n):
            where = np.arange(context.n) == key
            after = context.run(inputs.change(where, fresh)).output
            for number, reading in enumerate(readings):
                moved = context.compare(after, reading.independent_of(where), same_order=True)
                wrong[number] += int((moved.sizes > 0).sum())
        if wrong[0] == 0 or wrong[1] >= wrong[0]:
            return context
        self.notes.append("the mask is read from each row's first token, as the model counts its positions")
        return readings[1]

    def _advise(self, context: Context) -> None:
        """Say that transformers keeps documents apart only without a cache."""
        leaks = any(result.leaks for result in self.results)
        if not leaks or not is_packed(context) or "use_cache" in context.inputs.settings:
            return
        if "use_cache" in context.tested.signature.constants or not context.tested.accepts("use_cache"):
            return
        without = context.inputs.having({"use_cache": False})
        with contextlib.suppress(Exception):
            apart = context.compare(context.tested(without), ~context.ignored)
            if apart.status == "leak":
                self.notes.append(
                    "with use_cache=False the outputs are others: transformers reads documents off position_ids only where "
                    "no cache is kept; pass use_cache=False, in training too"
                )


def _is_vector(value: Any) -> bool:
    array = maybe_array(value)
    return isinstance(value, list) or (array is not None and array.ndim == 1)


def _notes(context: Context, findings: Sequence[ProbeResult]) -> list[str]:
    notes = []
    longest = max([context.n, *(result.length or 0 for result in findings)])
    config = getattr(context.tested.model, "config", None)
    for name in ("sliding_window", "attention_chunk_size", "chunk_size"):
        size = getattr(config, name, None)
        if isinstance(size, int) and size >= longest and not isinstance(size, bool):
            notes.append(
                f"{longest} positions do not go past the model's {name} of {size}; faults at its edge would not show"
            )
    if context.noise.random:
        notes.append("the model draws random numbers; every call started from the same seed")
    if context.options.mask.layers is not None:
        notes.append(f"the mask is one layer's, widened to what {context.options.mask.layers} layers reach")
    if context.tested.narrow:
        notes.append("wide outputs are compared in 16 sums with random signs; sizes are those of the sums")
    if context.is_large:
        few, fewer = len(context.queries()), len(context.with_fewer_queries().queries())
        notes.append(f"calls are expensive: {few} queries of {context.n} stand for all, {fewer} under other conditions")
    return notes


def _check_memory(n: int) -> None:
    """Raise CallError where the table of all pairs of n positions does not fit into memory."""
    try:
        np.empty((n, n), bool)
    except (MemoryError, ValueError):
        raise CallError(
            f"audit: {n:,} positions have {float(n) ** 2:,.0f} pairs, more than this machine's memory can represent.\n"
            "Fix: a shorter example, or a smaller length= (--length)."
        ) from None
