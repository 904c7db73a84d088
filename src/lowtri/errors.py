"""The family of errors. Every one names the argument, says what came and what was expected, and the fix.

    LowtriError
    ├── MaskError        a mask that cannot be built, read, combined or used      (also a ValueError)
    ├── CallError        arguments of a call that do not fit together             (also a ValueError and a RuntimeError)
    ├── EngineError      an engine asked for by name cannot run the call          (also a RuntimeError)
    ├── DataError        a file, folder or text that cannot be used               (also a ValueError)
    ├── LeakError        an audit found a position that sees what it must not     (also an AssertionError)
    └── UndecidedError   a check could not decide, and says why                   (also a RuntimeError)

The command line prints the message alone and exits with the code beside each class.
"""

from __future__ import annotations

__all__ = ["LowtriError", "MaskError", "CallError", "EngineError", "DataError", "LeakError", "UndecidedError"]


class LowtriError(Exception):
    """The root of the family; never raised itself."""

    exit_code = 2


class MaskError(LowtriError, ValueError):
    """A mask that cannot be built, read, combined or used."""


class CallError(LowtriError, ValueError, RuntimeError):
    """Arguments of a call that do not fit together. A RuntimeError as well, which is what torch's functions raise for them."""


class EngineError(LowtriError, RuntimeError):
    """An engine that was asked for by name cannot run the call; nothing falls back in silence."""


class DataError(LowtriError, ValueError):
    """A file, a folder or a text that cannot be used as asked."""


class LeakError(LowtriError, AssertionError):
    """An audit found a position that sees what its mask hides."""

    exit_code = 1


class UndecidedError(LowtriError, RuntimeError):
    """A check could not decide; the message says what stood in the way."""

    exit_code = 3
