"""lowtri bench and lowtri doctor: how fast attention is on this machine, and what the machine has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lowtri.cli.options import Json, Threads, note, option, output_file, print_result, use_threads

_OPTIONS = {  # of bench, for each thing that is measured
    "the table": ("--full", "--case", "--threads", "--rounds", "--flex", "--list"),
    "--plot": ("--dtype", "--quick", "--threads"),
    "--never-slower": ("--quick",),
}


def bench(
    full: Annotated[bool, option("The whole table, slow implementations as well: half an hour.", "--full")] = False,
    case: Annotated[
        list[str] | None, option('Only cases with these words in their names: "window bf16".', metavar="WORDS")
    ] = None,
    threads: Annotated[int, option("Threads to compute with.", min=1)] = 1,
    rounds: Annotated[int, option("How often each implementation runs, at least.", min=7)] = 7,
    flex: Annotated[bool, option("Also torch's FlexAttention, compiled; needs a C++ compiler.", "--flex")] = False,
    list_cases: Annotated[bool, option("Only list the cases.", "--list")] = False,
    plot: Annotated[
        Path | None,
        output_file(
            "Instead, draw time and memory against length: svg, png or pdf.", ".svg", ".png", ".pdf", names=("--plot",)
        ),
    ] = None,
    dtype: Annotated[str | None, option("With --plot: float32, bf16 or float16.", show_default="float32")] = None,
    never_slower: Annotated[
        bool, option("Instead, a grid of calls by turns with torch; lists those that are slower.", "--never-slower")
    ] = False,
    quick: Annotated[bool, option("With --never-slower or --plot: a few small calls only.", "--quick")] = False,
    json: Json = False,
) -> None:
    """lowtri bench
    lowtri bench --plot speed.svg

    How fast masked attention is on this machine: lowtri's kernels, torch's attention and the plain formula in turns, in one
    process, medians; compared with the most that the CPU can do. The short table takes under two minutes on an idle machine.

    Outputs are compared before anything is timed. Exit code 3: they differ, so nothing was timed.

    --plot runs causal attention, a window and documents over 512 to 131,072 tokens of one head, in turns with torch, for some five
    minutes. torch's line ends where its table of pairs would not fit into memory, and both where one run would take over 30 seconds.

    --never-slower times every dtype, size and kind of mask as engine="auto" runs it, forward, with
    gradients and in decoding, on one thread and on two. Calls that take over 20 us and over a twentieth more than torch's are
    measured again at the end. Exit code 1: a call is slower both times.
    """
    from lowtri.benching.cases import choose
    from lowtri.errors import DataError, EngineError
    from lowtri.kernels import library

    mode = "--plot" if plot is not None else "--never-slower" if never_slower else "the table"
    given = {"--full": full, "--case": case, "--flex": flex, "--rounds": rounds != 7, "--never-slower": never_slower}
    given |= {"--list": list_cases, "--threads": threads != 1, "--dtype": dtype is not None, "--quick": quick}
    for name in (name for name, value in given.items() if value and name != mode):
        if name not in _OPTIONS[mode]:
            modes = [one for one, options in _OPTIONS.items() if name in options]
            raise DataError(f"bench: {name} does not go with {mode}. Fix: drop {name}; it is for {' or '.join(modes)}.")
    cases = choose(full, case or ())
    if list_cases:
        names = [case.name for case in cases]
        print_result(names, "\n".join(names), json)
        return
    if reason := library.unusable():
        raise EngineError(f"bench: there are no kernels: {reason}.")

    from lowtri.benching.machine import facts, headline
    from lowtri.benching.peers import FLEX, FORMULA, SDPA
    from lowtri.benching.table import LONGEST, as_json, as_text, measure
    from lowtri.system import cpus

    if never_slower:
        _never_slower(quick, facts(1), json)
        return
    if threads > cpus():
        raise DataError(
            f"bench: --threads is {threads}, but this process may use {cpus()} CPUs. Fix: at most {cpus()}."
        )
    if plot is not None:
        _plot(plot, dtype or "float32", quick, facts(threads), json)
        return
    peers = [SDPA, *[FLEX] * flex, FORMULA]
    machine = facts(threads)
    note(headline(machine))
    longest = 60.0 if full else LONGEST
    rows = list(measure(cases, peers, threads, rounds=rounds, longest=longest, progress=note))
    print_result(as_json(rows, machine), as_text(rows, machine), json)


def _plot(file: Path, dtype: str, quick: bool, machine: dict[str, Any], json: bool) -> None:
    from lowtri.benching.growth import DTYPES, LENGTHS, QUICK, as_json, as_text, check_plot, draw, grow
    from lowtri.benching.machine import headline
    from lowtri.errors import DataError

    if dtype not in DTYPES:
        raise DataError(f"bench: --dtype is {dtype!r}. Fix: one of {', '.join(DTYPES)}.")
    check_plot()  # before minutes of measuring
    note(headline(machine))
    lines = list(grow(dtype, machine["threads"], QUICK if quick else LENGTHS, progress=note))
    draw(lines, machine, dtype, file)
    note(f"wrote {file}")
    print_result(as_json(lines, {**machine, "dtype": dtype}), as_text(lines), json)


def _never_slower(quick: bool, machine: dict[str, Any], json: bool) -> None:
    from lowtri.benching.cases import grid
    from lowtri.benching.machine import headline
    from lowtri.benching.never_slower import as_json, as_text, compare
    from lowtri.system import cpus

    note(headline(machine))
    found = compare(grid(quick, (1, 2) if cpus() > 1 else (1,)), progress=note)
    print_result(as_json(found, machine), as_text(found, headline(machine)), json)
    if any(one.is_slower for one in found):
        raise typer.Exit(1)


def doctor(
    measure: Annotated[bool, option("Measure for a second.")] = True, threads: Threads = None, json: Json = False
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
    print_result(report, as_text(report), json)
    if report["trouble"]:
        raise typer.Exit(1)
