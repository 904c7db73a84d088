"""lowtri bench and lowtri doctor: how fast attention is on this machine, and what the machine has."""

from __future__ import annotations

from typing import Annotated

import typer

from lowtri.cli.options import Json, Threads, note, option, print_result, use_threads
from lowtri.extras import is_installed, missing


def bench(threads: Annotated[int, option("Threads to compute with.", min=1)] = 1, json: Json = False) -> None:
    """lowtri bench
    lowtri bench --threads 2 --json

    How fast masked attention is on this machine: causal, under a window, and with gradients, in float32 and bf16. lowtri's kernels and
    torch's attention run interleaved, medians are shown, beside the most that the CPU can do; then a call through the functions of each
    installed library, on lowtri and on its own attention. Under a minute on an idle machine.

    Outputs are compared before anything is timed. Exit code 3: they differ, so nothing was timed.
    """
    from lowtri.errors import DataError, EngineError
    from lowtri.kernels import library
    from lowtri.system import cpus

    if reason := library.unusable():
        raise EngineError(f"bench: there are no kernels: {reason}.")
    if threads > cpus():
        raise DataError(
            f"bench: --threads is {threads}, but this process may use {cpus()} CPUs. Fix: at most {cpus()}."
        )
    from lowtri.benching import CALLS, as_json, as_text, facts, headline, measure
    from lowtri.integrations.measured import libraries_json, libraries_text, measure_libraries

    machine = facts(threads)
    note(headline(machine))
    rows = list(measure(CALLS, threads=threads, progress=note))
    libraries = list(measure_libraries(threads, progress=note))
    result = as_json(rows, machine) | {"libraries": libraries_json(libraries)}
    print_result(result, f"{as_text(rows, machine)}\n\n{libraries_text(libraries)}", json)


def doctor(
    measure: Annotated[bool, option("Measure for a second.")] = True, threads: Threads = None, json: Json = False
) -> None:
    """lowtri doctor
    lowtri doctor --no-measure --json

    What this machine has: the CPU, the kernels that the library holds and those that run, versions, threads, and what one
    core reaches. Says what is missing and what follows.

    Exit codes: 0 nothing is missing, 1 something is.
    """
    absent = [name for name in ("numpy", "torch") if not is_installed(name)]
    if "numpy" in absent:  # nothing else can be asked
        trouble = missing("lowtri", *absent)
        print_result({"trouble": [trouble]}, f"missing   {trouble}", json)
        raise typer.Exit(1)
    if "torch" not in absent:  # else the report says that it is missing
        use_threads(threads)
    from lowtri.doctor import as_text, examine

    report = examine(measure, progress=note)
    print_result(report, as_text(report), json)
    if report["trouble"]:
        raise typer.Exit(1)
