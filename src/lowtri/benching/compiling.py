"""Compiles the kernels that calls on this machine may use, ahead of the first call: ``lowtri doctor --compile``."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from lowtri.kernels import abi
from lowtri.kernels.compilation import cache_folder, compiled, is_compiled, mark_compiled_ahead
from lowtri.kernels.select import KERNELS

__all__ = ["CompiledKernel", "as_json", "as_text", "compile_kernels", "shown"]

Progress = Callable[[int, int, str], None]  # how many are done, of how many, and which is next


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel, and what it took to have its code."""

    family: str  # forward, backward, decode
    dtype: str
    rows: str  # how the kernel reads rows
    was_compiled: bool  # before: its code was only loaded
    seconds: float  # CPU time of this process


def compile_kernels(progress: Progress = lambda done, count, name: None) -> list[CompiledKernel]:
    """Compile every kernel that does not lie in the cache folder.

    Several processes may do so at once: each kernel is compiled by one of them, while the others wait for it or go on.
    """
    kernels = []
    for done, (family, spec) in enumerate(KERNELS):
        progress(done, len(KERNELS), f"{family} {spec.dtype}")
        kernel = getattr(importlib.import_module(f"lowtri.kernels.{family}"), family)
        before, start = is_compiled(kernel, spec), time.process_time()
        compiled(kernel, getattr(abi, family.upper()), spec)
        mark_compiled_ahead(kernel, spec)
        kernels.append(CompiledKernel(family, spec.dtype, spec.rows, before, time.process_time() - start))
    progress(len(KERNELS), len(KERNELS), "")
    return kernels


def as_json(kernels: list[CompiledKernel]) -> dict[str, Any]:
    folder = cache_folder()
    return {"folder": None if folder is None else str(folder), "kernels": [asdict(one) for one in kernels]}


def as_text(kernels: list[CompiledKernel]) -> str:
    """A line for each kernel, and the folder."""
    lines = [
        f"{one.family:<10}{one.dtype:<10}{one.rows:<10}"
        + ("was compiled" if one.was_compiled else f"compiled in {one.seconds:.1f} s of CPU time")
        for one in kernels
    ]
    new = [one.seconds for one in kernels if not one.was_compiled]
    total = f"{len(new)} of {len(kernels)} kernels compiled in {sum(new):.1f} s of CPU time"
    return "\n".join([*lines, f"{total}; their code is in {cache_folder() or 'memory only: no folder can be written'}"])


@contextmanager
def shown() -> Iterator[Progress]:
    """A bar on stderr; nothing where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Bar(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("")

        def progress(done: int, count: int, name: str) -> None:
            bar.update(task, completed=done, total=count, description=name)

        yield progress
