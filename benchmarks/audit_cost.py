"""What an audit costs: CPU seconds and forwards of every probe, on a GPT-2 of four layers and 64 tokens.

    python benchmarks/audit_cost.py
    python benchmarks/audit_cost.py --width 768 --vocab 50257 --rows 2 --shapes

Every probe runs, under every default condition. One thread computes.
"""

from __future__ import annotations

import argparse
import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # read when torch is loaded

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import transformers

import lowtri
from lowtri.auditing import probe as engine
from lowtri.pictures.labels import aligned

TOKENS = 64
SIZES = ((64, 97), (768, 50_257))  # hidden size, vocabulary
_AROUND = "other"  # the noise, the model's mask, what conditions ask before their probes

# A probe and its condition; the shape of the ids and the precision.
Title = str
Shape = tuple[Title, tuple[int, ...], str]


@dataclass
class Cost:
    """What one audit took."""

    report: lowtri.auditing.AuditReport
    seconds: float
    by_probe: Counter[Title] = field(default_factory=Counter)  # CPU seconds
    forwards: Counter[Shape] = field(default_factory=Counter)


def gpt2(width: int, vocab: int) -> torch.nn.Module:
    """A GPT-2 of four layers with random weights."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=vocab, n_embd=width, n_layer=4, n_head=4, n_positions=512, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def measured(model: torch.nn.Module, ids: torch.Tensor, **arguments: Any) -> Cost:
    """One audit, with its CPU seconds by probe, and its forwards by probe, shape and precision."""
    running = [_AROUND]
    cost = Cost(None, 0.0)  # type: ignore[arg-type]
    examined = engine._examined

    def counted(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs.get("input_ids", args[0] if args else None)
        precision = str(next(module.parameters()).dtype).removeprefix("torch.")
        cost.forwards[running[-1], tuple(given.shape), precision] += 1

    def timed(context: Any, probe: Any) -> Any:
        words = context.condition.words
        running.append(f"{probe.name}, {words}" if words else probe.name)
        started = time.process_time()
        try:
            return examined(context, probe)
        finally:
            cost.by_probe[running.pop()] += time.process_time() - started

    hook = model.register_forward_pre_hook(counted, with_kwargs=True)
    started = time.process_time()
    try:
        with patch.object(engine, "_examined", timed):
            cost.report = lowtri.audit(model, ids, progress=False, **arguments)
    finally:
        hook.remove()
    cost.seconds = time.process_time() - started
    cost.by_probe[_AROUND] = cost.seconds - sum(cost.by_probe.values())
    return cost


def table(cost: Cost, *, shapes: bool = False) -> str:
    """A line for each probe, and where wanted one for each shape of its forwards."""
    rows: list[tuple[str, ...]] = [("probe", "CPU s", "forwards", "shapes" if shapes else "")]
    for title, seconds in cost.by_probe.most_common():
        own = {(shape, kind): count for (name, shape, kind), count in cost.forwards.items() if name == title}
        each = [f"{count} of {'x'.join(map(str, shape))} {kind}" for (shape, kind), count in own.items()]
        rows.append((title, f"{seconds:.1f}", str(sum(own.values())), ", ".join(each) if shapes else ""))
    total = sum(cost.forwards.values())
    return "\n".join(aligned([*rows, ("total", f"{cost.seconds:.1f}", str(total), "")], "  "))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, help="the hidden size; default: 64 and 768")
    parser.add_argument("--vocab", type=int, help="the vocabulary; default: 97 and 50,257")
    parser.add_argument("--rows", type=int, help="rows of the example; default: 1 and 2")
    parser.add_argument("--probes", help="these alone, with commas between")
    parser.add_argument("--shapes", action="store_true", help="how many forwards there are of each shape")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = SIZES if given.width is None else ((given.width, given.vocab or 97),)
    for width, vocab in sizes:
        for rows in (1, 2) if given.rows is None else (given.rows,):
            torch.manual_seed(1)
            ids = torch.randint(0, vocab, (rows, TOKENS))
            cost = measured(gpt2(width, vocab), ids, probes=given.probes)
            print(f"{width} wide, {vocab:,} ids, {rows} x {TOKENS} tokens: {cost.report.message}")
            print(table(cost, shapes=given.shapes) + "\n", flush=True)


if __name__ == "__main__":
    main()
