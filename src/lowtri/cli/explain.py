"""lowtri explain: every step of masked attention for a sentence, with numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from lowtri.cli.options import Json, Seed, Threads, note, print_json, use_threads, writable

if TYPE_CHECKING:
    from lowtri.explaining.steps import Explanation

__all__ = ["command"]


def command(
    sentence: Annotated[str, typer.Argument(metavar="SENTENCE", help="The sentence to look at.")] = "Write a poem",
    mask: Annotated[
        str | None,
        typer.Option("--mask", metavar="TEXT", help="Who may see whom.", show_default="causal, or the model's"),
    ] = None,
    heads: Annotated[int, typer.Option("--heads", min=1, help="How many heads, without a model.")] = 1,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="A trained model, instead of random weights.")
    ] = None,
    layer: Annotated[
        int | None, typer.Option("--layer", min=0, help="Which layer of the model.", show_default="0")
    ] = None,
    head: Annotated[
        int | None, typer.Option("--head", min=0, help="Which head.", show_default="all; 0 of a model")
    ] = None,
    encodings: Annotated[
        Path | None,
        typer.Option("--encodings", metavar="FILE", help="Numbers for each token: .json, .npy, or a table as text."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", "--out", metavar="FILE", help="Write all steps there as one page, too.", callback=writable
        ),
    ] = None,
    seed: Seed = 42,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """lowtri explain "Write a poem"
    lowtri explain "The black cat" --mask "causal & window(2)" --html steps.html

    Every step of masked attention, with numbers: tokens, encodings, W_q, q, k, v, scores, scaled, masked, weights and
    output, masked beside unmasked. Without a model the weights are random, and the result says so.
    """
    use_threads(threads)
    if model is not None:
        _refuse_beside_model(encodings=encodings is not None, heads=heads > 1)
        found = _of_model(model, sentence, mask, layer or 0, head)
    else:
        if layer is not None:
            _refuse("--layer is for a trained model", "add --model DIR")
        found = _without_model(sentence, mask or "causal", encodings, seed, heads, head)
    if html is not None:
        from lowtri.nn.checkpoint import write_whole

        write_whole(html, lambda beside: beside.write_text(found.to_html(), encoding="utf-8"))
        note(f"wrote {html}")
    if json:
        print_json(found.as_dict())
    else:
        _print(found)


def _of_model(folder: Path, sentence: str, mask: str | None, layer: int, head: int | None) -> Explanation:
    from lowtri.explaining.steps import explain
    from lowtri.nn.checkpoint import load

    model, tokenizer = load(folder)
    if tokenizer is None:
        _refuse(f"{folder} has no tokenizer.json, so it cannot read text", "a folder that lowtri train wrote")
    ids = tokenizer.encode(sentence).ids
    if not ids:
        _refuse("the sentence is empty", 'a word at least, as in "Write a poem"')
    tokens = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    return explain(model, ids, tokens=tokens, mask=mask, layer=layer, head=head)


def _without_model(
    sentence: str, mask: str, encodings: Path | None, seed: int, heads: int, head: int | None
) -> Explanation:
    from lowtri.explaining.example import SEED, SENTENCE, split, untrained, worked

    # The worked example has two numbers a token: one head, or two.
    if split(sentence) == SENTENCE.split() and encodings is None and seed == SEED and heads <= 2:
        return worked(mask, heads=heads, head=head)
    numbers = None if encodings is None else _read(encodings)
    return untrained(sentence, mask, encodings=numbers, seed=seed, heads=heads, head=head)


def _read(path: Path) -> Any:
    """A table of numbers, (tokens, d_model), from JSON, NumPy's format, or text with commas or blanks."""
    from json import loads

    import numpy as np

    try:
        if path.suffix == ".npy":
            rows = np.load(path, allow_pickle=False)
        else:
            text = path.read_text(encoding="utf-8")
            lines = [line.replace(",", " ").split() for line in text.splitlines() if line.strip()]
            rows = loads(text) if path.suffix == ".json" else lines
        numbers = np.asarray(rows, dtype=np.float64)
    except (ValueError, TypeError, EOFError):
        _refuse(f"{path} is no table of numbers", "a row for each token, all rows of equal length")
    if numbers.ndim != 2 or 0 in numbers.shape or not np.isfinite(numbers).all():
        _refuse(f"{path} holds {numbers.shape}, or numbers that are not finite", "(tokens, d_model) finite numbers")
    return numbers


def _refuse_beside_model(**given: bool) -> None:
    for name, there in given.items():
        if there:
            _refuse(f"--{name} is for random weights; a model has its own", f"drop --{name} or --model")


def _refuse(what: str, fix: str) -> NoReturn:
    from lowtri.errors import DataError

    raise DataError(f"explain: {what}. Fix: {fix}.")


def _print(found: Explanation) -> None:
    import shutil
    import sys

    from lowtri.explaining.show import as_text

    print(as_text(found, width=shutil.get_terminal_size((100, 24)).columns, colour=sys.stdout.isatty()))
