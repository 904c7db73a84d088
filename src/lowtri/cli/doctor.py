"""lowtri doctor: what this machine has."""

from __future__ import annotations

from typing import Annotated

import typer

from lowtri.cli.options import Json, Threads, note, print_json, use_threads


def command(
    measure: Annotated[bool, typer.Option("--measure/--no-measure", help="Measure for a second.")] = True,
    compile_ahead: Annotated[
        bool, typer.Option("--compile", help="Compile the kernels, so that no call waits for it later; no report.")
    ] = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """lowtri doctor
    lowtri doctor --compile

    What this machine has: the CPU and the kernels that fit it, which of them are compiled, versions, threads, and what one
    core reaches. Says what is missing and what follows.

    --compile compiles the kernels into the cache folder (LOWTRI_CACHE=FOLDER), for instance in a container's image: about a
    minute of CPU time. From then on new processes also run small calls on the kernels.

    Exit codes: 0 nothing is missing, 1 something is.
    """
    use_threads(threads)
    if compile_ahead:
        _compile(json)
        return
    from lowtri.benching.checkup import as_text, checkup

    report = checkup(measure, say=note)
    print_json(report) if json else print(as_text(report))
    if report["trouble"]:
        raise typer.Exit(1)


def _compile(json: bool) -> None:
    from importlib.util import find_spec

    from lowtri.errors import EngineError

    if find_spec("numba") is None:
        raise EngineError("doctor: numba is not installed, and it compiles the kernels. Fix: pip install numba.")
    from lowtri.benching.compiling import as_json, as_text, compile_kernels, shown

    with shown() as progress:
        kernels = compile_kernels(progress)
    result = as_json(kernels)
    print_json(result) if json else print(as_text(kernels))
    if result["folder"] is None:
        note("the folder for compiled code cannot be written. Fix: LOWTRI_CACHE=FOLDER names one that can.")
        raise typer.Exit(1)
