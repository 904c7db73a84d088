"""lowtri demo: everything in one run, in acts, each with a check and its files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowtri.cli.options import Json, Threads, note, print_json, use_threads

if TYPE_CHECKING:
    from lowtri.cli.acts.page import Played
    from lowtri.cli.acts.stage import Stage

__all__ = ["command"]


def command(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A folder for the page and its files.")] = Path(
        "out/demo"
    ),
    act: Annotated[
        list[str] | None,
        typer.Option("--act", metavar="NAME", help="This act alone; may be said several times.", show_default="all"),
    ] = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """lowtri demo --out out/demo
    lowtri demo --act steps --act who

    Acts: steps, who, roads, why, writing, peeking, switched, glassllm, speed. Each says what it promises and measures whether it is so;
    the last line counts, and the exit code is 1 if one was broken. Two small models are trained for why, writing and peeking: two
    minutes or so on two cores.
    """
    from lowtri.cli.acts import ACTS
    from lowtri.cli.acts.page import as_html
    from lowtri.cli.acts.stage import Stage
    from lowtri.errors import DataError

    unknown = [name for name in act or () if name not in ACTS]
    if unknown:
        raise DataError(f"demo: there is no act {unknown[0]!r}. Fix: one of {', '.join(ACTS)}")
    use_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    stage, played = Stage(out, note=note), []
    for name in ACTS:
        if not act or name in act:
            one = _played(name, stage)
            played.append(one)
            if not json:
                _print(len(played), one)
    promises = [promise for one in played for promise in one.told.promises]
    kept = sum(promise.kept for promise in promises)
    verdict = f"{kept} of {len(promises)} as promised"
    page = stage.write("index.html", as_html(played, verdict, _machine(sum(one.seconds for one in played))))
    if json:
        print_json({"verdict": verdict, "acts": [_as_dict(one) for one in played]})
    else:
        print(f"\n{out / page}\n{verdict}")
    if kept < len(promises):
        raise typer.Exit(1)


def _played(name: str, stage: Stage) -> Played:
    """Play one act; one that breaks off has broken its promise, and the others still play."""
    import importlib

    from lowtri.cli.acts.page import Played
    from lowtri.cli.acts.stage import Told

    act = importlib.import_module(f"lowtri.cli.acts.{name}")
    started = time.perf_counter()
    try:
        told = act.play(stage)
    except Exception as error:
        told = Told(f"{type(error).__name__}: {error}")
        told.promise(f"it runs to its end: {type(error).__name__}", False)
    return Played(name, act.TITLE, act.SENTENCE, told, time.perf_counter() - started)


def _print(number: int, one: Played) -> None:
    print(f"\n{number}. {one.title}\n{one.sentence}\n")
    print(one.told.text + "\n")
    for promise in one.told.promises:
        print(f"   {'✓' if promise.kept else '✗ NOT AS PROMISED:'} {promise.text}", flush=True)


def _as_dict(one: Played) -> dict[str, object]:
    promises = [{"text": text, "kept": kept} for text, kept in one.told.promises]
    files = [*one.told.pictures, *one.told.files]
    return {"act": one.name, "seconds": round(one.seconds, 1), "promises": promises, "files": files}


def _machine(seconds: float) -> str:
    import os
    import platform

    import torch

    import lowtri

    versions = f"lowtri {lowtri.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    where = f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads of {os.cpu_count()} CPUs"
    return f"{versions}; {where}; {time.strftime('%Y-%m-%d')}, {seconds:.0f} s"
