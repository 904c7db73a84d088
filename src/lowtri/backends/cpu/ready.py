"""Which kernels need no compiler, as this process found them when it first had to know.

A small call must not wait seconds for a compiler, so it runs on torch's own attention unless ``lowtri doctor --compile`` has compiled
its kernels. Kernels that calls have compiled do not count: a second run of a program would compute on another backend than the first,
and a training run that is resumed would not be bit-equal. The cache folder is looked at once in a process, so equal calls run on the
same backend from the first to the last.

Kernels are not compiled in a background thread. Type inference is Python and holds the interpreter's lock, so the program would run
at half its speed for the seconds that it saves; and an engine that changes when a thread is done would change results between two
equal calls.
"""

from __future__ import annotations

from functools import cache

from lowtri.backends.cpu.launch import kernel_file
from lowtri.files import AHEAD, cache_root

__all__ = ["compiled_before", "found"]


@cache
def compiled_before() -> frozenset[tuple[str, str]]:
    """The kernels, as family and name of the spec, that had been compiled ahead when this process first needed to know."""
    return found()


def found() -> frozenset[tuple[str, str]]:
    """Those that are compiled ahead now."""
    try:
        if not any(cache_root().glob(f"*/*/*{AHEAD}")):  # a fresh machine: Numba need not be imported
            return frozenset()
    except (OSError, RuntimeError):  # no home folder, or one that cannot be read
        return frozenset()
    is_compiled = kernel_file("compilation").is_compiled_ahead
    return frozenset(
        (family, spec.name)
        for family, spec in kernel_file("select").KERNELS
        if is_compiled(getattr(kernel_file(family), family), spec)
    )
