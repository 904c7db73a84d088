"""The tour of lowtri, act by act: what each part does on real input, and the checks of it.

The mission in its order: masks, attention, speed, caches, the audit, verify, long rows on several processes, training, writing,
other libraries, pretrained weights, the lesson. Each act is a function; its docstring is the sentence that the page shows.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.functional import scaled_dot_product_attention as sdpa

import lowtri
from demo.asked import (
    FIGURES,
    FOUR_DIGITS,
    KIN,
    LAST_DIGIT,
    SCORES,
    SENTENCES,
    TIMES,
    WEIGHTS,
    Pair,
    causal_forms,
    token_by_token,
    token_table,
)
from demo.named_models import NAMES, on_lowtri
from demo.stage import Act, Context, Result
from lowtri import plain
from lowtri.cli.main import main as command
from lowtri.explaining.example import worked
from lowtri.lesson.languages import LANGUAGES, texts
from lowtri.lesson.numbers import computed
from lowtri.lesson.page import file_name, lesson_page
from lowtri.nn.decoder import Decoder
from lowtri.parallel import ContextParallel, ShardPlan, plan_shards
from why_mask.checks import statements
from why_mask.consequences import as_text as consequences
from why_mask.consequences import draw

__all__ = ["ACTS", "table_text", "transformers_act"]

ACTS: dict[str, Act] = {}
Run = Callable[[Context], Result]


def act(name: str, title: str) -> Callable[[Run], Run]:
    """Put a function among the acts; the first paragraph of its docstring is the sentence that is shown."""

    def register(run: Run) -> Run:
        sentence = " ".join((run.__doc__ or "").split("\n\n")[0].split())
        ACTS[name] = Act(title, sentence, run)
        return run

    return register


@act("steps", "Every step, with its numbers")
def steps(context: Context) -> Result:
    """“Write a poem” under seed 42: what goes in, what comes out, and everything between."""
    result, explained = context.result(), worked()
    shown = replace(explained, steps=tuple(explained[name] for name in ("q", "k", "v", "scaled", "weights", "output")))
    result.picture("steps.svg", explained, str(shown))
    result.file("steps.html", explained.to_html())
    result.file("steps.txt", f"{explained}\n")
    away = max(float(np.abs(explained[name].value - np.array(rows)).max()) for name, rows in FIGURES.items())
    result.check(
        f"all {len(FIGURES)} steps have the notebooks' figures: at most {away:.0e} away, printed to 1e-4",
        away < FOUR_DIGITS,
    )
    weights, unmasked = explained["weights"].value, explained["weights"].unmasked
    assert unmasked is not None
    result.check("a hidden weight is exactly 0", not weights[np.triu_indices(3, 1)].any())
    same = float(np.abs(weights[2] - unmasked[2]).max())
    result.check(f"the last row, which sees everybody, is the same without a mask: {same:.0e} apart", same < 1e-12)
    formula = plain.softmax(SCORES + plain.make_causal_mask(4))
    away = float(np.abs(formula - WEIGHTS).max())
    result.check(f"the NumPy form has its eight digits: at most {away:.0e} away", away < LAST_DIGIT)
    return result


_OTHERS = ("causal & window(4)", "causal | first(4)", "causal & (window(4) | first(1))", "causal & chunks(4)")
_DOCUMENTS = "causal & documents(lengths=[5, 9, 4])"


@act("masks", "Who sees whom")
def masks(context: Context) -> Result:
    """On the left everybody sees everybody, as in an encoder; on the right each token sees itself and the earlier ones."""
    result = context.result()
    for number, sentence in enumerate(SENTENCES, start=1):
        tokens = sentence.split()
        n, name = len(tokens), f"masks-{number}.svg"
        lowtri.full().save(context.out / name, n, beside=lowtri.causal(), tokens=tokens)
        result.picture(name, text=lowtri.full().draw(n, beside=lowtri.causal(), tokens=tokens, ticks=True))
        drawn = [line[1:] for line in token_table("causal", sentence)[1:]]
        result.check(
            f"“{sentence}”: token i is seen by i and all after it, {lowtri.causal().pairs(n)} of {n * n} pairs",
            drawn == [["✓"] * (q + 1) + ["✗"] * (n - q - 1) for q in range(n)],
        )
    for number, text in enumerate((*_OTHERS, _DOCUMENTS), start=len(SENTENCES) + 1):
        mask = lowtri.mask(text)
        mask.save(context.out / f"masks-{number}.svg")  # as many positions as show the mask
        result.picture(f"masks-{number}.svg", text=str(mask))
    result.check(
        "a picture is as large as what it shows: 18 positions of three documents",
        len(str(lowtri.mask(_DOCUMENTS)).splitlines()) == 19,
    )
    read = [lowtri.mask(repr(lowtri.mask(text))) == lowtri.mask(text) for text in _OTHERS]
    result.check("a mask and its text are one: each is read back as it was", all(read))
    x, error = np.eye(8), ""
    try:
        lowtri.attention(x, x, x, "causal & documents(lengths=[3, 9])")
    except lowtri.MaskError as raised:
        error = str(raised).splitlines()[0]
    result.check(f"lengths that do not fit the row raise: {error}", "add up to 12" in error)
    return result


_LIMIT = 1e-5  # float32 keeps seven digits, and outputs of `paths` are below 4


@act("paths", "One answer by every path")
def paths(context: Context, n: int = 512) -> Result:
    """The same causal attention by every form that notebooks show, by torch and by lowtri; the reference is computed in float64.

    Args:
        n: tokens.
    """
    q, k, v = torch.randn(3, 1, 8, n, 64, generator=torch.Generator().manual_seed(0))  # (B, H, N, D)
    truth = lowtri.attention(q.double(), k.double(), v.double(), "causal", engine="reference")
    result, rows = context.result(), []
    for name, path in causal_forms(q, k, v).items():
        output = torch.as_tensor(path())  # the first call may compile
        away = float((output.double() - truth).abs().max())
        rows.append((name, f"{away:.1e}", f"{_median(path) * 1000:.1f} ms"))
        result.check(f"{name}: {away:.1e} from float64, below {_LIMIT:.0e}", away < _LIMIT)
    result.table((f"8 heads of 64, {n} tokens, {torch.get_num_threads()} threads", "greatest difference", "time"), rows)
    choice = lowtri.which_engine(q, k, v, "causal")
    result.table(
        ("which_engine", "the first engine that answers yes runs"),
        choice.answers.items(),
        f"which_engine: the first engine that answers yes runs\n{choice}",
    )
    first = next(name for name, answer in choice.answers.items() if answer.startswith("yes: "))
    result.check(f"{choice.engine} runs, the first engine that answers yes", choice.engine == first)
    return result


def _median(path: Callable[[], object], times: int = 5) -> float:
    """The median time of a call in seconds, of fewer calls where they are slow."""
    seconds: list[float] = []
    while len(seconds) < times and sum(seconds) <= 2:
        started = time.perf_counter()
        path()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


_FRESH = """
import json, sys, time
start = time.process_time()
import numpy as np
import lowtri
x = np.random.default_rng(0).standard_normal((3, 1, 4, 512, 64), np.float32)
imported = time.process_time()
result = lowtri.attention(*x, "causal & window(100)", engine="cpu")
done = time.process_time()
exact = lowtri.attention(*x.astype(np.float64), "causal & window(100)", engine="reference")
plain = lowtri.attention(*x, "causal & window(100)", engine="formula")
from lowtri.kernels import library, target
print(json.dumps({
    "import": imported - start, "call": done - imported, "isa": target.ISA.name, "reason": library.index().get("reason"),
    "error": float(abs(result - exact).max()), "plain": float(abs(plain - exact).max()),
    "compilers": sorted({"numba", "llvmlite"} & set(sys.modules)), "sets": library.index().get("isas", []),
}))
"""


@act("fresh", "The first call of a fresh process")
def fresh(context: Context) -> Result:
    """The kernels were compiled when lowtri was built. A new process loads them from one file; no compiler is imported."""
    done = subprocess.run([sys.executable, "-c", _FRESH], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-500:])
    figures = json.loads(done.stdout)
    result = context.result()
    result.say(
        f"imports {figures['import']:.2f} s of CPU time, the first call of 4 heads of 512 tokens {figures['call']:.3f} s",
        f"instruction set {figures['isa']}, "
        + (
            f"compiled when it was called: {figures['reason']}"
            if figures["reason"]
            else f"of {', '.join(figures['sets'])}"
        ),
    )
    result.check("neither numba nor llvmlite is imported", not figures["compilers"])
    result.check(
        f"the result is off by {figures['error']:.1e}, the plain formula's by {figures['plain']:.1e}",
        figures["error"] <= 2 * figures["plain"] + 1e-6,
    )
    return result


@act("speed", "Speed, here and now")
def speed(context: Context) -> Result:
    """Causal attention, lowtri and torch's SDPA by turns; medians. The result is checked, the time is only shown."""
    n, rounds = context.sizes.speed, context.sizes.rounds
    numbers = torch.randn(3, 1, 8, n, 64, generator=torch.Generator().manual_seed(0))  # (B, H, N, D)
    q, k, v = numbers.double()
    truth = lowtri.attention(q, k, v, "causal", engine="formula")
    result, rows = context.result(), []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        q, k, v = (x.to(dtype) for x in numbers)
        away, torchs = (float((attend(q, k, v).double() - truth).abs().max()) for attend in (_by_lowtri, _by_torch))
        # Rounding the inputs loses half the digits of bf16: the measure of what is good is torch's own difference.
        result.check(
            f"{name}: at most {away:.0e} from float64 on the unrounded numbers, torch {torchs:.0e}",
            away < 2 * torchs + 1e-6,
        )
        for what, run in (("forward", _forward), ("forward and backward", _forward_backward)):
            ours, theirs = _by_turns(partial(run, _by_lowtri, q, k, v), partial(run, _by_torch, q, k, v), rounds)
            rows.append((f"{name}, {what}", f"{ours * 1000:.1f} ms", f"{theirs * 1000:.1f} ms", f"{theirs / ours:.2f}"))
    engine = lowtri.which_engine(q, k, v, "causal").engine
    where = f"8 heads of 64, {n:,} tokens, {torch.get_num_threads()} threads, engine {engine}"
    result.table((where, "lowtri", f"torch {torch.__version__}", "torch's time / lowtri's"), rows)
    return result


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _by_lowtri(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    output: Tensor = lowtri.attention(q, k, v, "causal")
    return output


def _by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, is_causal=True)


def _forward(attend: Attention, q: Tensor, k: Tensor, v: Tensor) -> None:
    with torch.inference_mode():
        attend(q, k, v)


def _forward_backward(attend: Attention, q: Tensor, k: Tensor, v: Tensor) -> None:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    attend(*leaves).sum().backward()


def _by_turns(ours: Callable[[], None], theirs: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Medians of both in seconds, in alternating order, so that other load on the machine falls on both."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            started = time.perf_counter()
            (ours, theirs)[which]()
            if turn:  # the first round warms up
                seconds[which].append(time.perf_counter() - started)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


_CACHED = ("causal", "causal & window(32)", "causal & (window(32) | first(4))")


@act("cache", "What a cache keeps")
def cache(context: Context) -> Result:
    """One token at a time: its key and value join the cache, and keys that no later query can see are evicted."""
    early, late = context.sizes.cached
    q, k, v = torch.randn(3, 1, 4, late, 32, generator=torch.Generator().manual_seed(0))  # (B, H, N, D)
    result, rows, sizes = context.result(), [], {}
    for number, mask in enumerate(_CACHED, start=1):
        grown, outputs, row = lowtri.KVCache(mask), [], [mask]
        for begin, end in ((0, early), (early, late)):
            outputs.append(token_by_token(grown, *(x[:, :, begin:end] for x in (q, k, v))))
            row.append(f"{grown.held:,} tokens, {grown.bytes:,} B")
            sizes[mask, end] = grown.bytes
        rows.append(row)
        away = float((torch.cat(outputs, 2) - lowtri.attention(q, k, v, mask)).abs().max())
        result.check(f"{mask}: token by token as all at once, at most {away:.0e} apart", away < _LIMIT)
        result.picture(f"cache-{number}.svg", grown)
    result.table(("4 heads of 32, float32", f"after {early:,} tokens", f"after {late:,} tokens"), rows)
    result.check(
        "a window's cache stops growing: " + ", ".join(f"{sizes[mask, late]:,} bytes" for mask in _CACHED),
        all(sizes[mask, early] == sizes[mask, late] for mask in _CACHED if mask != "causal"),
    )
    return result


@act("audit", "Does a model see what its mask hides?")
def audit(context: Context) -> Result:
    """The audit reads no code: it changes inputs and measures which outputs move; so it also says which mask a model has."""
    models = context.experiment.models
    right = models["causal"]
    inverted = Decoder(replace(right.config, mask=repr(~lowtri.causal())))
    inverted.load_state_dict(right.state_dict())
    ids = torch.randint(2, right.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    result = context.result()
    for name, title, model, leaks in (
        ("masked", "trained with the mask", right, False),
        ("unmasked", "trained without it", models["full"], True),
        ("inverted", "the mask inverted, True and False confused", inverted.eval(), True),
        ("lstm", "a recurrent model (LSTM, untrained)", lowtri.nn.RecurrentLM(258, 64, cell="lstm").eval(), False),
    ):
        report = lowtri.audit(model, ids, mask="causal", progress=False)
        inferred = lowtri.infer_mask(model, ids)
        caption = f"{title}\n{report.message}\nThe mask that it has: {inferred}"
        result.picture(f"audit-{name}.svg", report, report.draw(24), caption)
        result.file(report.save(context.out / f"audit-{name}.html").name)
        if name != "inverted":
            result.check(f"{title}: measured, its mask is {inferred}", inferred.text == ("full" if leaks else "causal"))
        if leaks:
            pairs, first = {(leak.query, leak.key) for leak in report.leaks if leak.direct}, report.first
            caught = (
                f"{len(pairs)} pairs, the first ({first.query}, {first.key}) in {first.module}" if first else "nothing"
            )
            result.check(f"{title}: caught, {caught}", first is not None and first.module is not None)
        else:
            result.check(f"{title}: {report.verdict}", report.ok)
    return result


def window_too_wide(q: Any, k: Any, v: Any, mask: Any) -> Any:
    wide = lowtri.mask("causal & window(6)") if repr(mask) == "causal & window(5)" else mask
    return lowtri.attention(q, k, v, wide)


def inverted(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return lowtri.attention(q, k, v, ~mask)


@act("verify", "Is an attention kernel right?")
def verify(context: Context) -> Result:
    """Each function is called with masks, sizes and garbage of many kinds; a wrong one gets its mistake named."""
    known = {"NaN from hidden keys": "torch multiplies hidden values by a weight of 0"}
    cases = ["full", "causal", "one query, 130 keys", "grouped heads", "window of 5", "documents", "empty rows"]
    result = context.result()
    functions: list[tuple[Any, str, dict[str, Any]]] = [
        (lowtri.attention, "", {}),
        (sdpa, "", {"signature": "sdpa", "differences": known}),
        (window_too_wide, "window one too wide", {}),
        (inverted, "mask inverted", {}),
    ]
    for number, (attend, mistake, options) in enumerate(functions, start=1):
        report = lowtri.verify(attend, dtypes=["float32"], cases=cases, **options)
        right = report.ok if not mistake else report.mistakes == (mistake,)
        result.check(f"{report.name}: {mistake or 'right'}", right)
        result.picture(f"verify-{number}.svg", report, caption=report.message)
    result.file(report.save(context.out / "verify.html").name)
    return result


_SHARDED = "causal & window(1024)"


@act("shards", "One long row on several processes")
def shards(context: Context) -> Result:
    """A row of tokens under a window of 1,024: which process has which tokens, what they send, and the same result."""
    n, ranks = context.sizes.shards
    plan = plan_shards(_SHARDED, n, ranks)
    context.note(f"shards: {ranks} processes")
    parts = _on_ranks(plan)
    q, k, v = (x.requires_grad_() for x in _long_row(n))
    started = time.perf_counter()
    output = lowtri.attention(q, k, v, _SHARDED)
    output.sum().backward()
    alone = time.perf_counter() - started
    error = max(
        float(np.abs(part[name] - whole[:, :, plan.positions(rank)].numpy()).max())
        for rank, part in enumerate(parts)
        for name, whole in (("output", output.detach()), ("d_k", k.grad))
    )
    result = context.result()
    result.picture("shards.svg", plan, plan.draw())
    needed, gathered = int(plan.received.max()), n - n // ranks
    megabytes = q.shape[1] * 2 * q.shape[3] * 4 / 1e6  # of a token's key and value
    result.table(
        (f"{n:,} tokens on {ranks} processes", "received by a process", "forward and backward"),
        [
            ("what the mask shows", f"{needed * megabytes:.1f} MB", f"{parts[0]['needed']:.2f} s"),
            ("all-gather", f"{gathered * megabytes:.1f} MB", f"{parts[0]['gathered']:.2f} s"),
            ("one process", "", f"{alone:.2f} s"),
        ],
    )
    result.check(f"outputs and gradients are those of one process to {error:.0e}", error < 2e-4)
    result.check(f"a rank receives {needed / gathered:.0%} of what an all-gather brings", needed < 0.1 * gathered)
    result.check(f"the busiest rank has {plan.imbalance:.3f} times the mean of visible pairs", plan.imbalance < 1.06)
    return result


def _long_row(n: int) -> Tensor:
    return torch.randn(3, 1, 2, n, 32, generator=torch.Generator().manual_seed(0))  # q, k and v: (3, B, H, N, D)


def _on_ranks(plan: ShardPlan) -> list[dict[str, Any]]:
    processes = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, workers = [], []
    for rank in range(plan.ranks):
        receiver, sender = processes.Pipe()
        workers.append(processes.Process(target=_rank, args=(rank, store.port, plan, sender), daemon=True))
        workers[-1].start()
        sender.close()
        pipes.append(receiver)
    results = [pipe.recv() for pipe in pipes]
    for worker in workers:
        worker.join()
    return results


def _rank(rank: int, port: int, plan: ShardPlan, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.ranks)
    results: dict[str, Any] = {}
    for name, variant in (("needed", plan), ("gathered", replace(plan, gathers=(True,)))):
        parallel = ContextParallel(variant)
        q, k, v = (parallel.shard(x, 2).requires_grad_() for x in _long_row(plan.n))
        parallel.attention(q, k, v).sum().backward()  # loads kernels
        k.grad = None
        dist.barrier()
        started = time.perf_counter()
        output = parallel.attention(q, k, v)
        output.sum().backward()
        dist.barrier()
        results[name] = time.perf_counter() - started
        assert k.grad is not None
        results |= {"output": output.detach().numpy(), "d_k": k.grad.numpy()}
    pipe.send(results)
    dist.barrier()
    dist.destroy_process_group()


def table_text(pair: Pair, width: int = 100) -> str:
    """A pair as a table for a terminal, its cells wrapped."""
    title, columns, rows = pair
    table = Table(title=title, title_justify="left", show_lines=True)
    for name in ("", *columns):
        table.add_column(name, no_wrap=not name)
    for row in rows:
        table.add_row(*row)
    console = Console(width=width, color_system=None, highlight=False, emoji=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _show_pair(result: Result, pair: Pair) -> None:
    title, columns, rows = pair
    result.table((title, *columns), rows, table_text(pair))


@act("why", "Why the mask")
def why(context: Context) -> Result:
    """One small model, trained twice on Python's own texts: once it may see the future, once it may not."""
    experiment, result = context.experiment, context.result()
    if draw(experiment, context.out / "why-mask.png"):
        result.picture("why-mask.png", text=consequences(experiment))
    else:  # without matplotlib
        result.say(consequences(experiment))
    _show_pair(result, TIMES)
    for statement in statements(experiment):
        result.check(statement.text, statement.holds)
    result.file("why-mask.json", json.dumps(experiment.as_dict(), indent=1) + "\n")
    return result


_PROMPTS = ("This function returns the ", "If the argument is not ", "the name of the ")


@act("writing", "Both models write")
def writing(context: Context) -> Result:
    """The same prompts, the same random draws. Each token is the next input."""
    experiment, result, rows = context.experiment, context.result(), []
    for mask, title in (("causal", "with the mask"), ("full", "without it")):
        model = experiment.models[mask]
        for temperature in (0.0, experiment.setting.temperature):
            for prompt in _PROMPTS:
                rows.append(
                    (title, f"{temperature:g}", f"{prompt!r} ... {_written(model, prompt, context, temperature)!r}")
                )
        folder = title.replace(" ", "-")
        model.save(context.out / folder)
        experiment.tokenizer.save(str(context.out / folder / "tokenizer.json"))
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            result.file(f"{folder}/{name}")
    as_printed = (f"{title:<13}  {temperature:<3}  {text}" for title, temperature, text in rows)
    result.table(("trained", "temperature", "what it writes"), rows, "\n".join(as_printed))
    _show_pair(result, KIN)
    result.file("written.txt", result.text + "\n")

    model = experiment.models["causal"]
    cached, uncached = ([_written(model, prompt, context, 0.0, x) for prompt in _PROMPTS] for x in (True, False))
    result.check("with the cache and without it the masked model writes the same", cached == uncached)
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        code = command(["generate", str(context.out / "without-it"), _PROMPTS[0]])
    result.check(
        "lowtri generate rejects the model that saw the future", code == 2 and "mask full" in printed.getvalue()
    )
    torch.manual_seed(0)
    lstm = lowtri.nn.RecurrentLM(model.config.vocab_size, model.config.hidden_size, cell="lstm").eval()
    tokens = list(lowtri.generate(lstm, [1, 2, 3], 8))
    result.check("the same loop serves a recurrent model (here an untrained LSTM)", len(tokens) == 8)
    return result


def _written(model: Decoder, prompt: str, context: Context, temperature: float, cached: bool = True) -> str:
    tokenizer = context.experiment.tokenizer
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    new = min(context.sizes.new_tokens, model.config.max_position_embeddings - len(ids))
    return tokenizer.decode(list(lowtri.generate(model, ids, new, temperature=temperature, stop=(), cached=cached)))


_DIFFERENCE = 1e-4  # float32, against logits of up to some tens


@act("transformers", "A model of transformers, switched over")
def transformers_act(context: Context) -> Result:
    """attn_implementation="lowtri": the trained model of this page, the models of four families, and other shapes of attention."""
    result = context.result()
    if find_spec("transformers") is None:
        result.say(
            "transformers is not installed, so there is no model of its to switch over. Fix: pip install transformers"
        )
        return result
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    from lowtri.integrations.transformers import switch, use

    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    experiment = context.experiment
    model = _as_llama(experiment.models["causal"])
    ids = torch.tensor([experiment.tokenizer.encode(_PROMPTS[0]).ids])
    before, text = _logits(model, ids), _continued(model, ids)
    packed = {"input_ids": torch.arange(2, 14)[None], "position_ids": torch.tensor([[*range(5), *range(7)]])}
    shown_by_both = [str(lowtri.infer_mask(model, packed)), str(lowtri.infer_mask(switch(model), packed))]
    result.check(
        f"two documents in a row: its own attention shows {shown_by_both[0]}, lowtri's {shown_by_both[1]}",
        shown_by_both == ["causal", "causal & documents(lengths=[5, 7])"],
    )
    away, again = float((_logits(model, ids) - before).abs().max()), _continued(model, ids)
    written = experiment.tokenizer.decode(again[0].tolist())
    result.say(f"the trained model, {type(model).__name__}, continues {_PROMPTS[0]!r}:\n  {written!r}")
    result.check(f"the trained model's logits by lowtri are eager's to {away:.1e}", away < _DIFFERENCE)
    result.check(f"it writes the same {again.shape[1] - ids.shape[1]} tokens", torch.equal(again, text))
    other = switch(type(model)(model.config).eval())  # random weights, the same config object
    own = _logits(other, ids)
    shown, narrow = _logits(model, ids), _logits(use(model, mask="causal & window(2)"), ids)
    alone = torch.equal(_logits(other, ids), own) and not torch.equal(narrow, shown)
    use(model)
    result.check("a mask set for the model changes it, and no other model of its config", alone)
    _evict(result, model, ids)
    report = lowtri.audit(model, torch.randint(2, model.config.vocab_size, (2, 24)), mask="causal", progress=False)
    result.file(report.save(context.out / "audit-switched.html").name)
    result.check(f"audited with lowtri's attention: {report.verdict}", report.ok)
    rows = []
    for name in NAMES:
        switched, away = on_lowtri(name)
        rows.append((name, f"{away:.1e}"))
        result.check(f"{name}: {away:.1e} from eager, below {_DIFFERENCE:.0e}", away < _DIFFERENCE)
        report = switched.audit(probes=["change"], progress=False)
        result.check(f"{name}, audited with lowtri's attention: {report.verdict}", report.ok)
    for name, other in _others(transformers).items():
        away = _difference(other, switch)
        rows.append((name, f"{away:.1e}"))
        result.check(f"{name}: {away:.1e} from eager, below {_DIFFERENCE:.0e}", away < _DIFFERENCE)
    result.table(("random weights", "greatest difference"), rows)
    return result


def _evict(result: Result, model: Any, ids: Tensor) -> None:
    """The same tokens from a cache that keeps what some later query can see, as from one that keeps all."""
    from lowtri.integrations.transformers import EvictingCache, use

    prompt, n = ids[0, :6].tolist(), 40
    use(model, mask="causal & (window(8) | first(2))")
    cache = EvictingCache(model, block=4)
    written = list(lowtri.generate(model, prompt, n, stop=(), cache=cache))
    expected = list(lowtri.generate(model, prompt, n, stop=()))
    use(model)
    result.say(str(cache))
    total = len(prompt) + n - 1
    result.check(
        f"a window with sinks: {cache.held} of {total} tokens are held, and the text is the same",
        written == expected and cache.held <= 8 + 2 + 4,
    )


def _as_llama(decoder: Decoder) -> Any:
    """The same weights in the Llama of transformers, whose parameters have the same names."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = decoder.config
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"]
    names += ["num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"]
    sizes: dict[str, Any] = {name: getattr(c, name) for name in names}
    sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": c.rope_theta}
    sizes["eos_token_id"] = None if c.eos_token_id is None else list(c.eos_token_id)
    config = LlamaConfig(**sizes)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(decoder.state_dict())
    return model


def _others(tf: Any) -> dict[str, Any]:
    """Attention of other shapes: windows, capped scores, sinks."""
    torch.manual_seed(0)
    size = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 128}
    size |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    two: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    two |= {"num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    return {
        "Gemma 2: scores capped, every other layer a window": tf.Gemma2ForCausalLM(tf.Gemma2Config(**size, **two)),
        "gpt-oss: sinks, every other layer a window": tf.GptOssForCausalLM(
            tf.GptOssConfig(**size, **two, **experts, **rope)
        ),
    }


def _difference(model: Any, switch: Any) -> float:
    """The greatest difference between eager and lowtri, at positions that have a token."""
    model.eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    ids = torch.randint(3, 99, (3, 24))
    pads = torch.ones_like(ids)
    pads[0, :7] = 0
    inputs, keep = {"input_ids": ids, "attention_mask": pads}, pads.bool()
    logits = []
    for change in (lambda: model.set_attn_implementation("eager"), lambda: switch(model)):
        change()
        with torch.no_grad():
            logits.append(model(**inputs).logits[keep])
    return float((logits[1] - logits[0]).abs().max())


def _logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def _continued(model: Any, ids: Tensor) -> Tensor:
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    continued: Tensor = model.generate(ids, **options)
    return continued


_PAGE_BYTES = 2_000_000


@act("lesson", "The lesson")
def lesson(context: Context) -> Result:
    """Masked self-attention as an interactive page in four languages: open one, and change a number."""
    result = context.result()
    result.table(("page", "title"), [(file_name(language), texts(language)["title"]) for language in LANGUAGES])
    for language in LANGUAGES:
        page = lesson_page(language)
        result.file(file_name(language), page)
        size = len(page.encode())
        result.check(
            f"{file_name(language)}: {size / 1000:.0f} kB, below {_PAGE_BYTES / 1000:,.0f}", size < _PAGE_BYTES
        )
    row = computed()["example"]["steps"]["weights"][1]
    shown = ", ".join(f"{x:.4f}" for x in row)
    result.check(f"the second row of its weights: {shown}, as in the notebooks", shown == "0.3606, 0.6394, 0.0000")
    return result
