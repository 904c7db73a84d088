"""What a call costs through each library's function: through lowtri's function of that name, ``lowtri.attention`` itself, and torch.

    python benchmarks/entry_points.py                   # every row, warm and cold; some minutes
    python benchmarks/entry_points.py --rows sdpa flash --turns 100 --json

*entry* is lowtri's function for the library, *own* the call of ``lowtri.attention`` that it stands for, *torch* what computes the same
without lowtri. All run interleaved in one process, on one thread, in CPU time; medians, in microseconds. *Cold*: between two calls runs
a product of a vector with the weights of a layer (2.4 MB), as in a model, which empties the second cache of most CPUs. Rows of a
model run their own products, and have one column. The share of memory's speed in decoding is ``benchmarks/decode.py``'s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import lowtri
from lowtri.benching import facts, headline, torch_threads
from lowtri.pictures.labels import aligned

Call = Callable[[], object]
# The weights of a small Llama's layer.
LAYER = (
    (256, 256),
    (128, 256),
    (128, 256),
    (256, 256),
    (512, 256),
    (512, 256),
    (256, 512),
)
LAYERS = 8
MOST_SECONDS = 6  # of a row and a column, but at least three turns


class Row(NamedTuple):
    """An entry point and a call.

    Attributes:
        goal: as a sentence about *entry*.
        calls: by column: entry, own, torch.
        in_model: the calls contain the products of a model, so that there is no cold column.
    """

    name: str
    shape: str
    goal: str
    calls: dict[str, Call]
    in_model: bool = False


def drawn(*shape: int, seed: int = 0, gradients: bool = False) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.requires_grad_(gradients)


def call_of(function: Callable[..., Any], *arguments: Any, **options: Any) -> Call:
    return lambda: function(*arguments, **options)


def sdpa_row(name: str, goal: str, sizes: tuple[int, ...], mask: Any, **options: Any) -> Row:
    """Sizes: B, H, Nq, Nk, D. ``mask`` is lowtri's; the options are torch's."""
    batch, heads = sizes[:2]
    nq, nk, d = sizes[2:]
    q = drawn(batch, heads, nq, d)
    k = drawn(batch, heads, nk, d, seed=1)
    v = drawn(batch, heads, nk, d, seed=2)
    calls = {
        "entry": call_of(lowtri.scaled_dot_product_attention, q, k, v, **options),
        "own": call_of(lowtri.attention, q, k, v, mask),
        "torch": call_of(F.scaled_dot_product_attention, q, k, v, **options),
    }
    return Row(f"sdpa, {name}", f"{batch} x {heads} heads, {nq} x {nk}, {d}, float32", goal, calls)


def sdpa_rows() -> Iterator[Row]:
    yield sdpa_row("1 query, 64 keys", "1.5 x own", (1, 4, 1, 64, 64), "full")
    yield sdpa_row("1 query, 1,024 keys", "1.3 x own, not slower than torch", (1, 8, 1, 1024, 64), "full")
    yield sdpa_row("causal 64", "1.3 x own, not slower than torch", (1, 8, 64, 64, 64), "causal", is_causal=True)
    for n, text, goal in ((256, "causal", "1.5 x own"), (2048, "causal & window(64)", "1.5 x own, 6 x torch")):
        bias = lowtri.mask(text).additive(n, like=torch.zeros(()))
        yield sdpa_row(f"float table of {text}, {n:,}", goal, (1, 4, n, n, 64), text, attn_mask=bias)
    for batch, n in ((2, 2048), (1, 8192)):
        valid = torch.arange(n)[None].expand(batch, n) < torch.tensor([[n - 5], [n // 2]])[:batch]
        options = {"attn_mask": valid[:, None, None]}
        sizes = (batch, 4, n, n, 64)
        name = f"padding ({batch}, 1, 1, {n})"
        yield sdpa_row(name, "1.1 x own", sizes, lowtri.keys(valid), **options)


def flash_rows() -> Iterator[Row]:
    from lowtri.integrations.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    q = drawn(1, 1, 8, 64)
    cache = drawn(2, 1, 1024, 8, 64, seed=1)
    new = drawn(2, 1, 1, 8, 64, seed=2)
    views = [q.transpose(1, 2), *(x[:, :513].transpose(1, 2) for x in cache)]
    held = torch.tensor([512], dtype=torch.int32)
    calls = {
        "entry": call_of(flash_attn_with_kvcache, q, *cache, *new, cache_seqlens=held, causal=True),
        "own": call_of(lowtri.attention, *views, "causal"),
        "torch": call_of(F.scaled_dot_product_attention, *views),
    }
    yield Row("flash_attn_with_kvcache, 513 keys", "1 x 8 heads, 1 x 513, 64, float32", "1.6 x own", calls)
    x = drawn(3, 64, 8, 64)
    edges = torch.tensor([0, 20, 44, 64], dtype=torch.int32)
    mask = lowtri.causal() & lowtri.documents(cu_seqlens=edges)
    calls = {
        "entry": call_of(flash_attn_varlen_func, *x, edges, edges, 24, 24, causal=True),
        "own": call_of(lowtri.attention, *(y.transpose(0, 1)[None] for y in x), mask),
    }
    yield Row("flash_attn_varlen_func, 64 tokens", "3 sequences, 8 heads, 64, float32", "1.6 x own", calls)


def flex_rows() -> Iterator[Row]:
    from lowtri.integrations.flex import create_block_mask, flex_attention

    q = drawn(3, 1, 8, 64, 64)
    slopes = 2.0 ** -torch.arange(1.0, 9.0)
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 64, 64, device="cpu")
    scores: dict[str, Callable[..., Any]] = {
        "ALiBi": lambda s, b, h, i, j: s - slopes[h] * (i - j),
        "softcap": lambda s, b, h, i, j: 20 * torch.tanh(s / 20),
    }
    own: dict[str, dict[str, Any]] = {"ALiBi": {"bias": lowtri.alibi(slopes)}, "softcap": {"softcap": 20.0}}
    for name, goal in (("ALiBi", "5 x own"), ("softcap", "3 x own")):
        calls = {
            "entry": call_of(flex_attention, *q, scores[name], blocks),
            "own": call_of(lowtri.attention, *q, "causal", **own[name]),
        }
        yield Row(f"flex_attention, {name} and causal", "1 x 8 heads, 64 x 64, 64, float32", goal, calls)


def module_rows() -> Iterator[Row]:
    from lowtri.integrations.torch import switch

    for n in (32, 256):
        layers = [torch.nn.MultiheadAttention(256, 8, batch_first=True).eval() for _ in range(2)]
        switch(layers[0])
        x = drawn(4, n, 256)
        future = torch.ones(n, n, dtype=torch.bool).triu(1)
        entry, plain = (call_of(layer, x, x, x, attn_mask=future) for layer in layers)
        shape = f"4 x 8 heads, {n} x {n}, 32, float32"
        goal = "not slower than torch"
        yield Row(
            f"nn.MultiheadAttention with weights, {n}", shape, goal, {"entry": entry, "torch": plain}, in_model=True
        )


def model_rows() -> Iterator[Row]:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    from lowtri.integrations.transformers import switch

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": LAYERS, "vocab_size": 1000}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)
    models = [LlamaForCausalLM(config).eval() for _ in range(2)]
    models[1].set_attn_implementation("sdpa")
    switch(models[0])
    ids = torch.randint(0, 1000, (1, 257), generator=torch.Generator().manual_seed(0))

    def token(model: Any) -> Call:
        cache = DynamicCache(config=config)
        model(ids[:, :256], past_key_values=cache)

        def run() -> None:
            model(ids[:, 256:], past_key_values=cache)
            cache.crop(-1)

        return run

    shape = f"{LAYERS} layers of 256, 8 heads of 32, 4 for keys, float32"
    goal = ".98 of sdpa's speed"
    entry, plain = map(token, models)
    yield Row("transformers, a Llama token after 256", shape, goal, {"entry": entry, "torch": plain}, in_model=True)
    entry, plain = (call_of(model, ids[:, :64], use_cache=False) for model in models)
    yield Row("transformers, a prompt of 64", shape, goal, {"entry": entry, "torch": plain}, in_model=True)


def training_rows() -> Iterator[Row]:
    q, k, v = (drawn(1, 4, 512, 64, seed=seed, gradients=True) for seed in range(3))

    def trained(function: Callable[..., Tensor], *arguments: Any, **options: Any) -> Call:
        def run() -> None:
            with torch.enable_grad():
                torch.autograd.grad(function(q, k, v, *arguments, **options).sum(), (q, k, v))

        return run

    calls = {
        "entry": trained(lowtri.attention, "causal", dropout=0.1),
        "own": trained(lowtri.attention, "causal"),
        "torch": trained(F.scaled_dot_product_attention, is_causal=True, dropout_p=0.1),
    }
    goal = "1.5 x own (without dropout), 1.5 x torch"
    yield Row("training with dropout 0.1", "1 x 4 heads, 512 x 512, 64, float32", goal, calls)


GROUPS: dict[str, Callable[[], Iterator[Row]]] = {
    "sdpa": sdpa_rows,
    "flash": flash_rows,
    "flex": flex_rows,
    "module": module_rows,
    "transformers": model_rows,
    "training": training_rows,
}


def emptied_caches() -> Call:
    """The products of one layer after another."""
    weights = [[drawn(*shape) for shape in LAYER] for _ in range(LAYERS)]
    vectors = {size: drawn(1, 1, size) for size in (256, 512)}
    layer = 0

    def run() -> None:
        nonlocal layer
        layer = (layer + 1) % LAYERS
        for weight in weights[layer]:
            F.linear(vectors[weight.shape[1]], weight)

    return run


def microseconds(calls: dict[str, Call], turns: int, before: Call | None) -> dict[str, float]:
    """The medians of calls that run interleaved, each after ``before``."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
        call()
    start = time.perf_counter()
    for turn in range(turns):
        for name, call in calls.items():
            if before is not None:
                before()
            began = time.process_time()
            call()
            taken[name].append(time.process_time() - began)
        if turn >= 2 and time.perf_counter() - start > MOST_SECONDS:  # long calls need fewer turns
            break
    return {name: 1e6 * statistics.median(times) for name, times in taken.items()}


def measured(row: Row, turns: int, empty: Call) -> dict[str, Any]:
    warm = microseconds(row.calls, turns, None)
    cold = None if row.in_model else microseconds(row.calls, turns, empty)
    return {"row": row.name, "shape": row.shape, "goal": row.goal, "warm": warm, "cold": cold}


def as_lines(results: list[dict[str, Any]]) -> list[str]:
    columns = ("entry", "own", "torch")
    head = ["", *(f"{column}, us" for column in columns), "/ own", "/ torch", "cold", "/ own", "/ torch", "goal"]
    lines = [head]
    for one in results:
        cells = [one["row"], *(f"{one['warm'][name]:,.0f}" if name in one["warm"] else "" for name in columns)]
        for times in (one["warm"], one["cold"] or {}):
            if times is not one["warm"]:
                cells.append(f"{times['entry']:,.0f}" if times else "")
            cells += [f"{times['entry'] / times[name]:.2f}" if name in times else "" for name in ("own", "torch")]
        lines.append([*cells, one["goal"]])
    return aligned(lines, "  ", right=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", nargs="*", choices=GROUPS, default=list(GROUPS), help="which libraries")
    parser.add_argument("--turns", type=int, default=300, help="how often each call is timed at most")
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    chosen = parser.parse_args(arguments)
    about = facts(threads=1) | {"dtype": "float32"}
    results = []
    with torch_threads(1), torch.no_grad():
        empty = emptied_caches()
        for name in chosen.rows:
            results += [measured(row, chosen.turns, empty) for row in GROUPS[name]()]
    if chosen.json:
        print(json.dumps({"facts": about, "rows": results}))
    else:
        print(headline(about), *as_lines(results), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
