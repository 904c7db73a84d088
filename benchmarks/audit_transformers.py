"""Audit every causal language model class of the installed transformers on ordinary batches, and check each leak by brute force.

    python benchmarks/audit_transformers.py --out benchmarks/audit_transformers.md     # all of them; goes on where it stopped
    python benchmarks/audit_transformers.py --only llama gpt2 --show                   # a few, with their reports

Each class is made with a tiny random config and random weights (standard deviation 0.15; fresh ones hide leaks), in a process of
its own with a time limit, in sdpa and eager attention: without pads, with pads on the right, on the left and in the middle, as
`{"input_ids": ids, "attention_mask": mask}`. A leak counts as confirmed if changing one input alone, what pads contain, cutting the
input off, or decoding one by one with the model's own cache moves an output at a real position that may not move; this check
shares no code with the audit. Results are kept in build/audit_transformers.json; `--again` measures all anew.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from small_configs import configs_of, first_line, tiny_config

os.environ.setdefault("HF_HUB_OFFLINE", "1")

KEPT = Path("build/audit_transformers.json")
POSITIONS = 12
LARGEST = 30_000_000  # parameters of a model that counts as small
MEMORY = 8 << 30  # bytes for one class
PROBES = ["change", "gradient", "prefix", "batch", "padding", "cache"]
MASKS = {
    "none": None,
    "right": [[1] * 12, [1] * 8 + [0] * 4],
    "left": [[1] * 12, [0] * 4 + [1] * 8],
    "middle": [[1] * 12, [1] * 4 + [0] * 3 + [1] * 5],
}
CELLS = [f"{attention} {padding}" for attention in ("sdpa", "eager") for padding in MASKS]


# Each leak of transformers 5.23.0, read in its source until it was understood. All are theirs; none is the audit's.
UNDERSTOOD = {
    "bamba": "without position_ids, cached steps count from 0 again; `generate` passes them, so it is a warning",
    **dict.fromkeys(
        (
            "camembert",
            "data2vec-text",
            "ibert",
            "longformer",
            "roberta",
            "roberta-prelayernorm",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        ),
        "positions are counted from ids that are not the pad id, so what a pad contains matters; tokenizers put the pad id there",
    ),
    "cpmant": "by design: without a context length, it takes the whole input for context, which everyone may see",
    "falcon": "asked for weights, the sdpa path's boolean mask is added to the scores, where it hides nothing",
    "git": "text alone: with a cache its padding mask is widened over image tokens that are not there, and shifts",
    "recurrent_gemma": "its recurrent blocks take the padding mask and do not use it: the convolution sees the pads",
    "reformer": "by design of LSH: tokens are sorted into buckets over the whole row, so later ones decide who meets whom",
    "rwkv": "takes a padding mask and does not use it, as its documentation says",
    "xlstm": "accepts a padding mask among other keywords and does not use it",
    "xlm": "by design: its config is not causal unless it says so",
    "xlnet": "by design: without a permutation mask everyone sees everyone",
    "moshi": "the cache keeps a window that the whole forward does not have",
    **dict.fromkeys(
        ("nemotron_h", "zamba2"),
        "the chunked scan keeps dt above time_step_min, the cached single step does not; often too small for brute force in "
        "float32, and in float64 decoding one by one differs by 5.6e-06, where rounding is 6e-15",
    ),
    "prophetnet": "the predicting stream flattens its relative positions in one order and reads them back in another, so that "
    "queries get the ones of other positions",
}


def made(name: str, class_name: str) -> Any:
    """A small model of a class that runs: with the sizes above, else with the first of the benchmark of models that does."""
    import torch
    import transformers

    def configs() -> Iterator[Any]:
        config_class = transformers.AutoConfig.for_model(name).__class__
        try:
            yield tiny_config(config_class)
        except Exception as error:
            yield error
        yield from configs_of(config_class)

    model_class = getattr(transformers, class_name)
    first = None
    for config in configs():
        try:
            if isinstance(config, Exception):
                raise config
            config = config if isinstance(config, model_class.config_class) else config.get_text_config(decoder=True)
            with torch.device("meta"):
                parameters = sum(parameter.numel() for parameter in model_class(config).parameters())
            if parameters > LARGEST:
                raise ValueError(f"{parameters:,} parameters are not small")
            torch.manual_seed(0)
            model = model_class(config).eval()
            with torch.no_grad():
                model(torch.randint(2, 99, (2, POSITIONS)))
            return model
        except Exception as error:
            first = first or error
    raise first or ValueError("no config")


def cells_of(name: str, class_name: str, show: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """One class in both attentions and with all paddings: a verdict, and what brute force says of a leak."""
    import torch
    import transformers

    import lowtri

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    ids = torch.randint(2, 99, (2, POSITIONS), generator=torch.Generator().manual_seed(1))
    model = made(name, class_name)
    fresh = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 and parameter.is_floating_point():
                parameter.normal_(std=0.15)
        answer = model(ids)
        if (answer.logits if hasattr(answer, "logits") else answer[0]).isnan().any():
            model.load_state_dict(fresh)
    for attention in ("sdpa", "eager"):
        try:
            model.set_attn_implementation(attention)
        except Exception as error:
            yield f"{attention} none", {"verdict": "-", "why": first_line(error)}
            continue
        for padding, mask in MASKS.items():
            example = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": torch.tensor(mask)}
            conditions = "eval,code_paths" if (attention, padding) == ("sdpa", "none") else "eval"
            adapter = lowtri.Model(model, vocab_size=99)
            try:
                report = lowtri.audit(adapter, example, length=0, probes=PROBES, conditions=conditions)
            except Exception as error:
                yield f"{attention} {padding}", {"verdict": "does not run", "why": first_line(error)}
                continue
            if show:
                print(report)
            cell: dict[str, Any] = {"verdict": {"no leak found": "clean"}.get(report.verdict, report.verdict)}
            if not report.ok:
                cell["why"] = report.message
            if report.leaks:
                cell["confirmed"] = confirmed(model, example)
            cell["warnings"] = [f"{f.title}: {f.message}" for f in report.warnings]
            yield f"{attention} {padding}", cell


def confirmed(model: Any, example: dict[str, Any]) -> str:
    """The first way in which brute force moves an output that may not move; empty if there is none."""
    import torch

    ids = example["input_ids"]
    mask = example.get("attention_mask")
    batch, n = ids.shape
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()

    def logits(ids: Any, mask: Any, **more: Any) -> Any:
        with torch.no_grad():
            out = model(input_ids=ids, **({} if mask is None else {"attention_mask": mask}), **more)
        return (out.logits if hasattr(out, "logits") else out[0]).double(), out

    whole, _ = logits(ids, mask)
    least = 1e-4 * float(whole[real].abs().max())

    def moved(after: Any, where: Any) -> Any:
        return ((whole[: len(after), : after.shape[1]] - after).abs().amax(-1) > least) & where

    for row in range(batch):
        for key in range(n):
            may_not = real.clone()
            if real[row, key]:
                may_not[row, key:] = False
            for other in (0, 3, 50, 97):  # 0 is the pad id of most
                changed = ids.clone()
                changed[row, key] = other
                wrong = moved(logits(changed, mask)[0], may_not).nonzero()
                if len(wrong):
                    return f"input {key} of row {row} moves output {int(wrong[0][1])} of row {int(wrong[0][0])}"
    if mask is not None:
        padded = [torch.cat([torch.full((batch, 3), other), ids], 1) for other in (3, 50)]
        wide = torch.cat([torch.zeros(batch, 3, dtype=mask.dtype), mask], 1)
        one, other = (logits(row, wide)[0][:, 3:] for row in padded)
        wrong = (((one - other).abs().amax(-1) > least) & real).nonzero()
        if len(wrong):
            return f"the content of three pads on the left moves output {int(wrong[0][1])} of row {int(wrong[0][0])}"
    with_weights = {"output_attentions": True}
    for key in range(1, n) if bool(real.all()) else ():
        changed = ids.clone()
        changed[:, key] = 50
        try:
            one, other = (logits(rows, mask, **with_weights)[0][:, :key] for rows in (ids, changed))
        except Exception:
            break
        if float((one - other).abs().max()) > least:
            return f"with output_attentions=True, input {key} moves an earlier output"
    for length in range(1, n):
        part = None if mask is None else mask[:, :length]
        try:
            wrong = moved(logits(ids[:, :length], part)[0], real[:, :length]).nonzero()
        except Exception:
            continue
        if len(wrong):
            return f"cut off before {length}, output {int(wrong[0][1])} moves"

    def decoded(mask: Any, sizes: list[int]) -> Any:
        rows = []
        cache = {}
        start = 0
        for size in sizes:
            part = None if mask is None else mask[:, : start + size]
            row, out = logits(ids[:, start : start + size], part, use_cache=True, **cache)
            kinds = ("past_key_values", "cache_params", "state", "mems")
            kind = next(kind for kind in kinds if getattr(out, kind, None) is not None)
            cache = {kind: getattr(out, kind)}
            start = start + size
            rows.append(row)
        return torch.cat(rows, 1)

    half = n // 2
    hole = (torch.ones_like(ids) if mask is None else mask).clone()
    hole[:, half - 2 : half] = 0
    prompt = [half] + [1] * (n - half)
    for words, marks, sizes in (
        ("one by one", mask, [1] * n),
        ("after a prompt", mask, prompt),
        ("in threes", mask, [3] * (n // 3)),
        ("after a prompt with pads on the right", hole, prompt),
    ):
        try:
            full = logits(ids, marks)[0]
            steps = decoded(marks, sizes)
        except Exception:
            continue
        # `generate` gives pads in the prompt only: nothing behind a later one is compared.
        known = torch.ones_like(real) if marks is None else marks.bool()
        late = ~known & (torch.arange(n) >= sizes[0])
        where = real & known & ~late.cummax(1).values
        wrong = (((full - steps).abs().amax(-1) > least) & where).nonzero()
        if len(wrong):
            return f"decoded {words}, output {int(wrong[0][1])} of row {int(wrong[0][0])} differs"
    return ""


def limited(name: str, class_name: str, show: bool, limit: float) -> dict[str, Any]:
    """The cells of a class, from a process of its own that is ended when it takes too long; those that it finished count."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        try:
            for cell in cells_of(name, class_name, show):
                send.send(cell)
            send.send(("", {}))
        except BaseException as error:
            send.send(("", {"why": first_line(error) if isinstance(error, Exception) else repr(error)}))

    result: dict[str, Any] = {"type": name, "class": class_name, "cells": {}, "why": "the process ended"}
    process = context.Process(target=work)
    until = time.monotonic() + limit
    process.start()
    send.close()
    try:
        while True:
            if not receive.poll(max(0.0, until - time.monotonic())):
                result["why"] = f"longer than {limit:.0f} s"
                break
            key, cell = receive.recv()
            if not key:
                result["why"] = cell.get("why", "")
                break
            result["cells"][key] = cell
    except EOFError:
        pass
    process.terminate()
    process.join()
    return result


def table(results: list[dict[str, Any]], version: str) -> str:
    """The results as Markdown, leaks first: a row for each class, its cells joined where they are all the same."""
    cells = [cell for result in results for cell in result["cells"].values() if cell["verdict"] != "-"]
    leaks = [cell for cell in cells if cell["verdict"] == "leak"]
    done = [result for result in results if result["cells"]]
    counts = {
        kind: sum(cell["verdict"] == kind for cell in cells) for kind in dict.fromkeys(c["verdict"] for c in cells)
    }
    clean = sum(all(cell["verdict"] in ("clean", "-") for cell in result["cells"].values()) for result in done)
    partly = sum(bool(result["why"]) for result in done)
    lines = [
        f"{len(done)} of {len(results)} classes of transformers {version} were audited, {clean} of them clean in all that was run"
        + (f" ({partly} ran out of time before all)" if partly else "")
        + f". {len(cells)} audits: {', '.join(f'{kind} {count}' for kind, count in counts.items())}. "
        + f"Of the {len(leaks)} leaks brute force confirms {sum(bool(cell['confirmed']) for cell in leaks)}.",
        "",
        "| type | sdpa: " + " | eager: ".join([", ".join(MASKS)] * 2) + " | what |",
        "|---|---|---|---|",
    ]
    order = {"leak": 0, "could not decide": 1, "does not run": 2}
    for result in sorted(done, key=lambda r: (min(order.get(c["verdict"], 3) for c in r["cells"].values()), r["type"])):
        row = []
        for attention in ("sdpa", "eager"):
            found = [result["cells"].get(f"{attention} {padding}", {"verdict": "-"}) for padding in MASKS]
            marks = [c["verdict"] + ("" if c.get("confirmed", True) else " (not confirmed)") for c in found]
            row.append(marks[0] if len(set(marks)) == 1 else ", ".join(marks))
        odd = [c for c in result["cells"].values() if c["verdict"] not in ("clean", "-")]
        what = [UNDERSTOOD.get(result["type"], "")] if odd else []
        what += list(dict.fromkeys([*(c.get("why", "") for c in odd), *(c.get("confirmed", "") for c in odd)]))[:3]
        what += list(dict.fromkeys(f"warning, {w}" for c in result["cells"].values() for w in c.get("warnings", ())))[
            :2
        ]
        text = "; ".join([part for part in what if part] + ([result["why"]] if result["why"] else []))
        lines.append("| " + " | ".join([result["type"], *row, text.replace("|", "/").replace("\n", " ")]) + " |")
    missing = [f"{result['type']} ({result['why']})" for result in results if not result["cells"]]
    lines += ["", "Not audited: " + "; ".join(missing).replace("|", "/").replace("\n", " ") + "."] if missing else []
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", help="model types")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each class")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no class after so many")
    parser.add_argument("--again", action="store_true", help="also classes whose results are kept")
    parser.add_argument("--out", type=Path, help="replace the table in this Markdown file")
    parser.add_argument("--show", action="store_true", help="print each report")
    arguments = parser.parse_args()

    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    import lowtri.auditing.audit  # noqa: F401 (once, before the processes part)
    from lowtri.files import write_text

    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    begun = time.monotonic()
    for name in arguments.only or sorted(NAMES):
        if time.monotonic() - begun > 60 * arguments.minutes:
            break
        if name in kept and not (arguments.again or arguments.only):
            continue
        started = time.monotonic()
        class_name = NAMES[name]
        class_name = class_name[0] if isinstance(class_name, (list, tuple)) else class_name
        kept[name] = result = limited(name, class_name, arguments.show, arguments.limit)
        odd = {key: cell for key, cell in result["cells"].items() if cell["verdict"] not in ("clean", "-")}
        print(
            f"{name:28} {len(result['cells'])} {time.monotonic() - started:5.1f} s  {result['why'][:80]} {odd}",
            flush=True,
        )
        KEPT.parent.mkdir(exist_ok=True)
        write_text(KEPT, json.dumps(kept, indent=1))
    results = [kept[name] for name in sorted(NAMES) if name in kept and name in (arguments.only or NAMES)]
    untried = len(NAMES) - len(results) if not arguments.only else 0
    text = table(results, transformers.__version__) + (f"\n{untried} classes were not tried.\n" if untried else "")
    if arguments.out is None:
        print(text)
    else:
        before, _, rest = arguments.out.read_text().partition("<!-- table -->\n")
        after = rest.partition("<!-- end of table -->\n")[2]
        write_text(arguments.out, f"{before}<!-- table -->\n{text}<!-- end of table -->\n{after}")


if __name__ == "__main__":
    main()
