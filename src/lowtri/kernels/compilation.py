"""Compiling kernels, and the cache of compiled code.

A kernel that lies in the cache has a marker beside it: an empty file, named by the kernel and by its source file (path, time of change
and size, by which Numba finds its own files). So it takes no compiler to know what need not be compiled.

Processes that need the same kernel at once take turns under a lock: the first compiles it, and the others load its code.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import cfunc, types

from lowtri.compat import numba_private
from lowtri.files import AHEAD, MARKER, cache_root
from lowtri.kernels import target
from lowtri.kernels.abi import Abi
from lowtri.kernels.device_function import NUMBA_OPTIONS
from lowtri.kernels.record import RecordType
from lowtri.kernels.spec import KernelSpec

__all__ = [
    "Code",
    "cache_folder",
    "compiled",
    "is_compiled",
    "is_compiled_ahead",
    "machine_code",
    "mark_compiled_ahead",
]

_LONGEST_WAIT = 120.0  # seconds for another process to compile one kernel


@cache
def cache_folder() -> Path | None:
    """The folder of compiled code, named by a hash of everything that it depends on; None if it cannot be written to.

    Numba's own key is the file of a function: after an edit elsewhere in the kernels it would load stale code.
    """
    digest = hashlib.sha256()
    compat = Path(numba_private.__file__).parent.glob("numba_*.py")
    for file in [*sorted(compat), *sorted(Path(__file__).parent.rglob("*.py"))]:
        digest.update(file.read_bytes())
    facts = (numba.__version__, llvmlite.__version__, sys.version, target.ISA.name, sorted(target.features()))
    digest.update(repr(facts).encode())
    folder = cache_root() / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink(missing_ok=True)  # another thread may have tried at the same time
    except OSError:
        return None
    return folder


class Code:
    """The machine code of a kernel."""

    def __init__(self, compiled: Any) -> None:
        self._compiled, self.address = compiled, compiled.address  # the reference keeps the code in memory
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)


@cache
def compiled(kernel: Callable[[Any], None], abi: Abi, spec: KernelSpec) -> Code:
    """The code of ``kernel(record)``."""
    return Code(machine_code(kernel, types.void(RecordType(abi.dtype, spec)), spec.name))


def machine_code(function: Callable[..., None], signature: Any, name: str) -> Any:
    """A function compiled for a signature: from the folder ``name`` of the disk cache, or now. A broken cache costs time only."""
    folder = cache_folder()
    if folder is not None:
        # A cache that is full, truncated or of another user raises various classes.
        with suppress(Exception), numba_private.cache_directory(str(folder / name)):
            marker = _marker(folder, function, name)
            with nullcontext() if marker.exists() else _turn(marker.with_suffix(".lock")):
                code = cfunc(signature, cache=True, **NUMBA_OPTIONS)(function)
            with suppress(OSError):
                marker.touch()
            return code
    return cfunc(signature, **NUMBA_OPTIONS)(function)


def is_compiled(kernel: Callable[[Any], None], spec: KernelSpec) -> bool:
    """Whether the kernel's code lies in the cache folder."""
    folder = cache_folder()
    return folder is not None and _marker(folder, kernel, spec.name).exists()


def mark_compiled_ahead(kernel: Callable[[Any], None], spec: KernelSpec) -> None:
    """Note that the user asked for the kernel's code; small calls may rely on it from the next process on."""
    folder = cache_folder()
    if folder is not None:
        with suppress(OSError):
            _marker(folder, kernel, spec.name).with_suffix(AHEAD).touch()


def is_compiled_ahead(kernel: Callable[[Any], None], spec: KernelSpec) -> bool:
    """Whether the kernel's code lies in the cache folder because the user asked for it."""
    folder = cache_folder()
    if folder is None or not is_compiled(kernel, spec):
        return False
    return _marker(folder, kernel, spec.name).with_suffix(AHEAD).exists()


def _marker(folder: Path, function: Callable[..., None], name: str) -> Path:
    source = Path(function.__code__.co_filename)
    facts = source.stat()
    stamp = hashlib.sha256(repr((str(source), facts.st_mtime_ns, facts.st_size)).encode()).hexdigest()[:16]
    return folder / name / f"{function.__name__}-{stamp}{MARKER}"


@contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """Wait until no other process compiles the kernel; the lock of a process that ends is released by the system.

    The wait is limited, for a process that was stopped or a folder on a network that cannot lock: then both compile, and Numba
    replaces its files atomically.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with open(lock, "wb") as file:
        end = time.monotonic() + _LONGEST_WAIT
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
        yield
