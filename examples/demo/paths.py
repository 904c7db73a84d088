"""One answer, however it is computed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import lowtri
from demo.context import Context, Result
from lowtri import plain

__all__ = ["SENTENCE", "TITLE", "run"]

TITLE = "One answer by every path"
SENTENCE = "The same causal attention by every form that notebooks show, by torch and by lowtri; the reference is computed in float64."

_HEADS, _N, _SIZE = 8, 512, 64
_MOST = 1e-5  # float32 keeps seven digits, and outputs here are below 4


def run(context: Context) -> Result:
    """Run every path on the same inputs, compare each with float64, and time it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, _HEADS, _N, _SIZE, generator=generator)
    truth = lowtri.attention(q.double(), k.double(), v.double(), "causal", engine="reference")
    result, lines = Result(""), [f"{'path':<46}{'greatest difference':>20}{'time':>12}"]
    for name, path in _paths(q, k, v).items():
        output = torch.as_tensor(path())  # the first call may compile
        away = float((output.double() - truth).abs().max())
        lines.append(f"{name:<46}{away:>20.1e}{_median(path) * 1000:>9.1f} ms")
        result.check(f"{name}: {away:.1e} from float64, below {_MOST:.0e}", away < _MOST)
    lines.append(f"{_HEADS} heads, {_N} tokens, head size {_SIZE}, float32, {torch.get_num_threads()} threads")
    choice = lowtri.which_engine(q, k, v, "causal")
    lines += ["", "which_engine: the first engine that answers yes runs", str(choice)]
    first = next(name for name, answer in choice.answers.items() if answer.startswith("yes: "))
    result.check(f"{choice.engine} runs, the first engine that answers yes", choice.engine == first)
    result.text = "\n".join(lines)
    return result


def _paths(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    n, scale = q.shape[2], 1 / math.sqrt(q.shape[3])
    attend = plain.create_causal_mask_bool(n)
    arrays = (q.numpy(), k.numpy(), v.numpy())
    finite = torch.from_numpy(plain.make_causal_mask(n)).float()
    return {
        "plain, -1e9 added (NumPy)": lambda: plain.masked_self_attention(*arrays, plain.make_causal_mask(n))[0],
        "plain, -1e9 added": lambda: plain.masked_self_attention(q, k, v, finite)[0],
        "plain, -inf added": lambda: plain.masked_self_attention(q, k, v, plain.create_causal_mask(n))[0],
        "plain, boolean, True = attend": lambda: plain.masked_attention_bool(q @ k.mT * scale, attend) @ v,
        "torch SDPA, boolean table": lambda: sdpa(q, k, v, attn_mask=attend),
        "torch SDPA, is_causal": lambda: sdpa(q, k, v, is_causal=True),
        'lowtri.attention(q, k, v, "causal")': lambda: lowtri.attention(q, k, v, "causal"),
        "lowtri, NumPy in and out": lambda: lowtri.attention(*arrays, "causal"),
        "lowtri, token by token with a cache": lambda: _stepwise(q, k, v),
    }


def _stepwise(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query at a time: its key and value join the cache, and it sees what is there."""
    cache, outputs = lowtri.KVCache("causal", capacity=q.shape[2]), []
    for t in range(q.shape[2]):
        here = slice(t, t + 1)
        keys, values, positions = cache.append(k[:, :, here], v[:, :, here])
        outputs.append(lowtri.attention(q[:, :, here], keys, values, "causal", q_positions=[t], k_positions=positions))
    return torch.cat(outputs, dim=2)


def _median(path: Callable[[], object], times: int = 5) -> float:
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        path()
        taken.append(time.perf_counter() - started)
        if sum(taken) > 2:
            break
    return statistics.median(taken)
