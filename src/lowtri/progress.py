"""A line on stderr that says how far a long check is."""

from __future__ import annotations

import sys
import time
from types import TracebackType

_PATIENCE = 2.0  # seconds without a line: a short check needs none
_INTERVAL = 0.2  # seconds between two states of the line
_CLEAR = "\x1b[K"  # to the end of the line


class ProgressLine:
    """One line that is written again and again; leaving the context clears it.

    Args:
        name: what runs; the line begins with it.
        requested: whether there is a line; by default only if stderr is a terminal.
    """

    def __init__(self, name: str, requested: bool | None = None) -> None:
        self._name = name
        self._is_shown = sys.stderr.isatty() if requested is None else requested
        self._started = time.monotonic()
        self._next = self._started + _PATIENCE
        self._was_written = False

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._was_written:
            self._write(f"\r{_CLEAR}")

    def show(self, what: str) -> None:
        """Say what runs now, if it is time for it."""
        now = time.monotonic()
        if self._is_shown and now >= self._next:
            self._next = now + _INTERVAL
            self._was_written = True
            self._write(f"\r{self._name}: {what}, {now - self._started:.0f} s{_CLEAR}")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
