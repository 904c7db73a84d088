"""The exceptions. Each message names the argument, what was passed, what was expected, and the fix.

    LowtriError
    ├── MaskError        a mask that cannot be built, read, combined or used      (also a ValueError)
    ├── CallError        arguments of a call that do not fit together             (also a ValueError and a RuntimeError)
    ├── EngineError      the engine named by engine= cannot run the call          (also a RuntimeError)
    ├── ExtraError       a package that only this part of lowtri needs is missing (also an ImportError)
    ├── DataError        a file, folder or text that cannot be used               (also a ValueError)
    ├── LeakError        an audit found an output that depends on hidden ones     (also an AssertionError)
    ├── VerifyError      a function does not compute attention as defined         (also an AssertionError)
    ├── RankError        a process of a group did not answer, or differs        (also a RuntimeError)
    └── UndecidedError   a check could not decide; the message has the reason     (also a RuntimeError)

The command line prints only the message and exits with the class's ``exit_code``.
"""

from __future__ import annotations


class LowtriError(Exception):
    """The base class of all errors of lowtri; never raised itself."""

    exit_code = 2
    on_every_rank = False  # whether every process of a group raises it


class MaskError(LowtriError, ValueError):
    """A mask that cannot be built, read, combined or used."""


class CallError(LowtriError, ValueError, RuntimeError):
    """Arguments of a call that do not fit together. Also a RuntimeError, which torch's functions raise in such cases."""


class EngineError(LowtriError, RuntimeError):
    """The engine named by ``engine=`` cannot run the call. There is no silent fallback."""


class ExtraError(LowtriError, ImportError):
    """A package that only this part of lowtri needs is not installed; the message has the line that installs it."""


class DataError(LowtriError, ValueError):
    """A file, a folder or a text that cannot be used."""


class LeakError(LowtriError, AssertionError):
    """An audit found an output that depends on positions that its mask hides."""

    exit_code = 1


class VerifyError(LowtriError, AssertionError):
    """A function does not compute masked attention as it is defined."""

    exit_code = 1


class RankError(LowtriError, RuntimeError):
    """A process of a group did not answer in time, or passed other arguments than the rest; every process raises it."""

    on_every_rank = True


class UndecidedError(LowtriError, RuntimeError):
    """A check could not decide; the message has the reason."""

    exit_code = 3


def is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: libraries wrap what ends their own imports in an ImportError or a SystemError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
