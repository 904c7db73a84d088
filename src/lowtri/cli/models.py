"""lowtri train, lowtri generate and lowtri eval: a model from text files, what it writes, and how well it predicts."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtri.cli.options import (
    Json,
    Model,
    Seed,
    Threads,
    Weights,
    load_model,
    many,
    note,
    option,
    print_result,
    use_threads,
)

if TYPE_CHECKING:
    from lowtri.training.run import Outcome, Plan
    from lowtri.training.train import Step

_FURTHEST = 2**14  # positions whose mask is checked
_SECONDS = 10.0  # between two lines in a log file, at most, if steps are shorter


def train(
    ctx: typer.Context,
    out: Annotated[Path, option("The folder to write.", metavar="DIR")],
    files: Annotated[list[str] | None, typer.Argument(metavar="FILES", help="Text files, UTF-8.")] = None,
    mask: Annotated[
        str, option('Who may see whom, as text: "causal", "causal & window(64)", ...', metavar="TEXT")
    ] = "causal",
    steps: Annotated[int, option("Training steps.")] = 1000,
    batch: Annotated[int, option("Rows in a step.")] = 16,
    context: Annotated[int, option("Tokens in a row, and the model's longest input.")] = 256,
    vocabulary: Annotated[int, option("Tokens to learn; 258 is bytes alone.")] = 4096,
    hidden: Annotated[int, option("The model's width.", min=1)] = 256,
    layers: Annotated[int, option("Layers.", min=1)] = 4,
    heads: Annotated[int, option("Query heads.", min=1)] = 4,
    kv_heads: Annotated[int | None, option("Key/value heads.", min=1, show_default="as many as heads")] = None,
    cell: Annotated[str | None, option("lstm, gru or rnn: a recurrent model, no decoder.")] = None,
    lr: Annotated[float, option("The highest learning rate.")] = 1e-3,
    save_every: Annotated[int, option("Steps between savings: the most that a kill can lose.")] = 100,
    accumulate: Annotated[int, option("Parts of a batch, computed one after the other.")] = 1,
    dtype: Annotated[str, option("float32, or bfloat16 with float32 weights.")] = "float32",
    dp: Annotated[int | None, option("Under torchrun: groups that share the rows of a batch.")] = None,
    sp: Annotated[int | None, option("Under torchrun: processes that share the tokens of a row.")] = None,
    resume: Annotated[bool, option("Continue the run in --out, with its options.", "--resume")] = False,
    device: Annotated[str, option("Where to compute, as torch names it: cpu, cuda, ...")] = "cpu",
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """lowtri train book.txt --out out/book
    lowtri train *.txt --out out/texts --mask "causal & window(128)" --steps 500

    Train a decoder on text. The folder has config.json, model.safetensors and tokenizer.json as transformers reads
    them, and training.json has the losses. Each file is a document that sees no other.

    A run that was killed goes on with --resume, which needs --out alone, and ends with the same weights. With --resume and
    more --steps, a finished run goes on, too.

    On several processes, which share rows (--dp) and the tokens of long rows (--sp), with sharded weights:
    torchrun --nproc-per-node 4 -m lowtri train *.txt --out out/texts --context 4096 --dp 2 --sp 2
    """
    from lowtri.errors import DataError
    from lowtri.masks import as_mask
    from lowtri.training.corpus import Recipe
    from lowtri.training.lock import LOCK
    from lowtri.training.processes import processes_of_torchrun
    from lowtri.training.run import Plan, read_plan, run

    values = {**ctx.params, "mask": repr(as_mask(mask, "--mask"))}
    values["files"] = tuple(str(Path(file).resolve()) for file in files or ())
    for folder in (out, *out.parents):
        if folder.exists() and not folder.is_dir():
            raise DataError(f"--out: {folder} is a file. Fix: a folder")
    begun = read_plan(out) if resume else None
    if begun is not None:
        # Options that are not given are as before. Those that are given must be as before, too: run() compares.
        omitted = {name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "DEFAULT"}
        if not files:
            omitted.add("files")  # an empty list counts as given in older versions of click
        before = vars(begun) | vars(begun.recipe)
        values |= {name: before[name] for name in omitted & before.keys()}
    elif resume and not files:
        raise DataError(
            f"--resume: no run began in {out}. Fix: the folder of a run, or text files to start one: "
            f"lowtri train book.txt --out {shlex.quote(str(out))}"
        )
    elif resume:
        note(f"nothing was begun in {out}: starting")
    elif out.exists() and any(path.name != LOCK for path in out.iterdir()):
        raise DataError(f"--out: {out} is not empty. Fix: another folder, or --resume to go on with the run in it")
    if not values["files"]:
        raise DataError(
            "FILES: none were given. Fix: name text files, for instance: lowtri train book.txt --out out/book"
        )
    # At least ten points on the curve, and at most 100 steps between them.
    every = max(1, min(100, int(values["steps"]) // 10))
    values["validate_every"] = every if begun is None else begun.recipe.validate_every
    recipe = Recipe(**{f.name: values[f.name] for f in fields(Recipe) if f.name in values})
    plan = Plan(**{f.name: values[f.name] for f in fields(Plan) if f.name in values}, recipe=recipe)
    _check_sizes(plan)
    use_threads(threads)
    leaks = not as_mask(plan.mask).is_causal(min(recipe.context, _FURTHEST))
    _check_device(device)
    with processes_of_torchrun(dp, sp) as processes:
        progress = note if processes.is_main else lambda _: None
        if leaks:
            progress(f"the mask {plan.mask} shows what is predicted: this loss means nothing. Fix: a causal mask")
        try:
            with _watched(recipe.steps, processes.is_main) as on_step:
                outcome = run(plan, out, device=device, progress=progress, on_step=on_step, processes=processes)
        except KeyboardInterrupt:
            if read_plan(out) is not None:
                progress(f"what was saved is in {out}; go on with: lowtri train --out {shlex.quote(str(out))} --resume")
            raise
        if processes.is_main:
            _print_outcome(outcome, json)


def _check_sizes(plan: Plan) -> None:
    """Raise where heads do not divide the width: before the texts are read, and by the names of the options."""
    from lowtri.errors import DataError

    if plan.cell is not None:
        return
    if plan.hidden % (2 * plan.heads):  # rotary embedding rotates a head's entries in pairs
        near = 2 * plan.heads * max(1, round(plan.hidden / (2 * plan.heads)))
        raise DataError(
            f"train: --hidden is {plan.hidden}, but {plan.heads} heads need an even number of entries each. "
            f"Fix: --hidden {near}, or other --heads"
        )
    if plan.kv_heads is not None and plan.heads % plan.kv_heads:
        raise DataError(
            f"train: --kv-heads is {plan.kv_heads}, but each serves the same number of the {plan.heads} query heads. "
            f"Fix: a divisor of {plan.heads}"
        )


def _check_device(device: str) -> None:
    import torch

    from lowtri.errors import DataError

    try:
        torch.zeros(1, device=device).item()  # which the device meta cannot
    except (RuntimeError, AssertionError) as error:
        raise DataError(f"--device: {device!r} cannot be used: {str(error).splitlines()[0]}") from None


@contextmanager
def _watched(steps: int, is_main: bool) -> Iterator[Callable[[Step], None]]:
    """A progress bar on a terminal; in a log file lines: the first step, each validation, and every ten seconds. Both on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console, last, held_out = Console(stderr=True), -_SECONDS, ""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))

    def line(step: Step) -> None:
        nonlocal last
        if is_main and (step.validation is not None or time.monotonic() - last >= _SECONDS):
            last, held_out = time.monotonic(), "" if step.validation is None else f"held out {step.validation:.4f}  "
            speed = f"lr {step.lr:.1e}  {step.tokens_per_second:,.0f} tokens/s"
            note(f"step {step.number:>6}  loss {step.loss:.4f}  {held_out}{speed}")

    if not is_main or not console.is_terminal:
        yield line
        return
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps)

        def on_step(step: Step) -> None:
            nonlocal held_out
            held_out = f"held out {step.validation:.3f}" if step.validation is not None else held_out
            description = f"loss {step.loss:.3f}  {held_out}  {step.tokens_per_second:,.0f} tokens/s"
            progress.update(task, completed=step.number, description=description)

        yield on_step


def _print_outcome(outcome: Outcome, json: bool) -> None:
    history = outcome.history
    recent = history.losses[-50:]
    result: dict[str, Any] = {
        "out": str(outcome.folder),
        "parameters": outcome.parameters,
        "tokens": outcome.tokens,
        "steps": len(history.losses),
        "loss": sum(recent) / len(recent),  # one batch alone is noisy
        "held_out_loss": history.validations[-1][1] if history.validations else None,
        "tokens_per_second": round(history.tokens_per_second),
    }
    held_out = f"{result['held_out_loss']:.4f} on held-out rows" if history.validations else "no rows held out"
    steps, tokens = many(result["steps"], "step"), many(outcome.tokens, "token")
    text = (
        f"{outcome.folder}: {outcome.parameters:,} parameters, {steps}, {tokens} of text\n"
        f"loss {result['loss']:.4f} (last {many(len(recent), 'step')}), {held_out}; {result['tokens_per_second']:,} tokens/s"
    )
    print_result(result, text, json)


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
    seed: Seed = 0,
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

    use_threads(threads)
    prompt = _prompt(prompt, prompt_file)
    if "" in (stop or []):
        raise DataError("--stop is empty. Fix: at least one character")
    if any("\udc80" <= letter <= "\udcff" for letter in prompt):
        raise DataError("the prompt is not UTF-8, as this terminal passes it on. Fix: LC_ALL=C.UTF-8, or PYTHONUTF8=1")
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
    started, times, pieces = time.perf_counter(), [], Pieces(tokenizer, ids)
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
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
        print(prompt, end="", flush=True)
    try:
        for piece in text:
            print(piece, end="", flush=True)
    except BaseException as error:  # the message of an error begins a line
        print(flush=True)
        if isinstance(error, KeyboardInterrupt):
            _note_speed(_figures(times, started, len(ids)), stats)
        raise
    print()
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
    source = None if file is None or str(file) == "-" else file
    try:
        text = (sys.stdin.buffer.read() if source is None else source.read_bytes()).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"the prompt is not UTF-8: {error}. Fix: iconv -t utf-8") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:  # more likely a mistake than an empty argument is
        raise DataError(f"the prompt in {source or 'stdin'} is empty. Fix: at least one character")
    return text


def _figures(times: list[float], started: float, prompt: int) -> dict[str, Any]:
    """Counts and tokens a second. The first new token belongs to the prompt: it needs no step of its own."""
    now, steps = time.perf_counter(), len(times) - 1
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


def eval(
    model: Model,
    files: Annotated[list[str], typer.Argument(metavar="FILES", help="Text files, UTF-8.")],
    limit: Annotated[
        int | None, option("Only the first so many tokens of each file.", min=1, show_default="all")
    ] = None,
    at_once: Annotated[bool, option("Leave out the slow way, step by step.", "--at-once")] = False,
    weights: Weights = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """lowtri eval out/book chapter.txt
    lowtri eval smollm2 chapter.txt notes.txt --limit 2000 --json

    Loss, perplexity and bits per byte: teacher-forced, all positions in one forward as in training, and step by step
    with the cache, as in generating. A causal model gives the same figures in both; one that saw the future does not.
    """
    from rich.console import Console
    from rich.progress import Progress

    from lowtri.errors import DataError
    from lowtri.nn.files import encode
    from lowtri.training.corpus import read_files
    from lowtri.training.evaluate import evaluate

    use_threads(threads)
    documents = read_files(files)
    network, tokenizer, _ = load_model(model, weights=weights)
    texts = [encode(tokenizer, document.text)[:limit] for document in documents]
    size = sum(len(tokenizer.decode(text[1:]).encode()) for text in texts)
    with Progress(console=Console(stderr=True), transient=True) as bar:  # a forward pass for every position takes long
        task = bar.add_task("tokens", total=sum(max(0, len(text) - 1) for text in texts))
        result = evaluate(
            network, texts, size, stepwise=not at_once, progress=lambda done: bar.update(task, completed=done)
        )
    if not math.isfinite(result.at_once.loss):
        raise DataError(
            f"{model}: the loss is {result.at_once.loss}, so a weight or a logit is not a finite number.\n"
            "Fix: a model whose training did not diverge; with lowtri train, a smaller --lr."
        )
    mask = network.config.mask
    columns = [("teacher-forced", result.at_once), ("step by step", result.stepwise)]
    shown = [(title, score) for title, score in columns if score is not None]
    lines = [f"{many(result.tokens, 'token')}, {many(result.bytes, 'byte')}, mask {mask}"]
    lines.append(" " * 22 + "".join(f"{title:>16}" for title, _ in shown))
    for label in ("loss, nats a token", "perplexity", "bits per byte"):
        name = label.split(",")[0].replace(" ", "_")
        lines.append(f"{label:<22}" + "".join(f"{getattr(score, name):>16.5g}" for _, score in shown))
    if result.greatest_difference is not None:
        logit = f"(a logit: {result.greatest_logit_difference:.1e})"
        lines.append(f"greatest difference of one position: {result.greatest_difference:.1e} nats {logit}")
    scores = {"at_once": result.at_once._asdict(), "stepwise": result.stepwise and result.stepwise._asdict()}
    print_result({**result._asdict(), **scores, "mask": mask}, "\n".join(lines), json)
