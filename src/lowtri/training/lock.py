"""One training run at a time per folder: a lock that the operating system releases when the process ends, however it ends."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lowtri.errors import DataError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK = ".training.lock"
_FAR = 2**20  # Windows locks bytes, and a locked one cannot be read: this one lies behind the process number
_BUSY = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EDEADLK, errno.EACCES)


@contextmanager
def only_training(folder: Path) -> Iterator[None]:
    """Lock a folder for the time of the context; it is made where it does not exist, and removed again if nothing was written.

    A folder that cannot be written, or a file system without locks, is not locked: in the first nothing can be lost.

    Raises:
        DataError: if another training, of this process or another, has locked it.
    """
    if folder.is_file():
        raise DataError(f"{folder} is a file, but a run has a folder.\nFix: another path.")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    try:
        descriptor = _open(path)
        while descriptor is not None and not _locked(descriptor, path):
            os.close(descriptor)
            descriptor = _open(path)  # the file was removed between opening and locking: lock the one that is there now
        try:
            if descriptor is not None:
                with suppress(OSError):  # the number is only for another process's message
                    os.write(descriptor, f"{os.getpid():<20}".encode())
            yield
        finally:
            if descriptor is not None:
                if sys.platform == "win32":  # it does not remove an open file; one that another process opens now stays
                    os.close(descriptor)
                with suppress(OSError):
                    path.unlink()
                if sys.platform != "win32":
                    os.close(descriptor)
    finally:
        for empty in made:
            with suppress(OSError):
                empty.rmdir()


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return None
        raise


def _locked(descriptor: int, path: Path) -> bool:
    """Lock an open file; False if it is no longer in the folder."""
    try:
        if sys.platform == "win32":
            os.lseek(descriptor, _FAR, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            os.lseek(descriptor, 0, os.SEEK_SET)
            number = os.read(descriptor, 20).decode(errors="replace").strip()
            os.close(descriptor)
            raise DataError(
                f"{path.parent} is in use by another training{f' (process {number})' if number else ''}.\n"
                "Fix: another folder, or wait until it has ended"
            ) from None
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
