"""The result of a verification: text with the verdict first, a page, JSON, and an exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lowtri.errors import DataError, VerifyError
from lowtri.files import write_text
from lowtri.masks.notebook import output, page
from lowtri.pages import TABLE_STYLE, html_table, html_text, json_text

__all__ = ["Finding", "VerifyReport"]

_SHOWN = 12  # findings in the text


@dataclass(frozen=True)
class Finding:
    """One result that is not what the definition gives.

    Attributes:
        case, dtype: the case by name, and its dtype.
        where: the mistake, or where the wrong numbers lie; for a call that broke, what it did.
        mistake: the well-known mistake that reproduces the result, two joined by " and ", or "".
        difference, tolerance: the greatest difference, and what rounding allows; None if nothing could be compared.
        position: of the greatest difference, (row, head, query or key, feature).
        known: the sentence that documents the difference, or "".
        what: "output", "lse", "gradient of q" ...
    """

    case: str
    dtype: str
    where: str
    mistake: str
    difference: float | None
    tolerance: float | None
    position: tuple[int, ...]
    known: str = ""
    what: str = ""

    @property
    def sentence(self) -> str:
        if self.difference is None:
            return f"{self.case}, {self.dtype}: {self.where}"
        size = f"differs by {self.difference:.2g} (rounding: {self.tolerance:.2g}) at {self.position}"
        return f"{self.case}, {self.dtype}: {self.what} {size}: {self.where}"


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """What :func:`lowtri.verify` found.

    Attributes:
        name: of the function.
        arrays: the library whose arrays it was given.
        dtypes: that were tried.
        passed: how many cases agree with the definition, each dtype counted.
        findings: what does not, with documented differences.
        mistakes: the names of the mistakes, in order of evidence.
        not_offered: what the function does not take, and how it says so.
        stopped: why the verification ended early, or None.
        seconds: how long it took.
    """

    name: str
    arrays: str
    dtypes: tuple[str, ...]
    passed: int
    findings: tuple[Finding, ...]
    mistakes: tuple[str, ...]
    not_offered: Mapping[str, str]
    stopped: str | None = None
    seconds: float = 0.0

    @property
    def wrong(self) -> tuple[Finding, ...]:
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
    def exit_code(self) -> int:
        """0: right, 1: wrong, 3: could not decide."""
        return 1 if self.wrong else 0 if self.decided else 3

    @property
    def message(self) -> str:
        """The verdict in one line."""
        if self.wrong:
            what = ", ".join(self.mistakes) or "no well-known mistake explains it"
            return f"{self.name} is wrong: {what} ({len(self.wrong)} differences, {self.passed} cases agree)"
        if not self.decided:
            return f"{self.name}: could not decide: {self.stopped or 'nothing could be compared'}"
        known = sum(1 for finding in self.findings if finding.known)
        more = f", {known} documented differences" if known else ""
        return f"{self.name} is right: {self.passed} cases agree with the definition{more}"

    def raise_if_wrong(self) -> None:
        """For tests.

        Raises:
            VerifyError: if the function is wrong, or nothing could be decided.
        """
        if not self.ok:
            raise VerifyError(str(self))

    def __str__(self) -> str:
        lines = [self.message]
        counts = Counter(finding.mistake or "not explained" for finding in self.wrong)
        for mistake, count in counts.most_common():
            examples = [finding for finding in self.wrong if (finding.mistake or "not explained") == mistake]
            lines.append(f"  {mistake}: {count} of them" if mistake != "not explained" else f"  not explained: {count}")
            shown = examples[:3] if mistake != "not explained" else examples[:_SHOWN]
            lines += [f"    {finding.sentence}" for finding in shown]
            if len(examples) > len(shown):
                lines.append(f"    ... and {len(examples) - len(shown)} more")
        documented = Counter(finding.known for finding in self.findings if finding.known)
        lines += [f"  documented ({count}): {sentence}" for sentence, count in documented.items()]
        if self.not_offered:
            reasons: dict[str, list[str]] = {}
            for feature, reason in sorted(self.not_offered.items()):
                reasons.setdefault(reason, []).append(feature)
            lines += [f"  not offered: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
        if self.stopped is not None:
            lines.append(f"  stopped: {self.stopped}")
        lines.append(f"  {self.arrays} arrays in {', '.join(self.dtypes)}; {self.seconds:.1f} s")
        return "\n".join(lines)

    __repr__ = __str__

    def to_json(self) -> str:
        """The whole report, for programs."""
        fields = {"ok": self.ok, "message": self.message, **asdict(self)}
        return json_text(fields)

    def to_html(self) -> str:
        """A page without network, script or font."""
        return page("verify", f"{self.name} against the definition", self._parts(), TABLE_STYLE)

    def _repr_html_(self) -> str:
        return output("verify", self._parts(), TABLE_STYLE)

    def _parts(self) -> list[str]:
        """The verdict, a table with a row for each mistake and case, and what is not offered."""
        rows: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings:
            rows.setdefault((finding.mistake or finding.where, finding.case), []).append(finding)
        table = [
            (
                mistake,
                case,
                ", ".join(dict.fromkeys(f.dtype for f in each)),
                f"{max(f.difference or 0.0 for f in each):.2g}",
                each[0].known,
            )
            for (mistake, case), each in rows.items()
        ]
        parts = [f"<h1>{html_text(self.message)}</h1>"]
        if table:
            head = ("mistake, or where", "case", "dtypes", "difference", "documented")
            parts.append(f'<div class="scroll">{html_table(head, table)}</div>')
        if self.not_offered:
            parts.append(f"<p>Not offered: {html_text(', '.join(sorted(self.not_offered)))}.</p>")
        return parts

    def save(self, path: str | Path) -> Path:
        """Write the report as .html, .json or .txt.

        Raises:
            DataError: if the ending is another one, or the file cannot be written.
        """
        path = Path(path)
        forms = {".html": self.to_html, ".json": self.to_json, ".txt": self.__str__}
        if path.suffix not in forms:
            raise DataError(
                f"{path}: a report is written as {', '.join(forms)}.\nFix: give the file one of these endings."
            )
        write_text(path, forms[path.suffix]() + "\n")
        return path
