"""lowtri generate: a trained model continues a text, as it comes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from lowtri.cli.options import Json, Seed, Threads, note, print_json, use_threads

__all__ = ["command"]


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A trained model: config.json, model.safetensors, ...")],
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="At most so many tokens.", show_default="to the context's end")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0: the most probable token; above: drawn, 1 as trained.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw among so many tokens only.", show_default="all")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw among the tokens that reach this probability.", show_default="all")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be said several times.")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Compute everything anew for each token.")] = False,
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """lowtri generate out/book "Once upon a time"
    lowtri generate out/book "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 7 --stop "."

    The prompt and what follows it go to stdout as they come; with --json the new text alone, at the end.
    """
    import lowtri
    from lowtri.errors import DataError
    from lowtri.nn.checkpoint import load

    use_threads(threads)
    if not prompt or "" in (stop or []):
        raise DataError("the prompt, or --stop, is empty. Fix: at least one character")
    model, tokenizer = load(folder)
    if tokenizer is None:
        raise DataError(f"{folder} has no tokenizer.json, so it cannot read text")
    started = time.perf_counter()
    pieces = lowtri.generate(
        model,
        prompt,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        tokenizer=tokenizer,
        cached=not no_cache,
    )
    counted = _Counted(pieces)
    text = _until(counted, stop or [])
    if json:
        result = {"prompt": prompt, "text": "".join(text), "tokens": counted.count}
        print_json({**result, "tokens_per_second": round(counted.count / (time.perf_counter() - started), 1)})
        return
    print(prompt, end="", flush=True)
    for piece in text:
        print(piece, end="", flush=True)
    print()
    note(f"{counted.count} tokens, {counted.count / (time.perf_counter() - started):,.1f} a second")


class _Counted:
    """The pieces of text, one a token, and how many there were."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces, self.count = pieces, 0

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            self.count += 1
            yield piece


def _until(pieces: Iterable[str], stops: list[str]) -> Iterator[str]:
    """The pieces up to the first stop text, which may lie across several of them.

    >>> list(_until(["a", "b", "c", "d"], ["cx", "bc"]))
    ['a']
    """
    held, longest = "", max(map(len, stops), default=0)
    for piece in pieces:
        held += piece
        found = [at for stop in stops if (at := held.find(stop)) >= 0]
        if found:
            if min(found):
                yield held[: min(found)]
            return
        # The last characters may be the start of a stop: they wait for what follows.
        certain = max(0, len(held) - max(0, longest - 1))
        if certain:
            yield held[:certain]
        held = held[certain:]
    if held:
        yield held
