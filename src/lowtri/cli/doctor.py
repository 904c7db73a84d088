"""lowtri doctor: what this machine has."""

from __future__ import annotations

from typing import Annotated

import typer

from lowtri.cli.options import Json, Threads, note, print_json, use_threads


def command(
    measure: Annotated[bool, typer.Option("--measure/--no-measure", help="Measure for a second.")] = True,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """lowtri doctor
    lowtri doctor --no-measure --json

    What this machine has: the CPU, the kernels that the library holds and those that run, versions, threads, and what one
    core reaches. Says what is missing and what follows.

    Exit codes: 0 nothing is missing, 1 something is.
    """
    use_threads(threads)
    from lowtri.benching.checkup import as_text, checkup

    report = checkup(measure, progress=note)
    print_json(report) if json else print(as_text(report))
    if report["trouble"]:
        raise typer.Exit(1)
