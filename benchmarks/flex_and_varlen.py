"""FlexAttention and flash-attn on a CPU: lowtri's functions interleaved with what torch offers there.

    python benchmarks/flex_and_varlen.py flex      # compiled FlexAttention, forward; needs a C++ compiler
    python benchmarks/flex_and_varlen.py varlen    # padded rows and torch's SDPA, forward, and forward + backward
    python benchmarks/flex_and_varlen.py blocks    # create_block_mask; torch's takes 3 GB at 16,384 tokens
    python benchmarks/flex_and_varlen.py flex float32    # one dtype

One thread; CPU time in milliseconds, the median of interleaved repetitions in one process. Equal outputs are asserted first. torch's
create_block_mask asks for 34 GB at 65,536 tokens and is not run there.
"""

from __future__ import annotations

import platform
import sys
import time
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask as torchs_block_mask
from torch.nn.attention.flex_attention import flex_attention as torchs_attention

from lowtri.benching import medians
from lowtri.integrations.flash_attn import flash_attn_varlen_func
from lowtri.integrations.flex import block_mask, create_block_mask, flex_attention
from lowtri.masks import causal, documents, first, window
from lowtri.masks.mask import Mask

warnings.simplefilter("ignore")

HEADS = 8
SIZE = 64
DTYPES = [x for x in (torch.float32, torch.bfloat16) if str(x)[6:] in sys.argv] or [torch.float32, torch.bfloat16]


def milliseconds(rounds: int, *functions: Callable[[], Any]) -> list[float]:
    """The median CPU time of each function, interleaved."""
    tasks = {str(number): function for number, function in enumerate(functions)}
    return [1e3 * seconds for seconds in medians(tasks, rounds, time.process_time).values()]


def same(a: Tensor, b: Tensor) -> None:
    worst = (a.float() - b.float()).abs().max()
    assert worst <= 40 * torch.finfo(a.dtype).eps * max(1.0, float(b.abs().max())), float(worst)


# Compiled FlexAttention.


def flex() -> None:
    n = 4096
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)
    ids = torch.arange(n) // 512
    mods: dict[str, tuple[Any, Any]] = {
        "causal": (lambda b, h, q, k: q >= k, None),
        "window of 256": (lambda b, h, q, k: (q >= k) & (q - k < 256), None),
        "8 documents of 512": (lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), None),
        "causal, ALiBi": (lambda b, h, q, k: q >= k, lambda s, b, h, q, k: s + slopes[h] * (k - q)),
    }
    print(f"forward, {n} tokens, {HEADS} heads of {SIZE}:  lowtri   compiled FlexAttention   times   its first call")
    for dtype in DTYPES:
        q, k, v = (torch.randn(1, HEADS, n, SIZE).to(dtype) for _ in "qkv")
        for name, (mask_mod, score_mod) in mods.items():
            torch._dynamo.reset()
            compiled = torch.compile(torchs_attention, dynamic=False)
            blocks = create_block_mask(mask_mod, None, None, n, n, "cpu")

            def theirs(m: Any = blocks, s: Any = score_mod, f: Any = compiled, x: Any = (q, k, v)) -> Tensor:
                return f(*x, s, m)

            def ours(m: Any = blocks, s: Any = score_mod, x: Any = (q, k, v)) -> Tensor:
                return flex_attention(*x, s, m)

            with torch.no_grad():
                begun = time.perf_counter()
                other = theirs()
                first_call = time.perf_counter() - begun
                same(ours(), other)
                a, b = milliseconds(7, ours, theirs)
            print(f"{dtype!s:15} {name:20} {a:9.1f} {b:9.1f} {b / a:7.2f}x {first_call:6.1f} s", flush=True)


# Padded rows.


def varlen() -> None:
    rows = {
        "16 rows of 64 to 1,024": torch.linspace(64, 1024, 16).long().tolist(),
        "8 rows of 256, 1 of 2,048": [256] * 8 + [2048],
        "4 rows of 1,024": [1024] * 4,
    }
    print("varlen, causal, 8 / 8 heads of 64:  lowtri   padded: is_causal   a table   both forward + backward")
    for dtype in DTYPES:
        for name, lengths in rows.items():
            edges = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
            longest = max(lengths)
            total = sum(lengths)
            real = torch.arange(longest) < torch.tensor(lengths)[:, None]
            visible = torch.ones(longest, longest, dtype=torch.bool).tril() & real[:, None, None]
            packed = [torch.randn(total, HEADS, SIZE).to(dtype) for _ in "qkv"]
            padded = [
                torch.zeros(len(lengths), longest, HEADS, SIZE, dtype=dtype).masked_scatter(real[..., None, None], x)
                for x in packed
            ]
            padded = [x.transpose(1, 2).contiguous() for x in padded]

            def ours(x: Any = packed, e: Any = edges, n: int = longest) -> Tensor:
                return flash_attn_varlen_func(*x, e, e, n, n, causal=True)

            def by_flag(x: Any = padded) -> Tensor:
                return F.scaled_dot_product_attention(*x, is_causal=True)

            def by_table(x: Any = padded, m: Any = visible) -> Tensor:
                return F.scaled_dot_product_attention(*x, attn_mask=m)

            with torch.no_grad():
                for other in (by_flag(), by_table()):
                    same(ours(), other.transpose(1, 2)[real])
                forward = milliseconds(9, ours, by_flag, by_table)
            for x in (*packed, *padded):
                x.requires_grad_()

            def trains(f: Any, x: Any) -> Callable[[], Any]:
                cotangent = torch.ones_like(f())
                return lambda: torch.autograd.grad(f(), x, cotangent)

            both = milliseconds(5, trains(ours, packed), trains(by_flag, padded), trains(by_table, padded))
            for work, (a, b, c) in (("forward", forward), ("forward + backward", both)):
                print(
                    f"{dtype!s:15} {name:26} {work:19} {a:8.1f} {b:8.1f} {b / a:6.2f}x {c:8.1f} {c / a:6.2f}x",
                    flush=True,
                )


# Block masks.


def cases(n: int) -> dict[str, tuple[Mask, Callable[..., Any]]]:
    """The same masks for lowtri and for FlexAttention."""
    lengths = [n // 2, n // 8, n // 4, n - n // 2 - n // 8 - n // 4]
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    return {
        "causal": (causal(), lambda b, h, q, k: q >= k),
        "window 4096": (causal() & window(4096), lambda b, h, q, k: (q >= k) & (q - k < 4096)),
        "prefix n/4": (causal() | first(n // 4), lambda b, h, q, k: (q >= k) | (k < n // 4)),
        "4 documents": (causal() & documents(lengths=lengths), lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])),
    }


def blocks() -> None:
    print("  tokens  mask            block_mask   create_block_mask: lowtri        torch")
    for n in (16_384, 65_536):
        for name, (mask, mod) in cases(n).items():
            ours = milliseconds(
                5, lambda m=mask, n=n: block_mask(m, n), lambda f=mod, n=n: create_block_mask(f, 1, 1, n, n, "cpu")
            )
            theirs = float("nan")
            if n < 20_000:
                begun = time.process_time()
                torchs_block_mask(mod, 1, 1, n, n, "cpu")
                theirs = 1e3 * (time.process_time() - begun)
            print(f"{n:8}  {name:14} {ours[0]:11.1f} {ours[1]:27.1f} {theirs:12.1f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parts = {"flex": flex, "varlen": varlen, "blocks": blocks}
    chosen = [name for name in parts if name in sys.argv] or list(parts)
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, 1 thread"
    )
    print(f"{datetime.now(timezone.utc):%d %B %Y, %H:%M} UTC")
    for part in chosen:
        parts[part]()
