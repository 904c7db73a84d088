"""lowtri audit: whether a model depends on what its mask hides."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lowtri.cli.options import Json, Report, Seed, Threads, mask_option, note, print_report, use_threads


def command(
    target: Annotated[
        str, typer.Argument(help="FILE.py:make_model, or a model: a folder, a GGUF file, org/name, smollm2")
    ],
    mask: Annotated[
        str | None, mask_option("What an output may depend on; default: what the target declares, else causal.")
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option("--layers", min=1, help="The mask is one layer's: widen it to what this many layers reach."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            "--length",
            min=2,
            help="How many positions the longest example has, drawn or continued; default: 256 or more.",
        ),
    ] = None,
    vocab: Annotated[int | None, typer.Option("--vocab", min=2, help="How many ids to draw from.")] = None,
    train: Annotated[bool, typer.Option("--train", help="Audit in training mode alone.")] = False,
    eval: Annotated[bool, typer.Option("--eval", help="Audit in eval mode alone.")] = False,
    probes: Annotated[
        str | None,
        typer.Option("--probes", metavar="NAMES", help="Run these alone, with commas between: change,prefix,cache."),
    ] = None,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Audit a copy with its weights redrawn: fresh ones hide leaks.")
    ] = False,
    compile: Annotated[bool, typer.Option("--compile", help="Also audit under torch.compile.")] = False,
    infer: Annotated[
        bool,
        typer.Option(
            "--infer", help="Say which mask the model has, and audit nothing. On a copy with redrawn weights: --redraw."
        ),
    ] = False,
    out: Report = None,
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """lowtri audit my_model.py:make_model --mask "causal & window(64)" --layers 4
    lowtri audit out/model --out audit.html
    lowtri audit out/model --infer

    Finds what each output depends on and compares it with the mask; names the pair of positions that leaks, and the module
    where it enters. The function returns a model, (model, example) or (model, example, arguments of lowtri.audit); a name
    MASK in its file is the mask it declares.

    Exit codes: 0 no leak found, 1 a leak, 3 could not decide.
    """
    use_threads(threads)
    from lowtri.auditing.audit import audit
    from lowtri.auditing.loading import load_target
    from lowtri.errors import CallError
    from lowtri.masks import as_mask

    if train and eval:
        raise CallError("audit: --train and --eval were given.\nFix: give one of them, or neither for both modes.")
    if mask is not None:
        as_mask(mask)  # an error in it is reported before the model is loaded
    loaded = load_target(_target(target), length=length, vocab_size=vocab, seed=seed)
    if infer:
        _print_inferred(loaded, vocab, redraw, seed, json)
        return
    arguments = dict(loaded.arguments)
    if mask is not None:
        arguments.pop("layers", None)  # they belong to the target's own mask
    given = {"layers": layers, "length": length, "vocab_size": vocab}
    arguments |= {name: value for name, value in given.items() if value is not None}
    flags = {"train": train, "redraw": redraw, "compile": compile}
    arguments |= {name: True for name, flag in flags.items() if flag} | ({"train": False} if eval else {})
    arguments |= {} if probes is None else {"probes": [name.strip() for name in probes.split(",") if name.strip()]}
    declared = mask if mask is not None else "causal" if loaded.mask is None else loaded.mask
    if seed or "seed" not in arguments:
        arguments["seed"] = seed
    report = audit(loaded.model, loaded.example, mask=declared, **arguments)
    print_report(report, json, out)


def _print_inferred(loaded: Any, vocab: int | None, redraw: bool, seed: int, json: bool) -> None:
    from lowtri.auditing.infer import infer_mask
    from lowtri.pictures.pages import json_text

    known = ("vocab_size", "output", "input", "position_axis", "batch_axis")
    arguments = {name: value for name, value in loaded.arguments.items() if name in known}
    arguments |= {} if vocab is None else {"vocab_size": vocab}
    inferred = infer_mask(loaded.model, loaded.example, redraw=redraw, seed=seed, **arguments)
    data = {name: getattr(inferred, name) for name in ("text", "layers", "nearest", "differs")}
    print(json_text({"mask": data.pop("text"), **data}) if json else inferred.message)


def _target(name: str) -> str:
    """FILE.py:make_model as it is; of a model's name its folder."""
    if name.endswith(".py") or name.rpartition(":")[0].endswith(".py"):
        return name
    from lowtri.nn.names import folder_of

    return str(folder_of(name, note))
