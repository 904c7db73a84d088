"""The pytest plugin: the fixture `lowtri_audit`, and `--lowtri-audit FILE.py:make_model` to audit without writing a test.

    def test_my_model_does_not_peek(lowtri_audit):
        lowtri_audit(my_model(), torch.randint(0, 100, (2, 32)), mask="causal & window(8)", layers=4)

    $ pytest --lowtri-audit my_models.py:make_model --lowtri-audit my_models.py:make_other

Each target is a test of its file, `my_models.py::lowtri_audit[make_model]`, which is collected, selected and distributed like any
other. A failed audit prints its sentence, and with `-v` also the drawing. pytest finds the plugin by its entry point. Only the
errors of lowtri are imported until a test uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lowtri.errors import LeakError

if TYPE_CHECKING:
    from lowtri.auditing.report import AuditReport

_TARGETS = pytest.StashKey[dict[Path, list[str]]]()  # each file and the targets in it
_PROPERTY = "lowtri_audit"  # the name under which a test's report carries the verdict, from another process as well


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--lowtri-audit`."""
    parser.getgroup("lowtri").addoption(
        "--lowtri-audit",
        action="append",
        default=[],
        metavar="TARGET",
        help="audit FILE.py:make_model or a checkpoint folder as one more test; may be given several times",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Name each audit among the arguments, so that its file is collected wherever it lies, and nothing else of it is."""
    targets: dict[Path, list[str]] = {}
    for target in dict.fromkeys(config.getoption("--lowtri-audit")):
        targets.setdefault(_file(target).resolve(), []).append(target)
    config.stash[_TARGETS] = targets
    arguments = [str(argument).partition("::") for argument in config.args]
    # Whoever selects among a file's audits gets those; a process that shares the tests gets these arguments as well.
    selected = {Path(path).resolve() for path, _, test in arguments if test.startswith(_PROPERTY)}
    whole = {Path(path).resolve() for path, _, test in arguments if not test}
    config.args += [
        f"{file}::{_name(target)}" for file in targets if file not in selected | whole for target in targets[file]
    ]


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """The audits of a file that a target names."""
    targets = parent.config.stash[_TARGETS].get(file_path.resolve())
    return _Audits.from_parent(parent, path=file_path, targets=targets) if targets else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One item for each audit, also where a folder among the arguments holds its file."""
    first: dict[str, pytest.Item] = {}
    items[:] = [item for item in items if not isinstance(item, _Audit) or first.setdefault(item.nodeid, item) is item]


@pytest.fixture
def lowtri_audit(request: pytest.FixtureRequest) -> Callable[..., AuditReport]:
    """Run `lowtri.audit`, fail the test on a leak or if the audit could not decide, and return the report."""

    def check(model: Any, example: Any, **arguments: Any) -> AuditReport:
        __tracebackhide__ = True
        from lowtri.auditing.audit import audit_in_test

        report = audit_in_test(model, example, **arguments)
        request.node.user_properties.append((_PROPERTY, report.message))
        try:
            report.raise_for_leak()
        except LeakError as error:
            raise LeakError(_shown(error, request.config)) from None
        return report

    return check


def _shown(error: BaseException, config: pytest.Config) -> str:
    """What a failed audit says: the sentence about the leak, and with `-v` also the drawing."""
    sentence, *drawing = str(error).splitlines()
    if not isinstance(error, LeakError) or config.get_verbosity() > 0 or not drawing:
        return str(error)
    return f"{sentence}\n(pytest -v draws the pairs)"


def _name(target: str) -> str:
    """The name of a target's test."""
    path, _, function = target.rpartition(":")
    return f"{_PROPERTY}[{function if path.endswith('.py') else Path(target).resolve().name}]"


def _file(target: str) -> Path:
    """The file that a target's test belongs to: the Python file, or the folder's config.json."""
    path, _, _ = target.rpartition(":")
    file = Path(path) if path.endswith(".py") else Path(target, "config.json")
    if target.endswith(".py"):
        raise pytest.UsageError(
            f"--lowtri-audit {target}: no function is named.\nFix: name the one that makes the model, {target}:make_model"
        )
    if not file.is_file():
        raise pytest.UsageError(
            f"--lowtri-audit {target}: there is no file {file}.\nFix: FILE.py:make_model, or a folder with a config.json."
        )
    return file


class _Audits(pytest.File):
    def __init__(self, *, targets: list[str], **more: Any) -> None:
        super().__init__(**more)
        self.targets = targets

    def collect(self) -> Iterator[pytest.Item]:
        for target in self.targets:
            yield _Audit.from_parent(self, name=_name(target), target=target)


class _Audit(pytest.Item):
    def __init__(self, *, target: str, **more: Any) -> None:
        super().__init__(**more)
        self.target = target

    def runtest(self) -> None:
        from lowtri.auditing.audit import audit
        from lowtri.auditing.loading import load_target

        target = load_target(self.target)
        mask = "causal" if target.mask is None else target.mask
        report = audit(target.model, target.example, mask=mask, **target.arguments)
        self.user_properties.append((_PROPERTY, report.message))
        report.raise_for_leak()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        return _shown(excinfo.value, self.config)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"audit of {self.target}"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The verdict of each audit, with `-v`."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, []) if r.when == "call"]
    lines = [f"{r.nodeid}: {verdict}" for r in reports for name, verdict in r.user_properties if name == _PROPERTY]
    if lines and config.get_verbosity() > 0:
        terminalreporter.section("lowtri audits")
        for line in lines:
            terminalreporter.line(line)
