"""Options that several verbs share, and the functions that print: results to stdout, notes to stderr.

A verb declares the options that it needs: ``def command(..., mask: MaskText = "causal", seed: Seed = 0, json: Json = False)``.
"""

from __future__ import annotations

import json as _json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer


def output_file(*endings: str) -> Callable[[Path | None], Path | None]:
    """The callback of an option that names a file to write: a path that cannot be written is reported before the work.

    Args:
        endings: what its name may end in; anything if none are given.
    """

    def check(path: Path | None) -> Path | None:
        if path is None:
            return None
        folder = path.absolute().parent
        if not folder.is_dir():
            raise typer.BadParameter(f"there is no folder {path.parent}. Fix: make it first")
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder. Fix: the name of a file in it")
        if endings and path.suffix.lower() not in endings:
            name = path.stem.strip(".") + endings[0]
            raise typer.BadParameter(f"{path} ends in none of {', '.join(endings)}. Fix: {name}")
        if not os.access(folder, os.W_OK):
            raise typer.BadParameter(f"the folder {path.parent} is read-only. Fix: another folder")
        return path

    return check


MaskText = Annotated[
    str, typer.Option("--mask", metavar="TEXT", help='Who may see whom, as text: "causal", "causal & window(64)", ...')
]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, a GGUF file, org/name on the Hugging Face hub, or smollm2.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="The same seed gives the same result.")]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=1024, help="Threads to compute with.", show_default="torch's own choice"),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="Store the linear layers' weights as float16, int8, bf16 or float32, for generating.",
        show_default="as they are",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Where to write; an old file is replaced whole or not at all.",
        callback=output_file(),
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Where to write the report, as .html, .json or .txt, or its picture, as .svg, .png or .pdf.",
        callback=output_file(".html", ".json", ".txt", ".svg", ".png", ".pdf"),
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def note(message: str) -> None:
    """Print a line to stderr; stdout is for the result alone."""
    print(message, file=sys.stderr, flush=True)


def many(n: int, thing: str) -> str:
    """A number of things in words.

    >>> many(1, "token"), many(2000, "token")
    ('1 token', '2,000 tokens')
    """
    return f"{n:,} {thing}" if n == 1 else f"{n:,} {thing}s"


def print_json(result: Any) -> None:
    """The result on stdout as JSON. Not-a-number and infinity have no JSON spelling: they raise."""
    print(_json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False))


def use_threads(threads: int | None) -> None:
    """Compute with this many threads from now on; None leaves torch's own choice."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
