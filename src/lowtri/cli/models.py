"""lowtri generate: what a model writes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from lowtri.cli.options import (
    Json,
    Model,
    OptionalSeed,
    Threads,
    decoded,
    load_model,
    many,
    note,
    option,
    print_result,
    text_or_stdin,
    use_threads,
)
from lowtri.cli.terminal import write

_FURTHEST = 2**14  # positions whose mask is checked


def generate(
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help='The text to continue; with --chat what the user says. - reads it from stdin; "" begins a text.'
        ),
    ] = None,
    prompt_file: Annotated[Path | None, option("Read the prompt from a file; - is stdin.", metavar="FILE")] = None,
    mask: Annotated[
        str | None,
        option("Who may see whom, instead of the model's own mask.", metavar="TEXT", show_default="the model's"),
    ] = None,
    max_new_tokens: Annotated[
        int | None, option("At most so many tokens.", min=1, show_default="to the context's end")
    ] = None,
    temperature: Annotated[float, option("0: the most probable token; above: drawn, 1 as trained.")] = 0.0,
    top_k: Annotated[int | None, option("Draw among so many tokens only.", show_default="all")] = None,
    top_p: Annotated[
        float | None, option("Draw among the tokens that reach this probability.", show_default="all")
    ] = None,
    stop: Annotated[list[str] | None, option("End before this text; may be said several times.")] = None,
    chat: Annotated[bool, option("Apply the model's chat template; print the answer alone.", "--chat")] = False,
    stats: Annotated[bool, option("Tokens a second, of the prompt and of what follows.", "--stats")] = False,
    dtype: Annotated[
        str | None, option("float32, bfloat16, float16 or float64.", show_default="as the weights are stored")
    ] = None,
    no_cache: Annotated[bool, option("Recompute the whole prefix for each token.", "--no-cache")] = False,
    seed: OptionalSeed = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """lowtri generate out/book "Once upon a time"
    lowtri generate smollm2 --prompt-file question.txt --chat --max-new-tokens 80 --stats

    The prompt and what follows it go to stdout as they come; with --json the new text alone, at the end. A prompt from a
    file or from stdin is UTF-8, and a line break at its end is no part of it.

    MODEL is a folder that transformers or lowtri saved, a GGUF file, or org/name in the cache of the Hugging Face hub. It
    runs on lowtri's attention; a kind of model that cannot be switched runs on its own, and stderr says so.
    """
    import lowtri
    from lowtri.errors import DataError
    from lowtri.generation.generate import Pieces, encode

    if temperature == 0:
        drawing = {"--top-k": top_k, "--top-p": top_p, "--seed": seed}
        for name, value in drawing.items():
            if value is not None:
                raise DataError(
                    f"{name} is for drawing tokens, and nothing is drawn at temperature 0. Fix: --temperature 1"
                )
    use_threads(threads)
    prompt = _prompt(prompt, prompt_file)
    mask = None if mask is None else text_or_stdin(mask, "the mask")
    if "" in (stop or []):
        raise DataError("--stop is empty. Fix: at least one character")
    if any("\udc80" <= letter <= "\udcff" for letter in prompt):
        raise DataError(
            "the prompt is not UTF-8, as this terminal passes it on. Fix: --prompt-file FILE, with the text in UTF-8"
        )
    network, tokenizer, _ = load_model(model, dtype=dtype, mask=mask)
    text_in = _chat_text(tokenizer, prompt, model) if chat else prompt
    try:
        ids = encode(tokenizer, text_in, add_special_tokens=not chat)
    except Exception as error:  # the library tokenizers raises no other class
        raise DataError(
            f"the tokenizer of {model} cannot read this text: {error!s:.200}.\nFix: another text, or the tokenizer that the "
            "model was trained with"
        ) from None
    if not ids:
        raise DataError(
            f"the prompt is empty, and {model} has no token that begins a text. Fix: at least one character"
        )
    _check_mask(network, mask, ids, max_new_tokens)
    pieces = Pieces(tokenizer, ids)
    times: list[float] = []
    started = time.perf_counter()
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed or 0}
    tokens = lowtri.generate(network, ids, max_new_tokens, tokenizer=tokenizer, cached=not no_cache, **options)

    def written() -> Iterator[str]:
        for token in tokens:
            times.append(time.perf_counter())
            yield pieces.add(token)
        yield pieces.rest()

    text = _until(written(), stop or [])
    if json:
        continued = "".join(text)
        figures = _figures(times, started, len(ids))
        shown = figures if stats else {name: figures[name] for name in ("tokens", "tokens_per_second")}
        print_result({"prompt": prompt, "text": continued, **shown}, "", json)
        return
    if not chat:
        write(prompt, end="")
    try:
        for piece in text:
            write(piece, end="")
    except BaseException as error:  # the message of an error begins a line
        write("")
        if isinstance(error, KeyboardInterrupt):
            _note_speed(_figures(times, started, len(ids)), stats)
        raise
    write("")
    _note_speed(_figures(times, started, len(ids)), stats)


def _chat_text(tokenizer: Any, prompt: str, name: str) -> str:
    """What the user says, in the model's chat template, which is a program in jinja2's sandbox and may fail in any way."""
    from lowtri.errors import DataError

    if tokenizer.chat_template is None:
        raise DataError(f"{name} has no chat template: the model continues texts.\nFix: leave --chat out")
    says = [{"role": "user", "content": prompt}]
    try:
        return str(tokenizer.apply_chat_template(says, add_generation_prompt=True, tokenize=False))
    except Exception as error:
        reason = str(error).splitlines()[:1] or [type(error).__name__]
        raise DataError(
            f"the chat template of {name} refuses: {reason[0]:.200}\nFix: leave --chat out, or another template"
        ) from None


def _check_mask(network: Any, given: str | None, ids: list[int], new: int | None) -> None:
    """Raise where the mask shows a position a token that is not generated yet."""
    from lowtri.errors import DataError
    from lowtri.generation.models import context_of
    from lowtri.masks import as_mask, first

    fix = 'Fix: --mask with a causal mask, as "causal & window(64)"; a prefix as long as the prompt may be visible.'
    mask = getattr(network, "mask", None) if given is None else as_mask(given)
    if mask is None:
        if _sees_the_next_token(network, ids[0]):
            raise DataError(
                f"generate: {type(network).__name__} sees tokens that are generated later: it cannot write a text.\n{fix}"
            )
        return
    end = min(context_of(network) or _FURTHEST, _FURTHEST, len(ids) + (new or _FURTHEST))
    if not (mask - first(len(ids))).is_causal(end):
        raise DataError(
            f"generate: the mask {mask!r:.200} shows tokens that are generated later: a model cannot write with it.\n{fix}"
        )


def _sees_the_next_token(network: Any, token: int) -> bool:
    """Whether the logits at a token change with the token after it, in a model of transformers whose mask is its own."""
    import torch

    with torch.inference_mode():
        pairs = torch.tensor([[token, 0], [token, 1]], device=network.device)
        one, other = (network(input_ids=pair[None]).logits[0, 0] for pair in pairs)  # (V,)
    limit = 32 * torch.finfo(one.dtype).eps * float(one.abs().max())
    return float((one - other).abs().max()) > limit


def _prompt(argument: str | None, file: Path | None) -> str:
    """The prompt: from the argument, a file, or stdin."""
    from lowtri.errors import DataError

    if (argument is None) == (file is None):
        raise DataError('one prompt is expected. Fix: "a text", - for stdin, or --prompt-file FILE')
    if argument is not None and argument != "-":
        return argument
    if file is None or str(file) == "-":
        return text_or_stdin("-", "the prompt")
    return decoded(file.read_bytes(), "the prompt", str(file))


def _figures(times: list[float], started: float, prompt: int) -> dict[str, Any]:
    """Counts and tokens a second. The first new token belongs to the prompt: it needs no step of its own."""
    now = time.perf_counter()
    steps = len(times) - 1
    first, last = (times[0], times[-1]) if times else (now, now)
    return {
        "tokens": len(times),
        "tokens_per_second": round(len(times) / (now - started), 1),
        "prompt_tokens": prompt,
        "prompt_tokens_per_second": round(prompt / (first - started), 1),
        "decode_tokens_per_second": round(steps / (last - first), 1) if steps > 0 else 0.0,
    }


def _note_speed(figures: dict[str, Any], stats: bool) -> None:
    if not stats:
        note(f"{many(figures['tokens'], 'token')}, {figures['tokens_per_second']:,.1f} a second")
        return
    for label, tokens, speed in (("prompt", "prompt_tokens", "prompt_tokens"), ("decode", "tokens", "decode_tokens")):
        note(f"{label}  {many(figures[tokens], 'token'):>13}, {figures[f'{speed}_per_second']:>8,.1f} a second")


def _until(pieces: Iterable[str], stops: list[str]) -> Iterator[str]:
    """The pieces up to the first stop text, which may lie across several of them.

    >>> list(_until(["a", "b", "c", "d"], ["cx", "bc"]))
    ['a']
    """
    pending = ""
    longest = max(map(len, stops), default=0)
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
