"""Atomic writes: at any moment a file has its complete old content or its complete new content."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lowtri.errors import DataError
from lowtri.system import replace

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ROOM = 2**16  # bytes; with fewer a folder is full
TEMPORARY_FIX = "make room there, or TMPDIR=FOLDER for another one"


@contextmanager
def writing(function: str, path: str | Path) -> Iterator[None]:
    """Inside, an error of the operating system becomes an error of ``function`` that names the file and the fix.

    Raises:
        DataError: where the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror
        fix = "a file in a folder that exists and that you may write to"
        if is_about_space(error):
            fix = "free some space, or write to another disk"
            if trouble := temporary_folder_trouble(Path(path)):
                reason = trouble
                fix = TEMPORARY_FIX
        raise DataError(f"{function}: {path} cannot be written: {reason}. Fix: {fix}.") from None


def is_about_space(error: OSError) -> bool:
    """Whether a disk is full, or no folder for temporary files is left, which tempfile says without an error number of its own."""
    return error.errno in _DISK_FULL or "temporary directory" in str(error.strerror)


def temporary_folder_trouble(beside: Path | None = None) -> str | None:
    """What is wrong with the folder for temporary files, in which libraries write what nobody named; None if it has room.

    Args:
        beside: a file that was to be written; if its own disk is full, too, then that is what matters.
    """
    try:
        folder = tempfile.gettempdir()
    except OSError:
        return "no folder for temporary files can be written"
    if _free(folder) > _ROOM or (beside is not None and _free(beside.absolute().parent) <= _ROOM):
        return None
    return f"the folder for temporary files, {folder}, is full"


def _free(folder: str | Path) -> int:
    """The bytes that are free on a folder's disk; plenty where that cannot be asked."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return _ROOM + 1


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a temporary path in the same folder, then rename that file to ``path``, or to what ``path`` links to.

    The temporary file is new and has a name of its own: threads and processes may write to one path at the same time, and the last
    of them stays; a link of that name, which somebody laid before, is not followed.

    Raises:
        OSError: names ``path``, whatever exception the writing library raises for a full disk; also where ``path`` is a device,
            a pipe or a folder, which a rename would replace.
    """
    if path.exists() and not path.is_file():
        number, kind = (errno.EISDIR, "a folder") if path.is_dir() else (errno.EINVAL, "a device or a pipe")
        raise OSError(number, f"is {kind}, and only a file can be written", str(path))
    target = Path(os.path.realpath(path))
    temporary: Path | None = None
    try:
        temporary = _new_file_beside(target)
        mode = temporary.stat().st_mode  # that of any new file; some libraries make theirs unreadable for others
        write(temporary)
        temporary.chmod(mode)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())  # before the rename, or a power cut could leave an empty file under the new name
        replace(temporary, target)
    except Exception as error:
        reason = os_error(error)
        if reason is None:
            raise
        raise OSError(reason.errno, reason.strerror, str(path)) from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _new_file_beside(target: Path) -> Path:
    """An empty file that nobody else has, as ``tempfile.mkstemp`` makes it, but with the mode that the umask gives."""
    while True:
        path = target.with_name(f".{target.name[:32]}.{secrets.token_hex(8)}.part")
        try:
            # Exclusive: no file, and no link, may be there.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            continue
        os.close(descriptor)
        return path


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def os_error(error: BaseException | None) -> OSError | None:
    """The operating system's error behind a library's exception: in its chain, or quoted in its message."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error
        if quoted := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors and tokenizers are written in Rust
            return OSError(number := int(quoted[1]), os.strerror(number))
        error = error.__cause__ or error.__context__
    return None
