"""lowtri train: from text files to a folder that lowtri and transformers load."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtri.cli.options import Json, Seed, Threads, many, mask_option, note, print_json, use_threads

if TYPE_CHECKING:
    from lowtri.training.run import Outcome, Plan
    from lowtri.training.train import Step

_FURTHEST = 2**14  # positions whose mask is checked
_SECONDS = 10.0  # between two lines in a log file, at most, if steps are shorter


def command(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to write.")],
    files: Annotated[list[str] | None, typer.Argument(metavar="FILES", help="Text files, UTF-8.")] = None,
    mask: Annotated[str, mask_option('Who may see whom, as text: "causal", "causal & window(64)", ...')] = "causal",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 1000,
    batch: Annotated[int, typer.Option(help="Rows in a step.")] = 16,
    context: Annotated[int, typer.Option(help="Tokens in a row, and the model's longest input.")] = 256,
    vocabulary: Annotated[int, typer.Option(help="Tokens to learn; 258 is bytes alone.")] = 4096,
    hidden: Annotated[int, typer.Option(min=1, help="The model's width.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 4,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Key/value heads.", show_default="as many as heads")
    ] = None,
    cell: Annotated[str | None, typer.Option(help="lstm, gru or rnn: a recurrent model, no decoder.")] = None,
    lr: Annotated[float, typer.Option(help="The highest learning rate.")] = 1e-3,
    save_every: Annotated[int, typer.Option(help="Steps between savings: the most that a kill can lose.")] = 100,
    accumulate: Annotated[int, typer.Option(help="Parts of a batch, computed one after the other.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 with float32 weights.")] = "float32",
    dp: Annotated[int | None, typer.Option(help="Under torchrun: groups that share the rows of a batch.")] = None,
    sp: Annotated[int | None, typer.Option(help="Under torchrun: processes that share the tokens of a row.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, with its options.")] = False,
    device: Annotated[str, typer.Option(help="Where to compute, as torch names it: cpu, cuda, ...")] = "cpu",
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
    from lowtri.training.processes import processes_of_torchrun
    from lowtri.training.recipe import Recipe
    from lowtri.training.run import Plan, read_plan, run

    of_recipe: dict[str, Any] = {
        **{"steps": steps, "batch": batch, "context": context, "lr": lr, "save_every": save_every, "seed": seed},
        **{"accumulate": accumulate, "dtype": dtype},
    }
    of_plan: dict[str, Any] = {
        "files": tuple(str(Path(file).resolve()) for file in files or ()),
        "mask": repr(as_mask(mask, "--mask")),
        **{"vocabulary": vocabulary, "hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads},
        "cell": cell,
    }
    for folder in (out, *out.parents):
        if folder.exists() and not folder.is_dir():
            raise DataError(f"--out: {folder} is a file. Fix: a folder")
    begun = read_plan(out) if resume else None
    if begun is not None:
        # Options that are not given are as before. Those that are given must be as before, too: run() compares.
        omitted = {name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "DEFAULT"}
        if not files:
            omitted.add("files")  # an empty list counts as given in older versions of click
        of_recipe.update({name: getattr(begun.recipe, name) for name in omitted & of_recipe.keys()})
        of_plan.update({name: getattr(begun, name) for name in omitted & of_plan.keys()})
    elif resume and not files:
        raise DataError(
            f"--resume: no run began in {out}. Fix: the folder of a run, or text files to start one: "
            f"lowtri train book.txt --out {shlex.quote(str(out))}"
        )
    elif resume:
        note(f"nothing was begun in {out}: starting")
    elif out.exists() and any(out.iterdir()):
        raise DataError(f"--out: {out} is not empty. Fix: another folder, or --resume to go on with the run in it")
    # At least ten points on the curve, and at most 100 steps between them.
    every = max(1, min(100, int(of_recipe["steps"]) // 10))
    of_recipe["validate_every"] = every if begun is None else begun.recipe.validate_every
    if not of_plan["files"]:
        raise DataError(
            "FILES: none were given. Fix: name text files, for instance: lowtri train book.txt --out out/book"
        )
    plan = Plan(**of_plan, recipe=Recipe(**of_recipe))
    _check_sizes(plan)
    use_threads(threads)
    leaks = not as_mask(plan.mask).is_causal(min(plan.recipe.context, _FURTHEST))
    _check_device(device)
    with processes_of_torchrun(dp, sp) as processes:
        progress = note if processes.is_main else lambda _: None
        if leaks:
            progress(f"the mask {plan.mask} shows what is predicted: this loss means nothing. Fix: a causal mask")
        try:
            with _watched(plan.recipe.steps, processes.is_main) as on_step:
                outcome = run(plan, out, device=device, progress=progress, on_step=on_step, processes=processes)
        except KeyboardInterrupt:
            if read_plan(out) is not None:
                progress(f"what was saved is in {out}; go on with: lowtri train --out {shlex.quote(str(out))} --resume")
            raise
        if processes.is_main:
            _report(outcome, json)


def _check_sizes(plan: Plan) -> None:
    """Raise where heads do not divide the width: before the texts are read, and by the names of the options."""
    from lowtri.errors import DataError

    kv_heads = plan.heads if plan.kv_heads is None else plan.kv_heads
    if plan.cell is not None:
        return
    if plan.hidden % (2 * plan.heads):  # rotary embedding rotates a head's entries in pairs
        near = 2 * plan.heads * max(1, round(plan.hidden / (2 * plan.heads)))
        raise DataError(
            f"train: --hidden is {plan.hidden}, but {plan.heads} heads need an even number of entries each. "
            f"Fix: --hidden {near}, or other --heads"
        )
    if plan.heads % kv_heads:
        raise DataError(
            f"train: --kv-heads is {kv_heads}, but each serves the same number of the {plan.heads} query heads. "
            f"Fix: a divisor of {plan.heads}"
        )


def _check_device(device: str) -> None:
    import torch

    from lowtri.errors import DataError

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise DataError(f"--device: {device!r} cannot be used: {str(error).splitlines()[0]}") from None


@contextmanager
def _watched(steps: int, is_main: bool) -> Iterator[Callable[[Step], None]]:
    """A progress bar on a terminal; in a log file lines: the first step, each validation, and every ten seconds. Both on stderr."""
    if not is_main:
        yield lambda step: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        last = -_SECONDS

        def line(step: Step) -> None:
            nonlocal last
            if step.validation is not None or time.monotonic() - last >= _SECONDS:
                note(_line(step))
                last = time.monotonic()

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps)
        held_out = ""

        def on_step(step: Step) -> None:
            nonlocal held_out
            held_out = f"held out {step.validation:.3f}" if step.validation is not None else held_out
            description = f"loss {step.loss:.3f}  {held_out}  {step.tokens_per_second:,.0f} tokens/s"
            progress.update(task, completed=step.number, description=description)

        yield on_step


def _line(step: Step) -> str:
    held_out = "" if step.validation is None else f"held out {step.validation:.4f}  "
    return f"step {step.number:>6}  loss {step.loss:.4f}  {held_out}lr {step.lr:.1e}  {step.tokens_per_second:,.0f} tokens/s"


def _report(outcome: Outcome, json: bool) -> None:
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
    if json:
        print_json(result)
        return
    held_out = f"{result['held_out_loss']:.4f} on held-out rows" if history.validations else "no rows held out"
    print(
        f"{outcome.folder}: {outcome.parameters:,} parameters, {many(result['steps'], 'step')}, "
        f"{many(outcome.tokens, 'token')} of text"
    )
    print(
        f"loss {result['loss']:.4f} (last {many(len(recent), 'step')}), {held_out}; {result['tokens_per_second']:,} tokens/s"
    )
