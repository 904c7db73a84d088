"""lowtri bench: how fast attention is on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lowtri.cli.options import Json, note, print_json


def command(
    full: Annotated[
        bool, typer.Option("--full", help="The whole table, slow implementations as well: half an hour.")
    ] = False,
    case: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="WORDS", help='Only cases with these words in their names: "window bf16".'),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads to compute with.")] = 1,
    rounds: Annotated[int, typer.Option("--rounds", min=7, help="How often each implementation runs, at least.")] = 7,
    flex: Annotated[
        bool, typer.Option("--flex", help="Also torch's FlexAttention, compiled; needs a C++ compiler.")
    ] = False,
    list_cases: Annotated[bool, typer.Option("--list", help="Only list the cases.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the table there, too.")] = None,
    json: Json = False,
) -> None:
    """lowtri bench
    lowtri bench --case "decode" --case "window bf16" --plot bench.png

    How fast masked attention is on this machine: lowtri's kernels, torch's attention and the plain formula in turns, in one
    process, medians; compared with the most that the CPU can do. The short table takes under two minutes on an idle machine.

    Outputs are compared before anything is timed. Exit code 3: they differ, so nothing was timed.
    """
    from importlib.util import find_spec

    from lowtri.benching.cases import choose
    from lowtri.errors import DataError, EngineError

    cases = choose(full, case or ())
    if list_cases:
        names = [case.name for case in cases]
        print_json(names) if json else print(*names, sep="\n")
        return
    if find_spec("numba") is None:
        raise EngineError("bench: numba is not installed, and the kernels need it. Fix: pip install numba.")

    from lowtri.benching.machine import cpus, facts
    from lowtri.benching.measure import LONGEST, measure
    from lowtri.benching.peers import FLEX, FORMULA, SDPA
    from lowtri.benching.show import as_json, as_text, check_plot, draw, headline

    if threads > cpus():
        raise DataError(
            f"bench: --threads is {threads}, but this process may use {cpus()} CPUs. Fix: at most {cpus()}."
        )
    if plot is not None:
        check_plot(plot)
    peers = [SDPA, *[FLEX] * flex, FORMULA]
    machine = facts(threads)
    note(headline(machine))
    longest = 60.0 if full else LONGEST
    rows = list(measure(cases, peers, threads, rounds=rounds, longest=longest, say=note))
    if plot is not None:
        draw(rows, machine, plot)
        note(f"wrote {plot}")
    print_json(as_json(rows, machine)) if json else print(as_text(rows, machine))
