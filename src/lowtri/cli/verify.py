"""lowtri verify: whether a function computes masked attention, and which mistake it makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from lowtri.cli.options import Json, Out, Seed, Threads, note, use_threads


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
            metavar="NAME=WHY", help="A documented difference: a case or a mistake; may be said several times."
        ),
    ] = None,
    limit: Annotated[float, typer.Option("--limit", min=0.01, help="Seconds that one call may take.")] = 60.0,
    out: Out = None,
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """lowtri verify my_kernel.py:attend --signature flash
    lowtri verify my_kernel.py:attend --dtypes float32 --cases window
    lowtri verify my_kernel.py:attend --difference "window one too wide=our window counts from 0"

    Calls the function with masks, sizes, options and garbage of many kinds, and compares what it returns with the definition
    of attention in float64. Where they differ by more than rounding, the well-known mistake that gives the same numbers is
    named; otherwise the places that differ, and the smallest sizes that show it.

    --out writes the report as .html, .json or .txt, or its picture as .svg, .png or .pdf.
    Exit codes: 0 right, 1 wrong, 3 could not decide.
    """
    documented = _documented(difference or [])
    if out is not None and out.suffix.lower() not in _ENDINGS:
        raise typer.BadParameter(f"--out {out} ends in none of {', '.join(_ENDINGS)}. Fix: {out.stem}.html")
    use_threads(threads)
    from lowtri.verifying.verify import verify

    attend = _function(target)
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
    print(report.to_json() if json else report)
    if out is not None:
        note(f"wrote {report.save(out)}")
    if report.exit_code:
        raise typer.Exit(report.exit_code)


_ENDINGS = (".html", ".json", ".txt", ".svg", ".png", ".pdf")
_LONG = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _documented(differences: list[str]) -> dict[str, str]:
    """The sentences of NAME=WHY by their names."""
    pairs = [text.partition("=") for text in differences]
    for text, (name, _, why) in zip(differences, pairs, strict=True):
        if not name.strip() or not why.strip():
            raise typer.BadParameter(f'--difference "{text}"; expected NAME=WHY, a case or a mistake and a sentence')
    return {name.strip(): why.strip() for name, _, why in pairs}


def _function(target: str) -> Callable[..., Any]:
    """The function that FILE.py:name says."""
    import runpy
    import sys
    from pathlib import Path

    from lowtri.errors import DataError

    file, _, name = target.rpartition(":")
    if not file.endswith(".py"):
        raise DataError(f"{target}: expected FILE.py:attend, a function in a Python file.")
    path = Path(file)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    sys.path.insert(0, str(path.parent.resolve()))  # files may import their neighbours
    try:
        names = runpy.run_path(str(path))
    except Exception as error:
        raise DataError(f"{path}: {type(error).__name__}: {error}") from error
    if not callable(names.get(name)):
        functions = [key for key, value in names.items() if callable(value) and not key.startswith("_")]
        raise DataError(f"{path}: has no function {name!r}; it has {', '.join(functions[:6]) or 'none'}.")
    function: Callable[..., Any] = names[name]
    return function
