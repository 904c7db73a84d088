"""Compiling kernels, and the cache of compiled code."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
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
        self._compiled, self.address = compiled, compiled.address  # the reference keeps the code in memory
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)


@cache
def compiled(kernel: Callable[[Any], None], abi: Abi, spec: KernelSpec) -> Code:
    """The code of ``kernel(record)``: from the disk cache, or compiled now. A broken cache costs time only."""
    signature = types.void(RecordType(abi.dtype, spec))
    folder = cache_folder()
    if folder is not None:
        # A cache that is full, truncated or of another user raises various classes.
        with suppress(Exception), numba_private.cache_directory(str(folder / spec.name)):
            return Code(cfunc(signature, cache=True, **NUMBA_OPTIONS)(kernel))
    return Code(cfunc(signature, **NUMBA_OPTIONS)(kernel))
