"""lowtri verify: whether a function computes masked attention, and which mistake it makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from lowtri.cli.options import Json, Report, Seed, Threads, print_report, use_threads


def command(
    target: Annotated[str, typer.Argument(metavar="FILE.py:attend", help="The function, in a Python file.")],
    signature: Annotated[
        str, typer.Option("--signature", help="How it is called: mask, sdpa, flash or flex.")
    ] = "mask",
    dtypes: Annotated[
        str | None, typer.Option("--dtypes", help="Which dtypes, with commas; default: float32,bfloat16,float16.")
    ] = None,
    cases: Annotated[str | None, typer.Option("--cases", help="Only the cases whose name contains this text.")] = None,
    device: Annotated[str, typer.Option("--device", help="Where torch tensors lie.")] = "cpu",
    gradients: Annotated[bool, typer.Option(help="Whether gradients are compared, too.")] = True,
    difference: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=WHY",
            help='A documented difference: a case or a mistake, and the reason: "mask inverted=True means hidden". May be repeated.',
        ),
    ] = None,
    limit: Annotated[float, typer.Option("--limit", min=0.01, help="Seconds that one call may take.")] = 60.0,
    out: Report = None,
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """lowtri verify my_kernel.py:attend --signature flash
    lowtri verify my_kernel.py:attend --dtypes float32 --cases window

    Calls the function with masks, sizes, options and garbage of many kinds, and compares what it returns with the definition
    of attention in float64. Where they differ by more than rounding, the well-known mistake that gives the same numbers is
    named; otherwise the places that differ, and the smallest sizes that show it.

    Exit codes: 0 right, 1 wrong, 3 could not decide.
    """
    documented = _documented(difference or [])
    use_threads(threads)
    from lowtri.auditing.loading import function_in_file
    from lowtri.verifying.verify import verify

    attend, _ = function_in_file(target, "attend")
    chosen = None if dtypes is None else [_LONG.get(name.strip(), name.strip()) for name in dtypes.split(",")]
    report = verify(
        attend,
        signature=signature,
        dtypes=chosen,
        device=device,
        gradients=gradients,
        cases=cases,
        differences=documented,
        limit=limit,
        seed=seed,
    )
    report = replace(report, name=target.rpartition(":")[2])  # of what a decorator returns, the name in the file
    print_report(report, json, out)


_LONG = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _documented(differences: list[str]) -> dict[str, str]:
    """The sentences of NAME=WHY by their names."""
    pairs = [text.partition("=") for text in differences]
    for text, (name, _, why) in zip(differences, pairs, strict=True):
        if not name.strip() or not why.strip():
            raise typer.BadParameter(f'--difference "{text}"; expected NAME=WHY, a case or a mistake and a sentence')
    return {name.strip(): why.strip() for name, _, why in pairs}
