"""Audit every causal language model class of the installed transformers on ordinary batches, and check every leak by brute force.

    python benchmarks/audit_padding.py --out benchmarks/audit_transformers.md        # all of them
    python benchmarks/audit_padding.py --only llama gpt2                             # a few

Each class with a tiny random config (that of audit_transformers.py), in sdpa and eager attention: without pads, with pads on the
right, on the left and in the middle, as `{"input_ids": ids, "attention_mask": mask}`. A leak counts as confirmed if changing one
input alone, cutting the input off, a row alone, or decoding one by one with the model's own cache moves an output at a real position
that may not move; this check shares no code with the audit.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import audit_transformers as classes

POSITIONS = 12
PROBES = ["change", "gradient", "prefix", "batch", "padding", "cache"]
MASKS = {
    "none": None,
    "right": [[1] * 12, [1] * 8 + [0] * 4],
    "left": [[1] * 12, [0] * 4 + [1] * 8],
    "middle": [[1] * 12, [1] * 4 + [0] * 3 + [1] * 5],
}


def audit_one(name: str, show: bool) -> dict[str, Any]:
    """One class in both attentions and all paddings: a verdict, and what brute force says of a leak."""
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    import lowtri

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    class_name = class_name[0] if isinstance(class_name, (list, tuple)) else class_name
    result: dict[str, Any] = {"type": name, "class": class_name, "cells": {}}
    ids = torch.randint(2, 99, (2, POSITIONS), generator=torch.Generator().manual_seed(1))
    for attention in ("sdpa", "eager"):
        torch.manual_seed(0)
        try:
            model = made(transformers, name, class_name)
            if sum(parameter.numel() for parameter in model.parameters()) > 100_000_000:
                raise ValueError("not tiny")
            model.set_attn_implementation(attention)
        except Exception as error:
            result["why"] = classes.first_line(error)
            continue
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2 and parameter.is_floating_point():
                    parameter.normal_(std=0.15)
        for padding, mask in MASKS.items():
            example = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": torch.tensor(mask)}
            try:
                report = lowtri.audit(model, example, vocab_size=99, train=False, length=0, draws=1, probes=PROBES)
            except Exception as error:
                result["cells"][f"{attention} {padding}"] = {
                    "verdict": "does not run",
                    "why": classes.first_line(error),
                }
                continue
            if show:
                print(report)
            cell: dict[str, Any] = {"verdict": {"no leak found": "clean"}.get(report.verdict, report.verdict)}
            if not report.ok:
                cell["why"] = report.message
            if report.leaks:
                cell["confirmed"] = confirmed(model, example)
            result["cells"][f"{attention} {padding}"] = cell
    return result


def made(transformers: Any, name: str, class_name: str) -> Any:
    config = classes.tiny_config(transformers.AutoConfig.for_model(name).__class__)
    model_class = getattr(transformers, class_name)
    return model_class(config if isinstance(config, model_class.config_class) else config.get_text_config()).eval()


def confirmed(model: Any, example: dict[str, Any]) -> str:
    """The first way in which brute force moves an output that may not move; empty if there is none."""
    import torch

    ids, mask = example["input_ids"], example.get("attention_mask")
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
            for other in (3, 50, 97):
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
            return f"what three pads on the left hold moves output {int(wrong[0][1])} of row {int(wrong[0][0])}"
    for length in range(1, n):
        part = None if mask is None else mask[:, :length]
        try:
            wrong = moved(logits(ids[:, :length], part)[0], real[:, :length]).nonzero()
        except Exception:
            continue
        if len(wrong):
            return f"cut off before {length}, output {int(wrong[0][1])} moves"
    try:
        rows, cache = [], {}
        for t in range(n):
            part = None if mask is None else mask[:, : t + 1]
            row, out = logits(ids[:, t : t + 1], part, use_cache=True, **cache)
            kind = next(
                k for k in ("past_key_values", "cache_params", "state", "mems") if getattr(out, k, None) is not None
            )
            cache = {kind: getattr(out, kind)}
            rows.append(row)
        wrong = moved(torch.cat(rows, 1), real).nonzero()
        if len(wrong):
            return f"decoded one by one, output {int(wrong[0][1])} of row {int(wrong[0][0])} differs"
    except Exception:
        pass
    return ""


def table(results: list[dict[str, Any]], version: str) -> str:
    """The results as Markdown: one row for each class, one column for each attention and padding."""
    names = [f"{attention} {padding}" for attention in ("sdpa", "eager") for padding in MASKS]
    cells = [cell for result in results for cell in result["cells"].values()]
    leaks = [cell for cell in cells if cell["verdict"] == "leak"]
    made = [result for result in results if result["cells"]]
    counts = {
        kind: sum(cell["verdict"] == kind for cell in cells) for kind in dict.fromkeys(c["verdict"] for c in cells)
    }
    lines = [
        f"{len(made)} of {len(results)} classes of transformers {version} could be made; {len(cells)} audits: "
        + ", ".join(f"{kind} {count}" for kind, count in counts.items())
        + f". Of the {len(leaks)} leaks brute force confirms {sum(bool(cell['confirmed']) for cell in leaks)}.",
        "",
        "| type | " + " | ".join(names) + " | what |",
        "|---|" + "---|" * (len(names) + 1),
    ]
    for result in sorted(made, key=lambda r: (all(c["verdict"] == "clean" for c in r["cells"].values()), r["type"])):
        row = []
        for name in names:
            cell = result["cells"].get(name, {"verdict": "-"})
            mark = "" if cell["verdict"] != "leak" else " (confirmed)" if cell["confirmed"] else " (not confirmed)"
            row.append(cell["verdict"] + mark)
        odd = [c for c in result["cells"].values() if c["verdict"] != "clean"]
        what = "; ".join(
            dict.fromkeys([*(c.get("why", "") for c in odd[:1]), *(c.get("confirmed", "") for c in odd[:1])])
        )
        understood = classes.UNDERSTOOD.get(result["type"], "") if any(c["verdict"] == "leak" for c in odd) else ""
        text = "; ".join(part for part in (understood, what.strip("; ")) if part).replace("|", "/").replace("\n", " ")
        lines.append("| " + " | ".join([result["type"], *row, text]) + " |")
    missing = [f"{result['type']} ({result.get('why', '')})" for result in results if not result["cells"]]
    lines += ["", "Not made: " + "; ".join(missing).replace("|", "/").replace("\n", " ") + "."] if missing else []
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", help="model types")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each class")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no class after so many")
    parser.add_argument(
        "--out", type=Path, help="write the table behind the first heading of this file, and .json beside it"
    )
    parser.add_argument("--show", action="store_true", help="print each report")
    arguments = parser.parse_args()

    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    import lowtri.auditing.audit  # noqa: F401 (once, before the processes part)

    results: list[dict[str, Any]] = []
    classes.audit_one = audit_one
    begun = time.monotonic()
    for name in arguments.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if time.monotonic() - begun > 60 * arguments.minutes:
            break
        started = time.monotonic()
        result = classes.limited(name, arguments.show, arguments.limit)
        result.setdefault("cells", {})
        results.append(result)
        odd = {key: cell for key, cell in result["cells"].items() if cell["verdict"] != "clean"}
        print(
            f"{name:28} {len(result['cells'])} {time.monotonic() - started:5.1f} s  {result.get('why', '')[:80]} {odd}",
            flush=True,
        )
        if arguments.out:
            classes.write(arguments.out, table(results, transformers.__version__), results)
    if not arguments.out:
        print(table(results, transformers.__version__))


if __name__ == "__main__":
    main()
