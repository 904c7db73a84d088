"""The command ``lowtri``: finds the verb, runs it, and turns every error into a message and an exit code.

To add a verb, write a function of its name in the file of its subject, and its line in ``cli.verbs``:

    def mask(text: Annotated[str, typer.Argument(help="the mask, as text")], json: Json = False) -> None:
        \"\"\"lowtri mask "causal & window(3)"
        lowtri mask "causal - window(3)" --json

        What a mask shows and hides, as a picture.
        \"\"\"
        from lowtri.masks import mask as mask_of             # heavy imports inside: numpy, torch, lowtri's packages
        print_result(..., mask_of(text).draw(8), json)

The docstring is the help; its first paragraph is two examples, one per line, shown as written. A file is imported when one of its
verbs is called, never by ``lowtri --help``, and imports only typer and cli.options. The result goes to stdout, everything else to
stderr (``cli.options.note``), and all of it passes ``cli.terminal.write``, never ``print``. For bad input a verb raises a
``LowtriError``; for a failed check it prints the result, and then raises ``typer.Exit(1)``. No error prints a traceback, unless
``LOWTRI_TRACEBACK=1`` is set.
"""

from __future__ import annotations

import errno
import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup
from typer.main import get_command

from lowtri._version import __version__
from lowtri.cli.terminal import streams, write
from lowtri.cli.verbs import VERBS
from lowtri.errors import ExtraError, LowtriError, is_interrupt
from lowtri.extras import EXTRAS, missing, require
from lowtri.files import TEMPORARY_FIX, is_about_space, temporary_folder_trouble

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of writing, without the file's name


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the result is the exit code.

    >>> main(["--version"])
    lowtri ...
    0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:  # closed; print would take None for stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    if sys.stdout is None:
        _print_error("stdout is closed, so the result has nowhere to go. Fix: > /dev/null")
        return 2
    with streams():
        try:
            command = get_command(_app)
            if "_LOWTRI_COMPLETE" in os.environ:  # the shell asks what may follow the words so far
                command.main(arguments, prog_name="lowtri")
            with command.make_context("lowtri", arguments or ["--help"]) as context:
                command.invoke(context)
            sys.stdout.flush()
        except BaseException as error:
            if os.environ.get("LOWTRI_TRACEBACK"):
                sys.excepthook = _print_traceback
                raise
            return _report(error)
    return 0


def _print_traceback(*error: Any) -> None:
    write("".join(traceback.format_exception(*error)), end="", stream=sys.stderr)


def _report(error: BaseException) -> int:
    """Print one line about what ended the run; returns the exit code."""
    unwritten = _flush(sys.stdout)
    if isinstance(error, typer.Exit):
        if unwritten is None:
            return error.exit_code
        error = unwritten
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 2
    if isinstance(error, typer.Abort) or is_interrupt(error):
        _print_error("interrupted")
        return 130
    if isinstance(error, BrokenPipeError):
        # The reader went away (`lowtri generate ... | head`): there is nothing to report, and no one reads it.
        return 141  # 128 + SIGPIPE, as the shell's own tools end
    if isinstance(error, ModuleNotFoundError) and error.name in ("numpy", *EXTRAS):
        error = ExtraError(missing("this command", str(error.name)))
    if isinstance(error, LowtriError):
        _print_error(str(error))
        return error.exit_code
    if hasattr(error, "format_message"):  # typer's usage errors, whichever click they stand on
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "lowtri"
        _print_error(f"{error.format_message()} (see: {path} --help)")
        return 2
    if isinstance(error, OSError) and error.filename is not None:
        _print_error(f"{error.filename}: {error.strerror or error}")
        return 2
    if isinstance(error, OSError) and (error.errno in _DISK_FULL or is_about_space(error)):
        reason = error.strerror
        fix = "make room, or write it elsewhere"
        if trouble := temporary_folder_trouble():
            reason = trouble
            fix = TEMPORARY_FIX
        _print_error(f"the result, or a file, cannot be written: {reason}. Fix: {fix}")
        return 2
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # the second is torch's RuntimeError
        _print_error("there is not enough memory for these sizes. Fix: smaller ones, or a machine with more memory")
        return 2
    # str(error) may be pages long (torch prints C++ frames): its first line says what happened.
    first_line = (str(error).strip() or "no message").splitlines()[0]
    _print_error(f"stopped by an unforeseen {type(error).__name__}: {first_line} (LOWTRI_TRACEBACK=1 shows where)")
    return 70  # EX_SOFTWARE


def _print_error(message: str) -> None:
    with suppress(OSError):  # a full stderr: the exit code says it alone
        write(f"lowtri: {message}", stream=sys.stderr)
    _flush(sys.stderr)


def _flush(stream: TextIO) -> OSError | None:
    """Flush. After an error the rest goes to the null device, or the interpreter would report it again at exit."""
    try:
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None


class _Verbs(TyperGroup):
    """The list of verbs is known beforehand; a verb's own module is imported only when that verb is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        verb, _, rest = super().resolve_command(ctx, args)
        return verb, verb and _load(verb), rest


def _load(verb: str) -> Any:
    """The real command of a verb, from its module."""
    function = getattr(importlib.import_module(f"lowtri.cli.{VERBS[verb].file}"), verb)

    @functools.wraps(function)  # typer reads its signature
    def run(**options: Any) -> Any:
        require(f"lowtri {verb}", *VERBS[verb].packages)
        return function(**options)

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    # \b keeps the lines of the paragraph that follows: the two examples.
    app.command(name=verb, help="\b\n" + inspect.cleandoc(function.__doc__ or ""))(run)
    return get_command(app)


def _version(wanted: bool) -> None:
    if wanted:
        write(f"lowtri {__version__}")
        raise typer.Exit


_app = typer.Typer(cls=_Verbs, rich_markup_mode=None)


@_app.callback()
def _lowtri(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Masked self-attention: say once who may see whom.

    Each verb has its own --help, which opens with two examples. The result goes to stdout, everything else to stderr.

    Exit codes: 0 good, 1 a check failed, 2 usage or bad input, 3 could not decide, 70 an unforeseen error, 130 interrupted.
    """


for _verb, _one in VERBS.items():  # for the list in --help; resolve_command replaces them with the real commands
    _app.command(name=_verb, help=_one.line)(lambda: None)


if __name__ == "__main__":
    sys.exit(main())
