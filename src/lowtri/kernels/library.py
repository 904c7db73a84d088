"""The compiled kernels: a shared library that was built with lowtri, loaded by ctypes. No compiler takes part.

``native/`` has the library and its index, a JSON file: version, platform, size, instruction sets, names of the functions, and a hash of
the kernels' sources. In a checkout, a function that the library lacks, or has from other sources, is compiled when it is first called:
``tools/build_kernels.py`` writes a library of its own for it into ``build/kernels``.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lowtri._version import __version__
from lowtri.errors import EngineError

_PACKAGE = Path(__file__).parents[1]
_NATIVE = Path(__file__).parent / "native"
_BUILDER = _PACKAGE.parents[1] / "tools" / "build_kernels.py"
_SUFFIXES = {"linux": ".so", "macos": ".dylib", "windows": ".dll"}
_SYSTEMS = {"linux": "linux", "darwin": "macos", "win32": "windows"}
_RUN_TIME = ("library", "target", "threads")  # what compiled code does not depend on
_PROBES = ("lowtri_cpuid", "lowtri_xgetbv")
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


class Code:
    """The machine code of a function.

    Attributes:
        address: of its first instruction.  call: the function, of one address.
        file: the library, "" for code in memory.
    """

    def __init__(self, address: int, file: str = "") -> None:
        self.address = address
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        self.file = file


def this_platform() -> str:
    """The system and the machine, such as linux-x86_64."""
    machine = platform.machine().lower()
    return f"{_SYSTEMS.get(sys.platform, sys.platform)}-{_MACHINES.get(machine, machine)}"


def library_name(system: str) -> str:
    """The file of the library on a system: linux, macos or windows."""
    return "lowtri_kernels" + _SUFFIXES[system]


@cache
def sources_hash() -> str:
    """A hash of all files that compiled kernels depend on."""
    digest, others = hashlib.sha256(), [_PACKAGE / "compat" / "numba_private.py", _PACKAGE / "ops" / "dropout.py"]
    files = [x for x in sorted((_PACKAGE / "kernels").glob("*.py")) if x.stem not in _RUN_TIME]
    for file in [*files, *others, *([_BUILDER] if _BUILDER.is_file() else [])]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


@cache
def index() -> dict[str, Any]:
    """What the library holds; empty if there is no usable one. ``reason`` says why."""
    try:
        found: dict[str, Any] = json.loads((_NATIVE / "index.json").read_text(encoding="utf-8"))
        size = (_NATIVE / found["library"]).stat().st_size
    except (OSError, ValueError, KeyError, TypeError):
        return {"reason": "lowtri was installed without its compiled kernels"}
    if found["version"] != __version__:
        return {"reason": f"the compiled kernels are those of lowtri {found['version']}, not of {__version__}"}
    if found["platform"] != this_platform():
        return {"reason": f"the compiled kernels are for {found['platform']}, and this is {this_platform()}"}
    if size != found["bytes"]:
        return {"reason": f"the file of the compiled kernels has {size} bytes instead of {found['bytes']}"}
    if _BUILDER.is_file() and found["sources"] != sources_hash():
        return {"reason": "the kernels' sources have changed since they were compiled"}
    try:
        ctypes.CDLL(str(_NATIVE / found["library"]))
    except OSError as error:
        return {"reason": f"the compiled kernels cannot be loaded: {error}"}
    return found


def _compiles() -> bool:
    """Whether kernels that the library lacks can be compiled: in a checkout, with Numba."""
    return _BUILDER.is_file() and find_spec("numba") is not None and "LOWTRI_BUILDS" not in os.environ


def unusable() -> str | None:
    """Why there are no kernels, with the fix; None if there are."""
    reason: str | None = index().get("reason")
    if reason is None or _compiles():
        return None
    if _BUILDER.is_file():
        return f"{reason}. Fix: make, or pip install numba"
    return f"{reason}. Fix: pip install --force-reinstall --no-deps . in the checkout of lowtri"


def without_kernels() -> str | None:
    """What it means that there are no kernels, in a sentence for users; None if there are."""
    reason = unusable()
    if reason is None:
        return None
    return f"there are no kernels, attention runs on torch's own or on the formula, correct and slower: {reason}."


def built() -> frozenset[str]:
    """The names of the instruction sets whose kernels the library holds."""
    return frozenset(index().get("isas", ()))


def can_use(isa: str) -> bool:
    """Whether there are kernels of an instruction set, or can be."""
    return isa in built() or _compiles()


@cache
def code(symbol: str) -> Code:
    """A function of the library, by name.

    Raises:
        EngineError: if there is none.
    """
    if symbol in index().get("symbols", ()):
        file = _NATIVE / index()["library"]
    elif _compiles():
        file = _compiled_now(symbol)
    else:
        raise EngineError(f"the kernel {symbol} is missing: {unusable() or 'the library was built without it'}.")
    return Code(ctypes.cast(getattr(ctypes.CDLL(str(file)), symbol), ctypes.c_void_p).value or 0, str(file))


def _build_folder() -> Path:
    """The checkout's folder of kernels that were compiled when they were called; git's worktrees share that of their repository."""
    root = _BUILDER.parents[1]
    with suppress(OSError):
        kind, _, folder = (root / ".git").read_text(encoding="utf-8").partition(":")
        if kind == "gitdir":
            root = Path(folder.strip()).parents[2]  # REPOSITORY/.git/worktrees/NAME
    return root / "build" / "kernels" / sources_hash()


def _compiled_now(symbol: str) -> Path:
    """The library of one kernel, compiled by the checkout's own tool unless that has been done before."""
    name = "lowtri_cpu" if symbol in _PROBES else symbol
    file = _build_folder() / f"{name}.so"
    if not file.exists():
        reason = index().get("reason", "the library was built without it")
        print(f"lowtri: compiling {name}: {reason}", file=sys.stderr, flush=True)
        command = [sys.executable, str(_BUILDER), "--only", name, "--out", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "0"})
        if done.returncode or not file.exists():
            raise EngineError(f"the kernel {symbol} could not be compiled:\n{done.stderr.strip()[-2000:]}")
    return file


@cache
def cpuid(leaf: int, subleaf: int) -> tuple[int, ...]:
    """EAX, EBX, ECX and EDX (x86-64)."""
    words, kind = (ctypes.c_uint32 * 4)(), ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)
    kind(code("lowtri_cpuid").address)(leaf, subleaf, ctypes.addressof(words))
    return tuple(words)


@cache
def xgetbv() -> int:
    """The lower half of XCR0: which registers the operating system saves."""
    return int(ctypes.CFUNCTYPE(ctypes.c_uint32)(code("lowtri_xgetbv").address)())
