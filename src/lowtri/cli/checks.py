"""lowtri audit and lowtri verify: what a model depends on, and whether a function computes masked attention."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

import typer

from lowtri.cli.options import (
    Json,
    Report,
    Seed,
    Threads,
    note,
    option,
    print_report,
    print_result,
    refuse,
    text_or_stdin,
    use_threads,
)


def audit(
    target: Annotated[
        str, typer.Argument(help="FILE.py:make_model, or a model: a folder, a GGUF file, org/name, smollm2.")
    ],
    mask: Annotated[
        str | None,
        option("What an output may depend on; default: what the target declares, else causal.", metavar="TEXT"),
    ] = None,
    layers: Annotated[
        int | None, option("The mask is one layer's: widen it to what this many layers reach.", min=1)
    ] = None,
    length: Annotated[
        int | None,
        option("How many positions the longest example has, drawn or continued; default: 256 or more.", min=2),
    ] = None,
    vocab: Annotated[int | None, option("How many ids to draw from.", min=2)] = None,
    conditions: Annotated[
        str | None,
        option(
            "Under these alone: eval,training,code_paths,longer,compiled; default: all but compiled.", metavar="NAMES"
        ),
    ] = None,
    probes: Annotated[
        str | None, option("Run these alone, with commas between: change,prefix,cache.", metavar="NAMES")
    ] = None,
    redraw: Annotated[
        bool, option("Audit a copy with its weights redrawn: fresh ones hide leaks.", "--redraw")
    ] = False,
    infer: Annotated[
        bool,
        option("Say which mask the model has, and audit nothing. On a copy with redrawn weights: --redraw.", "--infer"),
    ] = False,
    traceback: Annotated[bool, option("Show where FILE.py raised an error.", "--traceback")] = False,
    out: Report = None,
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """lowtri audit my_model.py:make_model --infer
    lowtri audit my_model.py:make_model --mask "causal & window(64)" --layers 4
    lowtri audit out/model --out audit.html

    Finds what each output depends on and compares it with the mask; names the pair of positions that leaks, and the module
    where it enters. The function returns a model (a lowtri.Model, where something about it cannot be found out), (model,
    example) or (model, example, arguments of lowtri.audit); a name MASK in its file is the mask it declares.

    Exit codes: 0 no leak found, 1 a leak, 3 could not decide.
    """
    if infer:
        silenced = {"--mask": mask, "--layers": layers, "--conditions": conditions, "--probes": probes, "--out": out}
        refuse("--infer", "is for an audit, and --infer audits nothing", silenced)
    mask = None if mask is None else text_or_stdin(mask, "the mask")
    use_threads(threads)
    from lowtri.auditing.audit import audit as run
    from lowtri.auditing.infer import infer_mask
    from lowtri.auditing.loading import load_target
    from lowtri.masks import as_mask

    if mask is not None:
        as_mask(mask)  # an error in it is reported before the model is loaded
    with _stdout_to_stderr():
        loaded = load_target(target, length=length, vocab_size=vocab, seed=seed, read=_read, traceback=traceback)
    arguments = dict(loaded.arguments)
    if infer:
        with _stdout_to_stderr(), _frames_shown(traceback):
            inferred = infer_mask(loaded.model, loaded.example, redraw=redraw, seed=seed)
        data = {name: getattr(inferred, name) for name in ("layers", "nearest", "differs")}
        print_result({"mask": inferred.text, **data}, inferred.message, json)
        return
    if mask is not None:
        arguments.pop("layers", None)  # they belong to the target's own mask
    given: dict[str, Any] = {"layers": layers, "length": length, "conditions": conditions, "probes": probes}
    given["redraw"] = redraw or None
    arguments |= {name: value for name, value in given.items() if value is not None}
    if json:
        arguments["progress"] = False
    if mask is None:
        mask = "causal" if loaded.mask is None else loaded.mask
    if seed or "seed" not in arguments:
        arguments["seed"] = seed
    with _stdout_to_stderr(), _frames_shown(traceback):
        report = run(loaded.model, loaded.example, mask=mask, **arguments)
    print_report(report, json, out)


@contextlib.contextmanager
def _frames_shown(traceback: bool) -> Iterator[None]:
    """Add to an error that a model raised where its file raised it, if that is asked for."""
    from lowtri.auditing.loading import user_frames
    from lowtri.errors import CallError

    try:
        yield
    except CallError as error:
        if not traceback or error.__cause__ is None:
            raise
        raise CallError("\n".join([str(error), *user_frames(error.__cause__)])) from None


def _read(name: str) -> Any:
    from lowtri.integrations.transformers.loading import load_model

    return load_model(name, encoders=True, note=note)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """What the user's code prints, in Python or C, goes to stderr: on stdout is the report alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).fflush(None)  # what printf holds back
        os.dup2(kept, 1)
        os.close(kept)


def verify(
    target: Annotated[str, typer.Argument(metavar="FILE.py:attend", help="The function, in a Python file.")],
    signature: Annotated[str, option("How it is called: mask, sdpa, flash or flex.")] = "mask",
    dtypes: Annotated[str | None, option("Which dtypes, with commas; default: float32,bfloat16,float16.")] = None,
    cases: Annotated[str | None, option("Only the cases whose name contains this text.")] = None,
    device: Annotated[str, option("Where torch tensors lie.")] = "cpu",
    gradients: Annotated[bool, option("Whether gradients are compared, too.")] = True,
    difference: Annotated[
        list[str] | None,
        option(
            'A documented difference: a case or a mistake, and the reason: "mask inverted=True means hidden". May be repeated.',
            metavar="NAME=WHY",
        ),
    ] = None,
    limit: Annotated[float, option("Seconds that one call may take.", min=0.01)] = 60.0,
    isolate: Annotated[
        bool | None,
        option(
            "Make calls in a child process, with one thread of torch, so that a crash is reported; default: on Linux, "
            "without --threads, if the file has not used CUDA.",
            "--isolate/--no-isolate",
        ),
    ] = None,
    out: Report = None,
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """lowtri verify my_kernel.py:attend --signature flash
    lowtri verify my_kernel.py:attend --signature flash --dtypes float32 --cases window

    Calls the function with many masks, shapes and options, and with NaN in hidden positions, and compares what it returns with
    the definition of attention in float64. Where they differ by more than rounding, the well-known mistake that gives the same
    numbers is named; otherwise the places that differ, and the smallest sizes that show it.

    Exit codes: 0 right, 1 wrong or right for finite inputs alone, 3 could not decide.
    """
    documented = {}
    for text in difference or []:
        name, _, why = (part.strip() for part in text.partition("="))
        if not name or not why:
            raise typer.BadParameter(f'--difference "{text}"; expected NAME=WHY, a case or a mistake and a sentence')
        documented[name] = why
    if isolate and threads not in (None, 1):
        raise typer.BadParameter(f"--threads {threads}: a child process has one thread of torch. Fix: --no-isolate")
    use_threads(threads)
    import torch

    from lowtri.auditing.loading import function_in_file
    from lowtri.verifying.verify import verify as run

    long = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    with _stdout_to_stderr():
        attend, _ = function_in_file(target, "attend")
        if isolate is None:
            isolate = sys.platform == "linux" and threads in (None, 1) and not torch.cuda.is_initialized()
        report = run(
            attend,
            signature=signature,
            dtypes=None if dtypes is None else [long.get(name.strip(), name.strip()) for name in dtypes.split(",")],
            device=device,
            gradients=gradients,
            cases=cases,
            differences=documented,
            limit=limit,
            seed=seed,
            isolate=isolate,
            progress=False if json else None,
        )
    report = replace(report, name=target.rpartition(":")[2])  # of what a decorator returns, the name in the file
    print_report(report, json, out)
