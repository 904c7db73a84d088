"""Options that several verbs share, and the functions that print: results to stdout, notes to stderr.

A verb declares the options that it needs: ``def command(..., model: Model, seed: Seed = 0, json: Json = False)``.
"""

from __future__ import annotations

import json as _json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtri.cli.terminal import write
from lowtri.errors import DataError

if TYPE_CHECKING:
    from lowtri.pretrained import Pretrained


def option(help: str, *names: str, **settings: Any) -> Any:
    """An option of a verb; without ``names`` it has that of its parameter. A flag names itself, or it would have a --no- form."""
    return typer.Option(*names, help=help, **settings)


def output_file(help: str, *endings: str, names: Sequence[str] = ("--out",)) -> Any:
    """An option that names a file to write: a path that cannot be written is reported before the work.

    Args:
        endings: what its name may end in.
    """

    def check(path: Path | None) -> Path | None:
        if path is None:
            return None
        folder = path.absolute().parent
        if not folder.is_dir():
            raise typer.BadParameter(f"there is no folder {path.parent}. Fix: make it first")
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder. Fix: the name of a file in it")
        if path.suffix.lower() not in endings:
            name = path.stem.strip(".") + endings[0]
            raise typer.BadParameter(f"{path} ends in none of {', '.join(endings)}. Fix: {name}")
        if not os.access(folder, os.W_OK):
            raise typer.BadParameter(f"the folder {path.parent} is read-only. Fix: another folder")
        return path

    return typer.Option(*names, metavar="FILE", help=help, callback=check)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A folder, a GGUF file, org/name in the Hugging Face hub's cache, or smollm2."
    ),
]
Seed = Annotated[int, option("The same seed gives the same result.", min=0, max=2**63 - 1)]
OptionalSeed = Annotated[
    int | None,
    option(
        "The same seed gives the same result.", min=0, max=2**63 - 1, show_default="a seed of its own, always the same"
    ),
]
Threads = Annotated[int | None, option("Threads to compute with.", min=1, max=1024, show_default="torch's own choice")]
Report = Annotated[
    Path | None,
    output_file(
        "Where to write the report, as .html, .json or .txt, or its picture, as .svg, .png or .pdf.",
        *(".html", ".json", ".txt", ".svg", ".png", ".pdf"),
    ),
]
Json = Annotated[bool, option("Print the result as JSON.", "--json")]


def note(message: str) -> None:
    """Print a line to stderr; stdout is for the result alone."""
    write(message, stream=sys.stderr)


def refuse(option: str, why: str, others: dict[str, Any]) -> None:
    """Raise where another option is given that this one would silence: what somebody says is done, or refused.

    Args:
        why: what is said about each of the others.
        others: the value of each, by its name; None and False are not given.

    Raises:
        DataError: names the first of them.
    """
    for name, value in others.items():
        if value is not None and value is not False:
            raise DataError(f"{name} {why}. Fix: drop {name} or {option}.")


def text_or_stdin(text: str, what: str) -> str:
    """The text of an argument; of ``-`` the text on stdin, without the line break at its end.

    Raises:
        DataError: if stdin is empty, or no UTF-8.
    """
    return decoded(sys.stdin.buffer.read(), what, "stdin") if text == "-" else text


def decoded(content: bytes, what: str, source: str) -> str:
    """The text of a file or of stdin, without the line break at its end.

    Raises:
        DataError: if it is empty, or no UTF-8.
    """
    try:
        text = content.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{what} is not UTF-8: {error}. Fix: iconv -f ENCODING -t utf-8, with its own encoding"
        ) from None
    if not text:  # more likely a mistake than an empty argument is; also where two arguments are -
        raise DataError(f"{what} in {source} is empty. Fix: at least one character")
    return text


def many(n: int, thing: str) -> str:
    """A number of things in words.

    >>> many(1, "token"), many(2000, "token")
    ('1 token', '2,000 tokens')
    """
    return f"{n:,} {thing}" if n == 1 else f"{n:,} {thing}s"


def print_json(result: Any) -> None:
    """The result on stdout as JSON. Not-a-number and infinity have no JSON spelling: they raise."""
    write(_json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False), json=True)


def print_result(data: Any, text: str, json: bool, *, colours: bool = False) -> None:
    """The result of a verb on stdout: its data with ``--json``, and else its text, which may have bold and dim words."""
    if json:
        print_json(data)
    else:
        write(text, colours=colours)


def print_report(report: Any, json: bool, out: Path | None) -> None:
    """Print a report of an audit or of verify, write it where ``--out`` names a file, and end with its exit code."""
    write(report.to_json() if json else str(report), json=json)
    if out is not None:
        note(f"wrote {report.save(out)}")
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def load_model(name: str, **options: Any) -> Pretrained:
    """A trained model that reads text, with lowtri's attention, and its tokenizer.

    Args:
        options: those of :func:`lowtri.integrations.transformers.load_model`.

    Raises:
        DataError: if there is no such model, or it has no tokenizer.
    """
    from lowtri.integrations.transformers.loading import load_model as load

    loaded = load(name, note=note, **options)
    if loaded.tokenizer is None:
        raise DataError(f"{name} has no tokenizer, so it cannot read text. Fix: its tokenizer.json in the same folder")
    return loaded


def use_threads(threads: int | None) -> None:
    """Compute with this many threads from now on; None leaves torch's own choice."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
