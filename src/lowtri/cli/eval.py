"""lowtri eval: how well a trained model predicts a text, teacher-forced and step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtri.cli.options import Json, Model, Threads, Weights, load_model, many, print_json, use_threads

if TYPE_CHECKING:
    from lowtri.training.evaluate import Evaluation


def command(
    model: Model,
    files: Annotated[list[str], typer.Argument(metavar="FILES", help="Text files, UTF-8.")],
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many tokens of each file.", show_default="all")
    ] = None,
    at_once: Annotated[bool, typer.Option("--at-once", help="Leave out the slow way, step by step.")] = False,
    weights: Weights = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """lowtri eval out/book chapter.txt
    lowtri eval smollm2 chapter.txt notes.txt --limit 2000 --json

    Loss, perplexity and bits per byte: teacher-forced, all positions in one forward as in training, and step by step
    with the cache, as in generating. A causal model gives the same figures in both; one that saw the future does not.
    """
    from lowtri.errors import DataError
    from lowtri.nn.files import encode
    from lowtri.training.corpus import read_files
    from lowtri.training.evaluate import evaluate

    use_threads(threads)
    documents = read_files(files)
    network, tokenizer, _ = load_model(model, weights=weights)
    texts = [encode(tokenizer, document.text)[:limit] for document in documents]
    predicted = [tokenizer.decode(text[1:]) for text in texts]
    with _watched(sum(max(0, len(text) - 1) for text in texts)) as progress:
        result = evaluate(
            network, texts, sum(len(text.encode()) for text in predicted), stepwise=not at_once, progress=progress
        )
    if not math.isfinite(result.at_once.loss):
        raise DataError(
            f"{model}: the loss is {result.at_once.loss}, so a weight or a logit is not a finite number.\n"
            "Fix: a model whose training did not diverge; with lowtri train, a smaller --lr."
        )
    if json:
        print_json(_as_dict(result, network.config.mask))
    else:
        _print(result, network.config.mask)


@contextmanager
def _watched(tokens: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr: step by step takes a forward pass for every position."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("tokens", total=tokens)
        yield lambda done: progress.update(task, completed=done)


def _as_dict(result: Evaluation, mask: str) -> dict[str, Any]:
    return {
        **result._asdict(),
        "at_once": result.at_once._asdict(),
        "stepwise": result.stepwise and result.stepwise._asdict(),
        "mask": mask,
    }


def _print(result: Evaluation, mask: str) -> None:
    columns = [("teacher-forced", result.at_once), ("step by step", result.stepwise)]
    shown = [(title, score) for title, score in columns if score is not None]
    print(f"{many(result.tokens, 'token')}, {many(result.bytes, 'byte')}, mask {mask}")
    print(" " * 22 + "".join(f"{title:>16}" for title, _ in shown))
    for label, name in (
        ("loss, nats a token", "loss"),
        ("perplexity", "perplexity"),
        ("bits per byte", "bits_per_byte"),
    ):
        print(f"{label:<22}" + "".join(f"{getattr(score, name):>16.5g}" for _, score in shown))
    if result.greatest_difference is not None:
        print(
            f"greatest difference of one position: {result.greatest_difference:.1e} nats "
            f"(a logit: {result.greatest_logit_difference:.1e})"
        )
