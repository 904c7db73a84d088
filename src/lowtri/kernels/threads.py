"""The threads, and the cache of compiled code.

In a process with torch the kernels run on torch's own OpenMP team: threads of our own would lose the second core after any torch
operation, whose workers keep spinning on it. A kernel is a C function of one argument, the address of its record, which every member of
the team calls; members take tasks from a counter in it. The call comes back when all are done, so Ctrl-C is seen after that.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import cfunc, types

from lowtri.compat import numba_private
from lowtri.kernels import target
from lowtri.kernels.abi import Abi
from lowtri.kernels.device_function import OPTIONS
from lowtri.kernels.record import RecordType
from lowtri.kernels.spec import KernelSpec

__all__ = ["Code", "cache_folder", "compiled", "run_team"]

_forked = False


def _after_fork() -> None:
    # libgomp's team does not survive a fork (torch's own operations hang there, too): a child runs alone.
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_after_fork)


@cache
def cache_folder() -> Path | None:
    """Where compiled code lies: a folder named by everything that it depends on, or None where nothing can be written.

    Numba looks only at the file a function stands in, and would serve stale code after an edit elsewhere in the kernels.
    """
    digest = hashlib.sha256()
    for file in [Path(numba_private.__file__), *sorted(Path(__file__).parent.rglob("*.py"))]:
        digest.update(file.read_bytes())
    facts = (numba.__version__, llvmlite.__version__, sys.version, target.ISA.name, sorted(target.features()))
    digest.update(repr(facts).encode())
    root = os.environ.get("LOWTRI_CACHE") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(root) / "lowtri" / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError:
        return None
    return folder


class Code:
    """The machine code of a kernel."""

    def __init__(self, compiled: Any) -> None:
        self._compiled, self.address = compiled, compiled.address  # the code lives as long as what compiled it
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)


@cache
def compiled(kernel: Callable[[Any], None], abi: Abi, spec: KernelSpec) -> Code:
    """The code of ``kernel(record)``: from the disk cache, or compiled now. A cache that fails costs time only."""
    signature = types.void(RecordType(abi.dtype, spec))
    folder = cache_folder()
    if folder is not None:
        # A cache that is full, cut off or another's may raise anything.
        with suppress(Exception), numba_private.cache_directory(str(folder / spec.name)):
            return Code(cfunc(signature, cache=True, **OPTIONS)(kernel))
    return Code(cfunc(signature, **OPTIONS)(kernel))


@cache
def _gomp() -> Any:
    """GOMP_parallel of the OpenMP library that torch has loaded, or None."""
    torch = sys.modules.get("torch")
    if torch is None or torch.__file__ is None:
        return None
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        start = ctypes.CDLL(str(path)).GOMP_parallel
        start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        start.restype = None
        return start
    return None


def run_team(code: Code, record: int, threads: int) -> None:
    """Call the code on ``threads`` threads, each with the record's address, and come back when all are done."""
    if threads <= 1 or _forked:
        code.call(record)
        return
    start = _gomp() if "torch" in sys.modules else None
    if start is not None:
        start(code.address, record, threads, 0)
        return
    _own_team(code.call, record, threads)


def _own_team(code: Callable[[int], None], record: int, threads: int) -> None:
    """The same on threads of our own. An interrupt waits until all are back: what they write to must not be freed before."""
    over, locks = False, [threading.Lock() for _ in range(threads - 1)]

    def help(lock: threading.Lock) -> None:
        with lock:
            if not over:  # else the work was done before this thread began
                code(record)

    interrupt: BaseException | None = None
    try:
        for lock in locks:
            threading.Thread(target=help, args=(lock,)).start()
        code(record)
    except BaseException as error:  # Ctrl-C, or whatever a signal's handler raises
        interrupt = error
    over = True
    for lock in locks:
        while lock.locked():  # by a helper that works; one that begins only now sees that it is over
            try:
                with lock:
                    pass
            except BaseException as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt
