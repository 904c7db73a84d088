"""The pytest plugin: the fixture `lowtri_audit`, and `--lowtri-audit FILE.py:make_model` to audit without writing a test.

    def test_my_model_does_not_peek(lowtri_audit):
        lowtri_audit(my_model(), torch.randint(0, 100, (2, 32)), mask="causal & window(8)", layers=4)

    $ pytest --lowtri-audit my_models.py:make_model --lowtri-audit my_models.py:make_other

pytest finds it by its entry point. Nothing of lowtri beyond this file is imported until a test asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lowtri.auditing.report import AuditReport

__all__ = ["lowtri_audit", "pytest_addoption", "pytest_collection", "pytest_terminal_summary"]

_REPORTS = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--lowtri-audit`."""
    parser.getgroup("lowtri").addoption(
        "--lowtri-audit",
        action="append",
        default=[],
        metavar="TARGET",
        help="audit FILE.py:make_model or a checkpoint folder as one more test; may be given several times",
    )


@pytest.fixture
def lowtri_audit(request: pytest.FixtureRequest) -> Callable[..., AuditReport]:
    """`lowtri.audit` that fails the test on a leak, and on a model of which nothing can be said; returns the report."""

    def check(model: Any, example: Any, **arguments: Any) -> AuditReport:
        from lowtri.auditing.audit import audit

        report = audit(model, example, **arguments)
        request.config.stash.setdefault(_REPORTS, []).append(f"{request.node.nodeid}: {report.message}")
        report.raise_for_leak()
        return report

    return check


class _Audits(pytest.Collector):
    def collect(self) -> Iterator[pytest.Item]:
        for target in self.config.getoption("--lowtri-audit"):
            yield _Audit.from_parent(self, name=target)


class _Audit(pytest.Item):
    def runtest(self) -> None:
        from lowtri.auditing.audit import audit
        from lowtri.auditing.loading import load_target

        target = load_target(self.name)
        mask = "causal" if target.mask is None else target.mask
        report = audit(target.model, target.example, mask=mask, **target.arguments)
        self.config.stash.setdefault(_REPORTS, []).append(f"{self.name}: {report.message}")
        report.raise_for_leak()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"audit of {self.name}"


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Add one item for each `--lowtri-audit` after everything else is collected."""
    result = yield
    if session.config.getoption("--lowtri-audit"):
        items = list(_Audits.from_parent(session, name="lowtri-audit").collect())
        session.items.extend(items)
        session.testscollected += len(items)
    return result


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What each audit said, with `-v`."""
    lines = config.stash.get(_REPORTS, [])
    if lines and config.get_verbosity() > 0:
        terminalreporter.section("lowtri audits")
        for line in lines:
            terminalreporter.line(line)
