"""lowtri explain: every step of masked attention for a sentence, with numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from lowtri.cli.options import (
    Json,
    Seed,
    Threads,
    load_model,
    many,
    mask_option,
    note,
    output_file,
    print_json,
    use_threads,
)

if TYPE_CHECKING:
    from lowtri.explaining.explanation import Explanation

_SENTENCE = "Write a poem"


def command(
    sentence: Annotated[
        str | None,
        typer.Argument(metavar="SENTENCE", help="The sentence to look at.", show_default="Write a poem"),
    ] = None,
    mask: Annotated[str | None, mask_option("Who may see whom.", "causal, or the model's")] = None,
    heads: Annotated[int, typer.Option("--heads", min=1, max=64, help="How many heads, without a model.")] = 1,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="A trained model, instead of random weights: a folder, a GGUF file, org/name, smollm2.",
        ),
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
    scores: Annotated[
        Path | None,
        typer.Option("--scores", metavar="FILE", help="Given scores, queries by keys: mask and softmax alone."),
    ] = None,
    values: Annotated[
        Path | None, typer.Option("--values", metavar="FILE", help="With --scores: a row for each key.")
    ] = None,
    html: Annotated[
        Path | None,
        output_file(
            "Write all steps there, too: a page as .html, or .json, .txt, .svg, .png, .pdf.",
            *(".html", ".json", ".txt", ".svg", ".png", ".pdf"),
            names=("--html", "--out"),
        ),
    ] = None,
    seed: Seed = 42,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """lowtri explain "Write a poem"
    lowtri explain "The black cat" --mask "causal & window(2)" --html steps.html

    Every step of masked attention, with numbers: tokens, encodings, W_q^T, q, k, v, scores, scaled, masked, weights and
    output, with and without the mask. Without a model the weights are random, and the result says so. A sentence is cut at
    spaces, and by characters where its script has none; with a model, by its tokenizer. A file of numbers is .json, .npy,
    or text as a table or as Python or NumPy print an array.
    """
    use_threads(threads)
    if values is not None and scores is None:
        _reject("--values goes with --scores", "add --scores FILE")
    if layer is not None and model is None:
        _reject("--layer is for a trained model", "add --model DIR")
    if scores is not None:
        _reject_with("scores", model=model, encodings=encodings, heads=None if heads == 1 else heads)
        explanation = _of_scores(scores, values, sentence, mask or "causal", head)
    elif model is not None:
        _reject_with("model", encodings=encodings, heads=None if heads == 1 else heads)
        explanation = _of_model(model, _SENTENCE if sentence is None else sentence, mask, layer or 0, head)
    else:
        text = _SENTENCE if sentence is None else sentence
        explanation = _without_model(text, mask or "causal", encodings, seed, heads, head)
    if html is not None:
        note(f"wrote {explanation.save(html)}")
    if json:
        print_json(explanation.as_dict())
    else:
        _print(explanation)


def _of_model(name: str, sentence: str, mask: str | None, layer: int, head: int | None) -> Explanation:
    from lowtri.explaining.steps import explain
    from lowtri.nn.files import encode

    layers = _layers_of(name) if layer else None
    if layers is not None and layer >= layers:  # before the weights are loaded
        _reject(f"--layer is {layer}, but {name} has {many(layers, 'layer')}", f"0 to {layers - 1}")
    model, tokenizer, _ = load_model(name, mask=mask)
    ids = encode(tokenizer, sentence)
    if not ids:
        _reject("the sentence is empty", 'a word at least, as in "Write a poem"')
    tokens = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    explanation = explain(model, ids, tokens=tokens, mask=mask, layer=layer, head=head)
    return replace(explanation, note=f"Tokens by the model's tokenizer. {explanation.note}")


def _layers_of(name: str) -> int | None:
    """How many layers the model's config.json declares; None if it does not say."""
    from lowtri.nn.files import read_json
    from lowtri.nn.names import folder_of

    config = read_json(folder_of(name, note), "config.json") or {}
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    return layers if isinstance(layers, int) else None


def _of_scores(scores: Path, values: Path | None, sentence: str | None, mask: str, head: int | None) -> Explanation:
    from lowtri.explaining.example import tokens_of
    from lowtri.explaining.steps import explain

    table, rows = _read(scores, most=3), None if values is None else _read(values, most=3)
    tokens = None if sentence is None else tokens_of(sentence)[0]
    return explain(scores=table, values=rows, tokens=tokens, mask=mask, head=head)


def _without_model(
    sentence: str, mask: str, encodings: Path | None, seed: int, heads: int, head: int | None
) -> Explanation:
    from lowtri.explaining.example import SEED, SENTENCE, tokens_of, untrained, worked

    # The worked example has two numbers a token: one head, or two.
    if tokens_of(sentence)[0] == SENTENCE.split() and encodings is None and seed == SEED and heads <= 2:
        return worked(mask, heads=heads, head=head)
    numbers = None if encodings is None else _read(encodings)
    return untrained(sentence, mask, encodings=numbers, seed=seed, heads=heads, head=head)


def _read(path: Path, most: int = 2) -> Any:
    """Numbers of 2 to ``most`` dimensions: NumPy's format, nested lists as JSON or NumPy print them, or a table as text."""
    import re
    from ast import literal_eval

    import numpy as np

    try:
        if path.suffix == ".npy":
            rows = np.load(path, allow_pickle=False)
        else:
            text = path.read_text(encoding="utf-8")
            if "[" in text:  # NumPy prints no commas, and a long row on several lines
                nested = text[text.index("[") : text.rindex("]") + 1]
                rows = literal_eval(re.sub(r"(?<=[\d.\]])\s+(?=[-+\d.\[])", ", ", nested))
            else:
                rows = [line.replace(",", " ").split() for line in text.splitlines() if line.strip()]
        numbers = np.asarray(rows, dtype=np.float64)
    except (ValueError, TypeError, EOFError, SyntaxError, RecursionError, MemoryError):
        _reject(f"{path} is no table of numbers", "a row for each token, all rows of equal length")
    if not numbers.size:
        _reject(f"{path} is empty", "a row of numbers for each token")
    if not 2 <= numbers.ndim <= most:
        expected = "(tokens, d_model)" if most == 2 else "(rows, columns) or (heads, rows, columns)"
        _reject(f"{path} has an array of the shape {numbers.shape}", f"an array of the shape {expected}")
    if not np.isfinite(numbers).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(numbers))[0])
        _reject(f"{path}: the number at {where} is {numbers[where]}", "finite numbers; --mask hides pairs")
    return numbers


def _reject_with(option: str, **given: object) -> None:
    why = {"model": "is for random weights; a model has its own", "scores": "does not go with given scores"}[option]
    for name, value in given.items():
        if value is not None:
            _reject(f"--{name} {why}", f"drop --{name} or --{option}")


def _reject(what: str, fix: str) -> NoReturn:
    from lowtri.errors import DataError

    raise DataError(f"explain: {what}. Fix: {fix}.")


def _print(explanation: Explanation) -> None:
    import shutil
    import sys

    from lowtri.explaining.explanation import as_text

    print(as_text(explanation, width=shutil.get_terminal_size((100, 24)).columns, colour=sys.stdout.isatty()))
