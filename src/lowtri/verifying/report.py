"""The report of a verification: text with the verdict first, a picture of all cases, HTML, JSON, and an exit code."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lowtri.errors import VerifyError
from lowtri.pictures.files import save_picture
from lowtri.pictures.grids import Grid, Look, Panel, picture, used
from lowtri.pictures.pages import TABLE_STYLE, html_table, html_text, image, json_text, output, page
from lowtri.pictures.svg import HIDDEN, fill

_LOOKS = (
    Look("", fill("value"), "right"),
    Look("", fill("partly"), "documented"),
    Look("", fill("leak"), "wrong"),
    Look("", HIDDEN, "not offered"),
    Look("", fill("paper"), "not tried"),
)


_FINITE = "finite inputs"
_NAN = "NaN or infinity in hidden positions"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _agree(n: int) -> str:
    return "1 case agrees" if n == 1 else f"{n} cases agree"


@dataclass(frozen=True)
class Difference:
    """One result that is not what the definition gives.

    Attributes:
        case, dtype: the case by name, and its dtype.
        where: the mistake, or where the wrong numbers lie; for a call that gave no result, what happened.
        mistake: the well-known mistake that reproduces the result, two joined by " and ", or "".
        difference, tolerance: the greatest difference, and what rounding allows; None if nothing could be compared.
        position: of the greatest difference, (row, head, query or key, feature).
        known: the sentence that documents the difference, or "".
        what: "output", "lse", "gradient of q" ...
        values: what was expected there and what came, in words, where one of them is NaN or infinite; or "".
        cases: how many cases show it: one, or more for what is said once, such as a wrong dtype.
    """

    case: str
    dtype: str
    where: str
    mistake: str = ""
    difference: float | None = None
    tolerance: float | None = None
    position: tuple[int, ...] = ()
    known: str = ""
    what: str = ""
    values: str = ""
    cases: int = 1

    @property
    def sentence(self) -> str:
        if self.difference is None:
            more = f" ({self.cases} cases)" if self.cases > 1 else ""
            return f"{self.case}, {self.dtype}: {self.where}{more}"
        if self.values:
            return f"{self.case}, {self.dtype}: {self.what}: {self.values} at {self.position}: {self.where}"
        size = f"differs by {self.difference:.2g} (rounding: {self.tolerance:.2g}) at {self.position}"
        return f"{self.case}, {self.dtype}: {self.what} {size}: {self.where}"


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """The result of :func:`lowtri.verify`.

    Attributes:
        name: of the function.
        arrays: the library whose arrays it was called with.
        results: by case and dtype, "right", "wrong", "documented", "not offered" or "not tried".
        findings: each difference from the definition, with the documented ones.
        mistakes: the names of the mistakes, in order of evidence.
        not_offered: what the function does not take, and the reason.
        stopped: why the verification ended early, or None.
        seconds: how long it took.
        with_nan: the cases in which hidden positions hold NaN or infinity.
    """

    name: str
    arrays: str
    results: Mapping[str, Mapping[str, str]]
    findings: tuple[Difference, ...]
    mistakes: tuple[str, ...]
    not_offered: Mapping[str, str]
    stopped: str | None = None
    seconds: float = 0.0
    with_nan: frozenset[str] = frozenset()

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(dtype for each in self.results.values() for dtype in each))

    @property
    def passed(self) -> int:
        """How many cases agree with the definition, each dtype counted."""
        return sum(status == "right" for each in self.results.values() for status in each.values())

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """The findings that no sentence documents."""
        return tuple(finding for finding in self.findings if not finding.known)

    @property
    def decided(self) -> bool:
        """Whether anything was compared."""
        return self.stopped is None and self.passed + len(self.findings) > 0

    @property
    def ok(self) -> bool:
        return self.decided and not self.wrong

    @property
    def levels(self) -> dict[str, str]:
        """ "right", "wrong" or "undecided" for finite inputs, and for NaN or infinity in hidden positions."""
        levels = {}
        for level in (_FINITE, _NAN):
            names = [name for name in self.results if (name in self.with_nan) == (level == _NAN)]
            statuses = {status for name in names for status in self.results[name].values()}
            if "wrong" in statuses:
                levels[level] = "wrong"
            elif names:
                compared = statuses & {"right", "documented"} and self.stopped is None
                levels[level] = "right" if compared else "undecided"
        return levels

    @property
    def level(self) -> str:
        """ "right", "right for finite inputs", "wrong" or "undecided".

        A function that differs only where hidden positions hold NaN or infinity, such as one that multiplies a weight of 0 by
        NaN, is right for finite inputs.
        """
        if self.wrong:
            return "right for finite inputs" if self.levels.get(_FINITE) == "right" else "wrong"
        return "right" if self.decided else "undecided"

    @property
    def exit_code(self) -> int:
        """0: right, 1: wrong, or right for finite inputs alone, 3: could not decide."""
        if self.wrong:
            return 1
        return 0 if self.decided else 3

    @property
    def message(self) -> str:
        """The verdict in one line."""
        if self.wrong:
            unexplained = sum(1 for finding in self.wrong if not finding.mistake)
            names = [
                *map(self._with_cases, self.mistakes),
                f"{_count(unexplained, 'difference')} that no well-known mistake explains",
            ]
            what = ", ".join(names if unexplained else names[:-1])
            verdict = "wrong"
            if self.level != "wrong":
                verdict = f"{self.level}, but wrong with {_NAN}"
            counts = f"{_count(len(self.wrong), 'difference')}, {_agree(self.passed)}"
            return f"{self.name} is {verdict}: {what} ({counts})"
        if not self.decided:
            return f"{self.name}: could not decide: {self.stopped or 'nothing could be compared'}"
        known = sum(1 for finding in self.findings if finding.known)
        raised = sum(status == "not offered" for each in self.results.values() for status in each.values())
        more = f", {_count(raised, 'case')} not offered" if raised else ""
        if not self.passed:
            return f"{self.name} differs only as documented: {_count(known, 'documented difference')}{more}"
        more = (f", {_count(known, 'documented difference')}" if known else "") + more
        return f"{self.name} is right: {_agree(self.passed)} with the definition{more}"

    def _with_cases(self, mistake: str) -> str:
        """A mistake's name, and in how many cases it shows where one finding stands for several."""
        count = sum(one.cases for one in self.wrong if one.mistake == mistake and one.cases > 1)
        return f"{mistake} in {count} cases" if count else mistake

    def raise_if_wrong(self) -> None:
        """For tests.

        Raises:
            VerifyError: if the function is wrong, or nothing could be decided.
        """
        if not self.ok:
            raise VerifyError(str(self))

    def __str__(self) -> str:
        lines, groups = [self.message], defaultdict(list)
        if self.wrong:
            lines.append("  " + "; ".join(f"{level}: {verdict}" for level, verdict in self.levels.items()))
        for finding in self.wrong:
            groups[finding.mistake].append(finding)
        for mistake in sorted(groups, key=lambda name: (name == "", -sum(one.cases for one in groups[name]))):
            each, shown = groups[mistake], 3 if mistake else 12
            total = sum(one.cases for one in each)
            count = f"{total} cases" if total > len(each) else _count(total, "difference")
            lines.append(f"  {mistake}: {count}" if mistake else f"  not explained: {len(each)}")
            lines += [f"    {finding.sentence}" for finding in each[:shown]]
            lines += [f"    ... and {len(each) - shown} more"] if len(each) > shown else []
        documented = Counter(finding.known for finding in self.findings if finding.known)
        lines += [f"  documented ({count}): {sentence}" for sentence, count in documented.items()]
        reasons = defaultdict(list)
        for feature, reason in sorted(self.not_offered.items()):
            reasons[reason].append(feature)
        lines += [f"  not offered: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
        lines += [f"  stopped: {self.stopped}"] if self.stopped is not None else []
        lines.append(f"  {self.arrays} arrays in {', '.join(self.dtypes)}; {self.seconds:.1f} s")
        return "\n".join(lines)

    __repr__ = __str__

    def to_json(self) -> str:
        """The whole report, for programs."""
        fields = asdict(self) | {"with_nan": sorted(self.with_nan)}
        verdict = {"ok": self.ok, "level": self.level, "levels": self.levels, "message": self.message}
        return json_text({**verdict, "exit_code": self.exit_code, **fields})

    def to_html(self) -> str:
        """A page without network, script or font."""
        return page("verify", f"{self.name} and the definition", self._parts(self.to_svg()), TABLE_STYLE)

    def _repr_html_(self) -> str:
        return output("verify", self._parts(image(self.to_svg())), TABLE_STYLE)

    def to_svg(self) -> str:
        """The picture: a row for each case, a column for each dtype, coloured by the result."""
        index = {look.meaning: i for i, look in enumerate(_LOOKS)}
        each = [index[status] for row in self.results.values() for status in row.values()]
        cells = np.array(each, int).reshape(len(self.results), len(self.dtypes))
        panel = Panel([Grid(cells, _LOOKS, 72, 16, rows=list(self.results), columns=self.dtypes)], "", "", "")
        return picture(f"{self.name}: results of all cases", [panel], used(_LOOKS, cells))

    def _parts(self, picture: str) -> list[str]:
        """The verdict, a table with a row for each mistake and case, what is not offered, and the picture."""
        rows: dict[tuple[str, str], list[Difference]] = defaultdict(list)
        for finding in self.findings:
            rows[finding.mistake or finding.where, finding.case].append(finding)
        parts = [f"<h1>{html_text(self.message)}</h1>"]
        if self.wrong:
            levels = "; ".join(f"{level}: {verdict}" for level, verdict in self.levels.items())
            parts.append(f"<p>{html_text(levels)}.</p>")
        if rows:
            head = ("mistake, or where", "case", "dtypes", "difference", "documented")
            dtypes = [", ".join(dict.fromkeys(f.dtype for f in each)) for each in rows.values()]
            greatest = [f"{max(f.difference or 0.0 for f in each):.2g}" for each in rows.values()]
            known = [each[0].known for each in rows.values()]
            table = [(*names, *more) for names, *more in zip(rows, dtypes, greatest, known, strict=True)]
            parts.append(f'<div class="scroll">{html_table(head, table)}</div>')
        if self.not_offered:
            parts.append(f"<p>Not offered: {html_text(', '.join(sorted(self.not_offered)))}.</p>")
        return [*parts, f"<figure>{picture}</figure>"]

    def save(self, path: str | Path) -> Path:
        """Write the report as .html, .json or .txt, or its picture as .svg, .png or .pdf.

        Raises:
            DataError: if the ending is another one, or the file cannot be written.
        """
        forms = {".html": self.to_html, ".json": self.to_json, ".txt": self.__str__, ".svg": self.to_svg}
        return save_picture(path, forms)
