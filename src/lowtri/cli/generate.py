"""lowtri generate: a trained model continues a text, as it comes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from lowtri.cli.options import Json, Seed, Threads, many, note, print_json, use_threads

__all__ = ["command"]


def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder, a GGUF file, or packaged weights: smollm2, glassllm.")
    ],
    prompt: Annotated[str, typer.Argument(help="The text to continue; with --chat what the user says.")],
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
        bool, typer.Option("--chat", help="Ask as the model was taught to be asked; the answer alone.")
    ] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Tokens a second, of the prompt and of what follows.")] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16, float16 or float64.", show_default="as the weights are stored"),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Compute everything anew for each token.")] = False,
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """lowtri generate out/book "Once upon a time"
    lowtri generate smollm2 "Why is the sky blue?" --chat --max-new-tokens 80 --stats

    The prompt and what follows it go to stdout as they come; with --json the new text alone, at the end.

    MODEL is a folder that lowtri trained, a folder of transformers (Llama, Mistral, Qwen2, Qwen3, SmolLM, GPT-2), or a
    GGUF file of such a model, which is converted once and kept in the user's cache.
    """
    import lowtri
    from lowtri.decoding.pieces import Pieces
    from lowtri.errors import DataError

    use_threads(threads)
    if not prompt or "" in (stop or []):
        raise DataError("the prompt, or --stop, is empty. Fix: at least one character")
    if any("\udc80" <= letter <= "\udcff" for letter in prompt):
        raise DataError("the prompt is not UTF-8, as this terminal hands it over. Fix: LC_ALL=C.UTF-8, or PYTHONUTF8=1")
    network, tokenizer, folder = _load(model, dtype)
    if tokenizer is None:
        raise DataError(f"{model} has no tokenizer.json, so it cannot read text")
    asked = _asked(prompt, folder) if chat else prompt
    ids = tokenizer.encode(asked, add_special_tokens=not chat).ids
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
        found = _figures(counted, started, len(ids))
        print_json({"prompt": prompt, "text": written, **(found if stats else _brief(found))})
        return
    if not chat:
        print(prompt, end="", flush=True)
    for piece in text:
        print(piece, end="", flush=True)
    print()
    found = _figures(counted, started, len(ids))
    if stats:
        note(
            f"prompt  {many(found['prompt_tokens'], 'token'):>13}, {found['prompt_tokens_per_second']:>8,.1f} a second"
        )
        note(f"decode  {many(found['tokens'], 'token'):>13}, {found['decode_tokens_per_second']:>8,.1f} a second")
    else:
        note(f"{many(found['tokens'], 'token')}, {found['tokens_per_second']:,.1f} a second")


def _load(what: str, dtype: str | None) -> tuple[Any, Any, Path | None]:
    """The model, its tokenizer, and the folder it was read from."""
    from lowtri.errors import DataError
    from lowtri.integrations.checkpoints import PACKAGED, load_packaged, packaged_file
    from lowtri.nn.checkpoint import load
    from lowtri.nn.gguf import converted, is_gguf
    from lowtri.nn.pretrained import as_dtype

    wanted, path = as_dtype(dtype), Path(what)
    if not path.exists() and what in PACKAGED:
        path = packaged_file(what)
        if path.suffix != ".gguf":
            model = load_packaged(what, wanted)
            return model, model.tokenizer, None
    if not path.exists():
        raise DataError(
            f"{what} is not a folder: a checkpoint is a folder with config.json and model.safetensors, or a GGUF file;\n"
            f"packaged weights are {', '.join(PACKAGED)}"
        )
    if path.is_file():
        if not is_gguf(path):
            raise DataError(f"{path} is a file, but no GGUF file. Fix: the folder of a model, or a GGUF file")
        path = converted(path, note)
    network, tokenizer = load(path)
    return (network if wanted is None else network.to(wanted)), tokenizer, path


def _asked(prompt: str, folder: Path | None) -> str:
    """What the model reads when the user says ``prompt``."""
    from lowtri.errors import DataError
    from lowtri.nn.chat import chat_text

    if folder is None:
        raise DataError(
            "--chat: these weights have no chat template: the model continues texts.\nFix: leave --chat out"
        )
    return chat_text(folder, [{"role": "user", "content": prompt}])


class _Counted:
    """Tokens as pieces of text; how many there were, and when the first and the last of them came."""

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


def _brief(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("tokens", "tokens_per_second")}


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
