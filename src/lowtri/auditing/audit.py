"""`audit`: read the arguments, run every probe under every condition, and report."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.adapter import read_model
from lowtri.auditing.caches import cache
from lowtri.auditing.conditions import KINDS, ConditionKind
from lowtri.auditing.context import Context
from lowtri.auditing.declared import DeclaredMask
from lowtri.auditing.example import read_example
from lowtri.auditing.infer import described_mask
from lowtri.auditing.model_under_test import ModelUnderTest
from lowtri.auditing.neighbours import batch, is_packed, packing, state, state_after
from lowtri.auditing.pads import padding, source
from lowtri.auditing.probe import Leak, Probe, ProbeResult, run_probes
from lowtri.auditing.probes import change, gradient, poison, prefix, sensitivity
from lowtri.auditing.reading import interpreted, read_context
from lowtri.auditing.report import AuditReport
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
    adapter = read_model("audit", model, redraw, seed, layers=layers, length=length)
    started = time.monotonic()
    chosen = _chosen_names("probes", probes, [probe.name for probe in PROBES])
    named = _chosen_names("conditions", conditions, CONDITIONS)
    if "compiled" in (named or ()):
        require('audit: conditions="compiled"', "torch")
    ran = named or ([name for name in CONDITIONS if name != "compiled"] if chosen is None else ["eval"])
    ran += ["longer"] if length and "longer" not in ran else []
    inputs, signature = read_example(example, adapter)
    _check_memory(max(inputs.n, length or 0))
    declared = DeclaredMask.read(mask, layers, inputs.n)
    training = "training" in ran and "eval" not in ran
    tested = ModelUnderTest(adapter.call, signature, adapter, training, seed=seed)
    with ProgressLine("audit", progress) as line, tested.prepared(inputs):
        some = [probe for probe in PROBES if chosen is None or probe.name in chosen]
        fields: dict[str, Any] = {"conditions": tuple(ran), "length": length, "show_progress": line.show}
        if state in some and tested.model is tested.module:
            with contextlib.suppress(Exception):  # not every model can be copied
                fields["fresh_copy"] = copy.deepcopy(tested.model)
        run = _Run(some, *interpreted(read_context(tested, inputs, declared, **fields)))
        context = run.context
        mode = context.mode if {"eval", "training"} & set(ran) else ""
        if context.noise.broken is None:
            run.everything()
        else:
            run.state_alone()
    leaks: dict[tuple[int, int, int], Leak] = {}  # one for each pair, from the first probe that found it
    for leak in (leak for result in run.results for leak in result.leaks):
        leaks.setdefault((leak.query, leak.key, -1 if leak.paired else leak.row), leak)
    undecided = [f"{result.title}: {result.message}" for result in run.results if result.status == "undecided"]
    if all(result.status == "skipped" for result in run.results):
        undecided += ["; ".join(f"{r.title} was requested and did not run: {r.message}" for r in run.results)]
    text = mask if isinstance(mask, str) else declared.text
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
        reason=next(filter(None, (context.noise.broken, *undecided)), None),
        seconds=time.monotonic() - started,
        notes=tuple(run.notes),
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
    audit_in_test(model, example, **arguments).raise_for_leak()


def audit_in_test(model: Any, example: Any, **arguments: Any) -> AuditReport:
    """`audit`, whose errors show the frames of the test and of the model in pytest, and none of lowtri's."""
    __tracebackhide__ = True
    try:
        return audit(model, example, **arguments)
    except CallError as error:
        raise error.with_traceback(None) from error.__cause__


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

    def __init__(self, probes: list[Probe], context: Context, notes: list[str]) -> None:
        self.probes = probes
        self.context = context
        self.notes = notes
        self.results: list[ProbeResult] = []
        self.measured = ""  # the model's mask in words

    def everything(self) -> None:
        """Every probe under every condition."""
        ran, last = self.context.conditions, list[Probe]()
        if {"eval", "training"} & set(ran):
            self._add(run_probes(self.context, [probe for probe in self.probes if probe is state]))
            if self._leaks():
                # Other probes must not take for a leak what an earlier call left behind.
                self.context = replace(self.context, tested=replace(self.context.tested, restoring=True))
            last = [probe for probe in self.probes if probe in (poison, sensitivity)]
            self._add(run_probes(self.context, [probe for probe in self.probes if probe not in (state, *last)]))
            self._describe_mask()
        leaking = {r.probe for r in self.results if r.status == "leak"} & {change.name, gradient.name, prefix.name}
        for kind in KINDS:
            if kind.name not in ran or (kind.name == "training" and "eval" not in ran):
                continue
            if leaking and kind.skipped_after_leak:
                self._add([kind.result("skipped", "not tried, since the model leaks without it")])
            else:
                self._add(kind.run(self.context, self.probes))
        self._add(run_probes(self.context, last))
        self._require_requested()
        if state in self.probes and self.context.fresh_copy is not None and not self._leaks():
            after = state_after(self.context)
            self.results = [r if after is None or r.probe != "state" else after for r in self.results]
        self._advise()
        self._describe_run()

    def state_alone(self) -> None:
        """A model that does not repeat itself may do so by what it keeps between calls."""
        context = self.context
        if context.fresh_copy is not None and not np.isnan(context.base[context.real]).any():
            self.results = [result for result in run_probes(context, [state]) if result.status == "leak"]
        self._describe_run()

    def _add(self, results: list[ProbeResult]) -> None:
        self.results += results
        self.notes += [f"{result.probe}: {result.note}" for result in results if result.note]

    def _leaks(self) -> bool:
        return any(result.leaks for result in self.results)

    def _describe_mask(self) -> None:
        if self.context.depends is not None and self.context.n <= _DESCRIBED:
            with contextlib.suppress(Exception):  # attention that cannot be read, say
                inferred = described_mask(self.context, self.context.depends)
                self.measured = "" if inferred is None else inferred.line

    def _require_requested(self) -> None:
        """What an argument requests and did not run is undecided, never passed over."""
        for probe in PROBES:
            if probe.argument is None or getattr(self.context.tested.adapter, probe.argument) is None:
                continue
            own = [result for result in self.results if result.probe == probe.name and not result.condition]
            if not own:
                self.notes.append(f"{probe.argument}= was not used: probes= leaves {probe.name} out")
            for asked in own:
                # Where the argument is about the source, another probe answers it.
                instead = asked.measured.get("instead")
                result = next((one for one in self.results if one.probe == instead and not one.condition), asked)
                refused = next(iter(result.measured.get("refused", {}).values()), None)
                reason = result.message if result.status == "skipped" else refused
                if reason is not None and result.status != "leak":
                    message = f"{probe.argument}= was requested and did not run: {reason}"
                    undecided = replace(result, status="undecided", message=message)
                    self.results[self.results.index(result)] = undecided
        for kind in KINDS:
            own = [result for result in self.results if result.condition == kind.name]
            if kind.name == "longer" and self.context.length:
                self._require_condition(kind, "length=", _too_short(own, self.context.length))
            if kind.name == "compiled" and kind.name in self.context.conditions and not any(r.probe for r in own):
                reason = own[0].message if own else "probes= leaves out what runs there"
                self._require_condition(kind, 'conditions="compiled"', reason)

    def _require_condition(self, kind: ConditionKind, argument: str, reason: str | None) -> None:
        if reason is not None:
            self.results = [r for r in self.results if r.condition != kind.name or r.probe or r.status != "skipped"]
            self.results.append(kind.result("undecided", f"{argument} was requested and did not run: {reason}"))

    def _advise(self) -> None:
        """Say that transformers keeps documents apart only without a cache."""
        context, signature = self.context, self.context.tested.signature
        said = "use_cache" in context.inputs.settings or "use_cache" in signature.constants
        if said or not self._leaks() or not is_packed(context) or not context.tested.accepts("use_cache"):
            return
        without = context.inputs.having({"use_cache": False})
        with contextlib.suppress(Exception):
            if context.compare(context.tested(without), context.real).status == "leak":
                self.notes.append(
                    "with use_cache=False the outputs are others: transformers reads documents off position_ids only where "
                    "no cache is kept; pass use_cache=False, in training too"
                )

    def _describe_run(self) -> None:
        """Notes on how far the probes could look."""
        context, layers = self.context, self.context.mask.layers
        longest = max([context.n, *(result.under.length or 0 for result in self.results)])
        config = getattr(context.tested.model, "config", None)
        for name in ("sliding_window", "attention_chunk_size", "chunk_size"):
            size = getattr(config, name, None)
            if isinstance(size, int) and size >= longest and not isinstance(size, bool):
                edge = f"the model's {name} of {size}; faults at its edge would not show"
                self.notes.append(f"{longest} positions do not go past {edge}")
        if context.noise.random:
            self.notes.append("the model draws random numbers; every call started from the same seed")
        if layers is not None:
            self.notes.append(f"the mask is one layer's, widened to what {layers} layers reach")
        if context.tested.narrow:
            self.notes.append("wide outputs are compared in 16 sums with random signs; sizes are those of the sums")
        if context.is_large:
            few, fewer = len(context.queries()), len(context.with_fewer_queries().queries())
            stand = f"{few} queries of {context.n} stand for all, {fewer} under other conditions"
            self.notes.append(f"calls are expensive: {stand}")


def _too_short(results: Sequence[ProbeResult], length: int) -> str | None:
    """Why the longer example is not as long as `length=` requests; None where it is, or where it leaks."""
    if any(result.status == "leak" for result in results):
        return None
    ran = [result.under.length for result in results if result.under.length and result.status != "skipped"]
    tried = max([*ran, *(result.measured.get("length", -1) for result in results)], default=-1)
    if tried >= length:
        return None
    skipped = next((result.message for result in results if result.status == "skipped"), "conditions= leaves it out")
    return skipped if tried < 0 else f"the model takes no more than {tried} positions"


def _chosen_names(argument: str, given: Any, known: Sequence[str]) -> list[str] | None:
    """The names that an argument lists, as a text with commas or as a list; None where it was not given."""
    if given is None:
        return None
    one = argument.rstrip("s")
    if not isinstance(given, (str, list, tuple, set)):
        raise CallError(f"audit: {argument}={given!r}, expected a list of names.\nFix: {argument}=[{known[0]!r}], say.")
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
    names = [name for name in names if name != ""]
    if not names:
        raise CallError(
            f"audit: {argument}={given!r} would look at nothing.\nFix: name a {one}, or drop {argument}= to run them all."
        )
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise CallError(
            f"audit: no {one} is called {unknown!r}; there are {', '.join(known)}.\nFix: {argument}={known[0]!r}, say."
        )
    return names


def _check_memory(n: int) -> None:
    """Raise CallError where the table of all pairs of n positions does not fit into memory."""
    try:
        np.empty((n, n), bool)
    except (MemoryError, ValueError):
        raise CallError(
            f"audit: {n:,} positions have {float(n) ** 2:,.0f} pairs, more than this machine's memory can represent.\n"
            "Fix: a shorter example, or a smaller length= (--length)."
        ) from None
