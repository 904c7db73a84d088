"""Calls of the command line in this process, and what they print."""

from __future__ import annotations

from typing import Any

import pytest

from lowtri.cli.main import main


def outcome(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of a call that ends with this code."""
    capsys.readouterr()
    ended = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert ended == code, (out, err)
    return out, err


def printed(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """stdout of a call that succeeds."""
    return outcome(capsys, *arguments)[0]


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """stderr of a call that ends with 2, without a result and without a traceback."""
    out, err = outcome(capsys, *arguments, code=2)
    assert out == "" and "Traceback" not in err and "unforeseen" not in err
    return err
