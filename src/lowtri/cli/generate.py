"""lowtri generate: a trained model continues a text, printed as it is generated."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from lowtri.cli.options import (
    Json,
    Model,
    Seed,
    Threads,
    Weights,
    load_model,
    many,
    mask_option,
    note,
    print_json,
    use_threads,
)

_FURTHEST = 2**14  # positions whose mask is checked


def command(
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help='The text to continue; with --chat what the user says. - reads it from stdin; "" begins a text.'
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="Read the prompt from a file; - is stdin.")
    ] = None,
    mask: Annotated[
        str | None, mask_option("Who may see whom, instead of the model's own mask.", "the model's")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="At most so many tokens.", show_default="to the context's end")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0: the most probable token; above: drawn, 1 as trained.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw among so many tokens only.", show_default="all")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw among the tokens that reach this probability.", show_default="all")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be said several times.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Apply the model's chat template; print the answer alone.")
    ] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Tokens a second, of the prompt and of what follows.")] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16, float16 or float64.", show_default="as the weights are stored"),
    ] = None,
    weights: Weights = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Recompute the whole prefix for each token.")] = False,
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """lowtri generate out/book "Once upon a time"
    lowtri generate smollm2 --prompt-file question.txt --chat --max-new-tokens 80 --stats --weights float16

    The prompt and what follows it go to stdout as they come; with --json the new text alone, at the end. A prompt from a
    file or from stdin is UTF-8, and a line break at its end is no part of it.

    MODEL is a folder that lowtri trained, a folder of transformers (Llama, Mistral, Qwen2, Qwen3, SmolLM, GPT-2), or a
    GGUF file of such a model, which is converted once and kept in the user's cache. org/name is downloaded from the
    Hugging Face hub.
    """
    import lowtri
    from lowtri.errors import DataError
    from lowtri.generation.text import Pieces
    from lowtri.nn.chat import chat_text
    from lowtri.nn.files import encode

    use_threads(threads)
    prompt = _prompt(prompt, prompt_file)
    if "" in (stop or []):
        raise DataError("--stop is empty. Fix: at least one character")
    if any("\udc80" <= letter <= "\udcff" for letter in prompt):
        raise DataError("the prompt is not UTF-8, as this terminal passes it on. Fix: LC_ALL=C.UTF-8, or PYTHONUTF8=1")
    network, tokenizer, folder = load_model(model, dtype=dtype, mask=mask, weights=weights)
    text_in = chat_text(folder, [{"role": "user", "content": prompt}]) if chat else prompt
    ids = encode(tokenizer, text_in, add_special_tokens=not chat)
    if not ids:
        raise DataError(
            f"the prompt is empty, and {model} has no token that begins a text. Fix: at least one character"
        )
    _check_mask(network, len(ids), max_new_tokens)
    started = time.perf_counter()
    tokens = lowtri.generate(
        network,
        ids,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        tokenizer=tokenizer,
        cached=not no_cache,
    )
    counted = _Counted(tokens, Pieces(tokenizer, ids))
    text = _until(counted, stop or [])
    if json:
        written = "".join(text)
        figures = _figures(counted, started, len(ids))
        if not stats:
            figures = {name: figures[name] for name in ("tokens", "tokens_per_second")}
        print_json({"prompt": prompt, "text": written, **figures})
        return
    if not chat:
        print(prompt, end="", flush=True)
    try:
        for piece in text:
            print(piece, end="", flush=True)
    except BaseException as error:  # the message of an error begins a line
        print(flush=True)
        if isinstance(error, KeyboardInterrupt):
            _report(_figures(counted, started, len(ids)), stats)
        raise
    print()
    _report(_figures(counted, started, len(ids)), stats)
    if weights is None and sys.stderr.isatty() and hasattr(network, "quantize"):
        note("faster, with rounded weights: --weights int8")


def _check_mask(network: Any, prompt: int, new: int | None) -> None:
    """Raise where the mask shows a position a token that is not generated yet."""
    from lowtri.errors import DataError
    from lowtri.generation.models import context_of
    from lowtri.masks import first

    end = min(context_of(network) or _FURTHEST, _FURTHEST, prompt + (new or _FURTHEST))
    if not (network.mask - first(prompt)).is_causal(end):
        raise DataError(
            f"generate: the mask {network.mask!r:.200} shows tokens that are generated later: a model cannot write with it.\n"
            'Fix: --mask with a causal mask, as "causal & window(64)"; a prefix as long as the prompt may be visible.'
        )


def _report(figures: dict[str, Any], stats: bool) -> None:
    if not stats:
        note(f"{many(figures['tokens'], 'token')}, {figures['tokens_per_second']:,.1f} a second")
        return
    note(
        f"prompt  {many(figures['prompt_tokens'], 'token'):>13}, {figures['prompt_tokens_per_second']:>8,.1f} a second"
    )
    note(f"decode  {many(figures['tokens'], 'token'):>13}, {figures['decode_tokens_per_second']:>8,.1f} a second")


def _prompt(argument: str | None, file: Path | None) -> str:
    """The prompt: from the argument, a file, or stdin."""
    from lowtri.errors import DataError

    if (argument is None) == (file is None):
        raise DataError('one prompt is expected. Fix: "a text", - for stdin, or --prompt-file FILE')
    if argument is not None and argument != "-":
        return argument
    try:
        source = None if file is None or str(file) == "-" else file
        text = (sys.stdin.buffer.read() if source is None else source.read_bytes()).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"the prompt is not UTF-8: {error}. Fix: iconv -t utf-8") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:  # more likely a mistake than an empty argument is
        raise DataError(f"the prompt in {source or 'stdin'} is empty. Fix: at least one character")
    return text


class _Counted:
    """Tokens as pieces of text; their number, and the times of the first and the last."""

    def __init__(self, tokens: Iterator[int], pieces: Any) -> None:
        self._tokens, self._pieces = tokens, pieces
        self.count, self.first, self.last = 0, 0.0, 0.0

    def __iter__(self) -> Iterator[str]:
        for token in self._tokens:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.count += 1
            yield self._pieces.add(token)
        rest = self._pieces.rest()
        if rest:
            yield rest


def _figures(counted: _Counted, started: float, prompt: int) -> dict[str, Any]:
    """Counts and tokens a second. The first new token belongs to the prompt: it needs no step of its own."""
    now = time.perf_counter()
    first, last = (counted.first, counted.last) if counted.count else (now, now)
    steps = counted.count - 1
    return {
        "tokens": counted.count,
        "tokens_per_second": round(counted.count / (now - started), 1),
        "prompt_tokens": prompt,
        "prompt_tokens_per_second": round(prompt / (first - started), 1),
        "decode_tokens_per_second": round(steps / (last - first), 1) if steps > 0 else 0.0,
    }


def _until(pieces: Iterable[str], stops: list[str]) -> Iterator[str]:
    """The pieces up to the first stop text, which may lie across several of them.

    >>> list(_until(["a", "b", "c", "d"], ["cx", "bc"]))
    ['a']
    """
    pending, longest = "", max(map(len, stops), default=0)
    for piece in pieces:
        pending += piece
        ends = [start for stop in stops if (start := pending.find(stop)) >= 0]
        if ends:
            if min(ends):
                yield pending[: min(ends)]
            return
        # The last characters may be the start of a stop text, and are kept until more text comes.
        complete = max(0, len(pending) - max(0, longest - 1))
        if complete:
            yield pending[:complete]
        pending = pending[complete:]
    if pending:
        yield pending
