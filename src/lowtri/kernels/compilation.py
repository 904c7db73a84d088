"""Compiling kernels, and the cache of compiled code."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import cfunc, types
from numba.core import config

from lowtri.kernels import target
from lowtri.kernels.abi import Abi
from lowtri.kernels.device_function import NUMBA_OPTIONS
from lowtri.kernels.record import RecordType
from lowtri.kernels.spec import KernelSpec

__all__ = ["Code", "cache_folder", "compiled"]


@cache
def cache_folder() -> Path | None:
    """The folder of compiled code, named by a hash of everything that it depends on; None if it cannot be written to.

    Numba's own key is the file of a function: after an edit elsewhere in the kernels it would load stale code.
    """
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
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


@contextmanager
def _numba_cache(spec: KernelSpec) -> Iterator[bool]:
    """Set Numba's cache folder to the spec's own while a kernel is compiled, then back to the user's."""
    folder = cache_folder()
    before = config.CACHE_DIR  # type: ignore[attr-defined]
    try:
        if folder is not None:
            config.CACHE_DIR = str(folder / spec.name)  # type: ignore[attr-defined]
        yield folder is not None
    finally:
        config.CACHE_DIR = before  # type: ignore[attr-defined]


class Code:
    """The machine code of a kernel."""

    def __init__(self, compiled: Any) -> None:
        self._compiled, self.address = compiled, compiled.address  # the reference keeps the code in memory
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)


@cache
def compiled(kernel: Callable[[Any], None], abi: Abi, spec: KernelSpec) -> Code:
    """The code of ``kernel(record)``: from the disk cache, or compiled now. A broken cache costs time only."""
    signature = types.void(RecordType(abi.dtype, spec))
    with _numba_cache(spec) as usable:
        if usable:
            try:
                return Code(cfunc(signature, cache=True, **NUMBA_OPTIONS)(kernel))
            except Exception:  # a cache that is full, truncated or of another user raises various classes
                pass
        return Code(cfunc(signature, **NUMBA_OPTIONS)(kernel))
