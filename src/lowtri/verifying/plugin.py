"""The pytest plugin: the fixture `lowtri_verify`.

    def test_my_kernel(lowtri_verify):
        lowtri_verify(my_kernel, signature="flash", dtypes=["float32"])

pytest finds the plugin by its entry point. Nothing of lowtri beyond this file is imported until a test uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lowtri.verifying.report import VerifyReport


@pytest.fixture
def lowtri_verify() -> Callable[..., VerifyReport]:
    """Run `lowtri.verify`, fail the test if the function is wrong or nothing could be decided, and return the report."""

    def check(attend: Any, **arguments: Any) -> VerifyReport:
        from lowtri.verifying.verify import verify

        report = verify(attend, **arguments)
        report.raise_if_wrong()
        return report

    return check
