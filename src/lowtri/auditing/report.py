"""The verdict of an audit: text with the message first, a drawing of the pairs, JSON, HTML, and an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lowtri.auditing.context import Noise
from lowtri.auditing.probe import Leak, ProbeResult
from lowtri.errors import LeakError, UndecidedError
from lowtri.pictures.files import save_picture
from lowtri.pictures.grids import Grid, Look, Panel, picture, used
from lowtri.pictures.labels import shortened, spelled_out
from lowtri.pictures.pages import TABLE_STYLE, html_table, html_text, image, json_text, output, page
from lowtri.pictures.svg import HIDDEN, OUTLINED, fill

_LOOKS = (
    Look("█", fill("visible"), "declared and seen"),
    Look("○", OUTLINED, "declared, never seen"),
    Look("▒", fill("partly"), "declared, not looked at"),
    Look("·", HIDDEN, "hidden"),
    Look("✗", fill("leak"), "leak"),
)
_SEEN = 0  # indexes of _LOOKS
_UNSEEN = 1
_NOT_LOOKED_AT = 2
_HIDDEN = 3
_LEAK = 4
_WIDE = 290  # of the cells in SVG: letters can still be read on a telephone


def cells(
    allowed: npt.NDArray[np.bool_], seen: npt.NDArray[np.float64], leaks: Sequence[tuple[int, int]], most: int
) -> npt.NDArray[np.int64]:
    """The look of each pair of a query and a key, or of each square block of them, where there are more than `most` positions."""
    n = len(allowed)
    leaking = np.zeros((n, n), bool)
    for query, key in leaks:
        if query < n and key < n:
            leaking[query, key] = True
    side = -(-n // most)

    def look(q: int, k: int) -> int:
        block = np.s_[q : q + side, k : k + side]
        looked = seen[block][allowed[block]]
        if leaking[block].any():
            return _LEAK
        if not looked.size:
            return _HIDDEN
        if np.isnan(looked).all():
            return _NOT_LOOKED_AT
        return _SEEN if np.nan_to_num(looked).max() > 0 else _UNSEEN

    return np.array([[look(q, k) for k in range(0, n, side)] for q in range(0, n, side)])


def draw_text(drawn: npt.NDArray[np.int64], n: int) -> str:
    """The drawing with its legend; queries go down, keys go right."""
    step = -(-n // len(drawn))
    scale = f"   (each sign stands for {step} x {step} pairs)" if step > 1 else ""
    meanings = [f"{look.sign} {look.meaning}" for look in used(_LOOKS, drawn)]
    return "\n".join([*("  " + line for line in Grid(drawn, _LOOKS).lines()), "  " + "   ".join(meanings) + scale])


def draw_svg(drawn: npt.NDArray[np.int64], n: int) -> str:
    """The drawing with its axes and a legend in the colours that it uses, as SVG."""
    size, step = min(24.0, _WIDE / len(drawn)), -(-n // len(drawn))

    def hover(q: int, k: int, count: int) -> str:
        keys = _span("key", "keys", k, count, step, n)
        return f"{_span('query', 'queries', q, 1, step, n)}, {keys}: {_LOOKS[drawn[q, k]].meaning}"

    grid = Grid(drawn, _LOOKS, size, size, ends=("0", f"{n - 1:,}"), hover=hover)
    note = [f"a cell: {step:,} x {step:,} pairs"] if step > 1 else []
    return picture("who sees whom: queries down, keys across", [Panel([grid])], used(_LOOKS, drawn), note, wide=_WIDE)


def _span(one: str, several: str, first: int, count: int, step: int, n: int) -> str:
    """Which positions some cells stand for: "query 3", "keys 8 to 15"."""
    start, last = first * step, min((first + count) * step, n) - 1
    return f"{one} {start}" if start == last else f"{several} {start} to {last}"


# Style and exit code.
_VERDICTS = {"no leak found": ("clean", 0), "leak": ("leak", 1), "could not decide": ("undecided", 3)}
_SERIOUS = ("leak", "undecided", "doubt", "warning", "clean", "skipped")
_STYLE = f"""{TABLE_STYLE}:root h1::first-letter {{ text-transform: uppercase }}
:root .lead {{ font-size: var(--s3); line-height: 1.5; color: var(--soft) }} :root .figure svg {{ max-width: 100%; height: auto }}
:root .leak {{ color: var(--bad) }} :root .clean {{ color: var(--good) }} :root .undecided {{ color: var(--unsure) }}
"""


@dataclass(frozen=True, repr=False)
class AuditReport:
    """The result of an audit.

    `ok` is true if the audit decided and found no leak; `decided` is false if the audit could not decide. `first` is the first
    leak, or None.

    Attributes:
        model: the model's class, or its name.
        mask: the mask that the model was audited against, as text.
        n, batch: positions and rows of the example.
        noise: how far outputs moved when nothing that matters changed; thresholds follow from it.
        findings: the result of each probe.
        leaks: pairs of positions that the mask hides and an output depends on, sorted by query and key.
        allowed: (1 or B, N, N), the pairs that the mask shows.
        seen: (N, N), how far each output moved with each input; NaN where this was not tried.
        reason: why the audit could not decide, or None.
        seconds: how long the audit took.
        notes: remarks that do not change the verdict.
        modes: the modes (eval, training) of a torch module in which every probe ran.
        measured_mask: the mask that the model was measured to have, as `infer_mask` says it; empty where not every pair was tried.
    """

    model: str
    mask: str
    n: int
    batch: int
    noise: Noise
    findings: tuple[ProbeResult, ...]
    leaks: tuple[Leak, ...]
    allowed: npt.NDArray[np.bool_]
    seen: npt.NDArray[np.float64]
    reason: str | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())
    modes: tuple[str, ...] = ()
    measured_mask: str = ""

    @property
    def verdict(self) -> str:
        """`leak`, `could not decide` or `no leak found`."""
        if self.leaks:
            return "leak"
        return "no leak found" if self.reason is None else "could not decide"

    @property
    def ok(self) -> bool:
        return self.verdict == "no leak found"

    @property
    def decided(self) -> bool:
        return self.verdict != "could not decide"

    @property
    def first(self) -> Leak | None:
        return self.leaks[0] if self.leaks else None

    @property
    def warnings(self) -> tuple[ProbeResult, ...]:
        return tuple(finding for finding in self.findings if finding.status == "warning")

    @property
    def exit_code(self) -> int:
        """0: no leak found, 1: a leak, 3: could not decide."""
        return _VERDICTS[self.verdict][1]

    def finding(self, name: str, condition: str = "") -> ProbeResult:
        """The result of a probe under a condition; of a condition's name alone, its most serious result."""
        some = [f for f in self.findings if (f.probe, f.condition) == (name, condition)]
        some = some or [f for f in self.findings if f.condition == name]
        return min(some, key=lambda f: _SERIOUS.index(f.status))

    @property
    def message(self) -> str:
        """The verdict, the mask that it refers to, and the evidence that it rests on, in one line."""
        return spelled_out(f"{self.verdict} against {shortened(self.mask, 80)}: {self._what}")

    @property
    def _what(self) -> str:
        if self.leaks:
            first = self.leaks[0]
            alike = [leak for leak in self.leaks if _kind(leak) == _kind(first)]
            return self._sentence(first) + (f" ({len(alike)} pairs in all.)" if len(alike) > 1 else "")
        return f"{self._extent if self.reason is None else self.reason}."

    def _sentence(self, leak: Leak) -> str:
        return leak.sentence(max(self.noise.repeat, self.noise.reorder))

    def raise_for_leak(self) -> None:
        """Raise LeakError for a leak, UndecidedError if the audit could not decide; otherwise return.

        pytest shows the sentence, the drawing and the frames of the test, and none of lowtri's.
        """
        __tracebackhide__ = True
        if self.leaks:
            what = f"{self.model} sees what {shortened(self.mask, 80)} hides: {self._what}"
            raise LeakError(f"{spelled_out(what)}\n{self.draw()}")
        if self.reason is not None:
            fix = "make the model repeat itself (eval mode, fixed seeds), or audit it with float64 weights"
            if " requested and " in self.reason:
                fix = "correct the argument that requests it, or drop it"
            raise UndecidedError(f"audit: {spelled_out(self.model)}: {self.message}\nFix: {fix}.")

    def draw(self, most: int = 48) -> str:
        """Declared, seen and leaking pairs as text, at most `most` characters wide."""
        return draw_text(self._cells(most), self.n)

    def to_json(self) -> str:
        """Everything that was measured, as JSON."""
        noise = {name: getattr(self.noise, name) for name in ("repeat", "reorder", "magnitude")}
        leaks = [
            {name: getattr(leak, name) for name in ("query", "key", "size", "probe", "condition", "row", "module")}
            | {"message": self._sentence(leak)}
            for leak in self.leaks
        ]
        findings = [
            {name: getattr(finding, name) for name in ("probe", "condition", "status", "message", "measured")}
            | {"leaks": len(finding.leaks)}
            for finding in self.findings
        ]
        names = ("measured_mask", "verdict", "ok", "message", "model", "mask", "batch", "notes", "exit_code")
        measured = {"positions": self.n, "noise": noise, "leaks": leaks, "findings": findings}
        return json_text({name: getattr(self, name) for name in names} | measured | {"seconds": round(self.seconds, 3)})

    def to_html(self) -> str:
        """The report as one self-contained HTML page with the drawing."""
        return page("audit", "lowtri audit", self._parts(self.to_svg()), _STYLE)

    def to_svg(self) -> str:
        """The drawing alone, as SVG."""
        return draw_svg(self._cells(64), self.n)

    def _repr_html_(self) -> str:
        return output("audit", self._parts(image(self.to_svg(), self.draw())), _STYLE)

    _repr_svg_ = to_svg

    def _parts(self, picture: str) -> list[str]:
        rows = [(finding.title, finding.status, finding.message) for finding in self.findings]
        return [
            f'<h1 class="{_VERDICTS[self.verdict][0]}">{html_text(self.verdict)}</h1>',
            f'<p class="lead">{html_text(self.message)}</p>',
            *([f"<p>measured mask: <code>{html_text(self.measured_mask)}</code></p>"] if self.measured_mask else []),
            f"<p>{html_text(self.model)} against <code>{html_text(self.mask)}</code></p>",
            f'<section class="figure">{picture}</section>',
            f'<section class="figure scroll">{html_table(("probe", "result", "measured"), rows)}</section>',
            *(f"<p>{html_text(note)}</p>" for note in self.notes),
        ]

    def save(self, path: str | Path) -> Path:
        """Write the report as `.html`, `.json` or `.txt`, or its drawing as `.svg`, `.png` or `.pdf`, atomically.

        Raises:
            DataError: if the ending is another one, or the file cannot be written.
        """
        forms = {".html": self.to_html, ".json": self.to_json, ".txt": self.__str__, ".svg": self.to_svg}
        return save_picture(path, forms)

    def __repr__(self) -> str:
        return f"<AuditReport {self.message}>"

    def __str__(self) -> str:
        width = max((len(finding.title) for finding in self.findings), default=0)
        header = spelled_out(f"{self.model} against {self.mask}, {self.batch} x {self.n} positions")
        first = [spelled_out(f"measured mask: {self.measured_mask}")] if self.measured_mask else []
        lines = [*first, self.message, "", header, self.draw()]
        lines += [spelled_out(f"  {f.title:<{width}}  {f.status:<9}  {f.message}") for f in self.findings]
        lines += [spelled_out(f"  note: {note}") for note in self.notes]
        noise = f"the same input twice {self.noise.repeat:.1g}, reordered sums {self.noise.reorder:.1g}"
        return "\n".join([*lines, f"  noise: {noise}"])

    @property
    def _extent(self) -> str:
        drew = next((f.measured for f in self.findings if "draws" in f.measured), None)
        ran = [f for f in self.findings if f.status not in ("skipped", "undecided")]
        looked = "" if drew is None else f", {drew['draws']} draws"
        if drew is not None and not drew["every_pair"]:
            looked += f", {drew['keys']} keys and {drew['queries']} queries looked at"
        trained = any(f.under.training or f.condition == "training" for f in ran)
        modes = dict.fromkeys([*self.modes, *(["training mode"] if trained else [])])
        length = "".join(f" and 1 x {n}" for n in dict.fromkeys(f.under.length for f in ran if f.under.length))
        places = [f"in {' and '.join(mode.removesuffix(' mode') for mode in modes)} mode"] if modes else []
        named = [f.under for f in ran if f.under.compiled or not (modes or f.under.length)]
        places += filter(None, dict.fromkeys(under.words for under in named))
        within = f" {' and '.join(places)}" if places else ""
        probes = dict.fromkeys(f.probe for f in ran if f.probe)
        skipped = dict.fromkeys(f.probe or f.condition for f in self.findings if f.status == "skipped")
        missing = [name for name in skipped if name not in probes]
        not_tried = f"; not tried: {', '.join(missing)}" if missing else ""
        return f"{self.batch} x {self.n}{length} positions{within}{looked}, probes {', '.join(probes)}{not_tried}"

    def _cells(self, most: int) -> npt.NDArray[np.int64]:
        pairs = [(leak.query, leak.key) for leak in self.leaks if leak.paired and leak.under.length is None]
        return cells(self.allowed, self.seen, pairs, most)


def _kind(leak: Leak) -> tuple[bool, str]:
    """What leaks are counted together: all pairs of the example itself, or one probe's under its conditions."""
    return leak.paired, "" if leak.direct else leak.found_by
