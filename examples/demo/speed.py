"""Beside torch's own attention, on this machine. What is promised is the answer; the time is what it is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import lowtri
from demo.context import Context, Result

__all__ = ["SENTENCE", "TITLE", "run"]

TITLE = "Speed, here and now"
SENTENCE = "Causal attention over 2,048 tokens, lowtri and torch's SDPA by turns; medians."

_HEADS, _N, _SIZE, _ROUNDS = 8, 2048, 64, 9


def run(context: Context) -> Result:
    """Time both by turns, forward alone and with gradients, in float32 and bf16."""
    result = Result("")
    lines = [f"{'':<32}{'lowtri':>12}{'torch':>12}   torch's time / lowtri's"]
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(3, 1, _HEADS, _N, _SIZE, generator=generator)
    q, k, v = numbers.double()
    truth = lowtri.attention(q, k, v, "causal", engine="formula")
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        q, k, v = (x.to(dtype) for x in numbers)
        context.note(f"speed: {name} (the first call may compile)")
        ours, theirs = _ours(q, k, v), _torchs(q, k, v)
        away, torchs = (float((x.double() - truth).abs().max()) for x in (ours, theirs))
        # Half the digits are gone before anything is computed: torch's own distance is the measure of what is good.
        result.check(
            f"{name}: at most {away:.0e} from float64 on the unrounded numbers, torch {torchs:.0e}",
            away < 2 * torchs + 1e-6,
        )
        for what, run in (("forward", _forward), ("forward and backward", _both)):
            mine, torch_time = _by_turns(partial(run, _ours, q, k, v), partial(run, _torchs, q, k, v))
            lines.append(
                f"{name + ', ' + what:<32}{mine * 1000:>9.1f} ms{torch_time * 1000:>9.1f} ms   {torch_time / mine:.2f}"
            )
    engine = lowtri.which_engine(q, k, v, "causal").engine
    lines.append(
        f"{_HEADS} heads, size {_SIZE}; {torch.get_num_threads()} threads; engine {engine}; torch {torch.__version__}"
    )
    result.text = "\n".join(lines)
    return result


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    output: Tensor = lowtri.attention(q, k, v, "causal")
    return output


def _torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, is_causal=True)


def _forward(attend: Attention, q: Tensor, k: Tensor, v: Tensor) -> None:
    with torch.inference_mode():
        attend(q, k, v)


def _both(attend: Attention, q: Tensor, k: Tensor, v: Tensor) -> None:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    attend(*leaves).sum().backward()


def _by_turns(ours: Callable[[], None], theirs: Callable[[], None]) -> tuple[float, float]:
    """Medians of both in seconds; whatever else the machine does falls on both."""
    taken: tuple[list[float], list[float]] = ([], [])
    for turn in range(_ROUNDS + 1):
        for which, run in sorted(enumerate((ours, theirs)), reverse=turn % 2 == 1, key=lambda pair: pair[0]):
            started = time.perf_counter()
            run()
            if turn:  # the first round warms up
                taken[which].append(time.perf_counter() - started)
    return statistics.median(taken[0]), statistics.median(taken[1])
