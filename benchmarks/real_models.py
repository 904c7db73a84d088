"""Whole models on lowtri beside the same models of transformers, on torch's SDPA and on the plain formula ("eager").

    python benchmarks/real_models.py                          # everything that is installed
    python benchmarks/real_models.py --part decode --threads 1
    python benchmarks/real_models.py --json out/real_models.json

Parts:
    decode   SmolLM2-135M: tokens a second, one by one, after prompts of 128 and 4,096 tokens
    prompt   SmolLM2-135M: a prompt of 1,024 tokens
    llama    a Llama of 8 layers, d 512, 8 query and 4 key/value heads: a prompt of 4,096 tokens, a training step of 2,048
    window   the same as a Mistral with a window of 256: a prompt of 4,096 tokens

Runners: lowtri is lowtri.nn.Decoder; registered is transformers' model with attn_implementation="lowtri"; sdpa and eager are
transformers' own. All hold the same weights, and what they answer is compared before anything is timed. They run interleaved in
one process, so that whatever else the machine does falls on all of them; medians are compared. The first round warms up and
compiles, and is not counted. A training step is forward, loss, backward and AdamW, weights in the dtype that is named.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import lowtri
from lowtri.benching import facts
from lowtri.files import write_text
from lowtri.nn import Decoder, DecoderConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RUNNERS = ("lowtri", "registered", "sdpa", "eager")
AFTER = (128, 4096)
NEW = 32
LONG = 4096
TRAINED = 2048
VOCABULARY = 8192
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=("decode", "prompt", "llama", "window"))
    parser.add_argument("--dtype", action="append", choices=tuple(DTYPES))
    parser.add_argument("--runner", action="append", choices=RUNNERS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    runners = [name for name in chosen.runner or RUNNERS if name != "registered" or register()]
    found = about(chosen.threads)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    print(
        f"{found['cpu']}, {found['threads']} threads of {found['cpus']} CPUs, load {found['load']}; {found['date']}\n{versions}"
    )
    rows: list[Row] = []
    for part in chosen.part or ("decode", "prompt", "llama", "window"):
        for name in chosen.dtype or DTYPES:
            for case, models, run, tokens in cases(part, DTYPES[name], runners):
                seconds = alternating({runner: run(model) for runner, model in models.items()}, chosen.rounds)
                rows += report(case, name, seconds, tokens)
                gc.collect()
    if chosen.json is not None:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        write_text(chosen.json, json.dumps({**found, "rows": rows}, indent=2) + "\n")


def register() -> bool:
    """Whether transformers can be switched over here."""
    try:
        from lowtri.integrations.transformers import register as switch
    except ImportError as error:
        print(f"registered is left out: {error}")
        return False
    switch()
    return True


# What is measured: a case is a name, a model for each runner, what to do with a model, and how many tokens that makes.

Case = tuple[str, dict[str, Any], Callable[[Any], Callable[[], float]], int]


def cases(part: str, dtype: torch.dtype, runners: list[str]) -> Iterator[Case]:
    if part in ("decode", "prompt"):
        found = smollm2()
        if found is None:
            return
        models = {name: loaded(found[0], name, dtype, found[1]) for name in runners if name != "eager"}
        agree(models, ids_of(64, 49152))
        if part == "decode":
            for after in AFTER:
                yield f"SmolLM2-135M, decode after {after:,}", models, partial(decoding, after=after), NEW
        else:
            ids = ids_of(1024, 49152)
            yield "SmolLM2-135M, prompt of 1,024", models, lambda model: lambda: prompted(model, ids), 1024
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        llama_shaped(folder, 256 if part == "window" else None)
        models = {runner: loaded(folder, runner, dtype) for runner in runners}
    agree(models, ids_of(700, VOCABULARY))
    title = "Mistral of 8 layers, window 256" if part == "window" else "Llama of 8 layers"
    ids = ids_of(LONG, VOCABULARY)
    yield f"{title}, prompt of {LONG:,}", models, lambda model: lambda: prompted(model, ids), LONG
    if part == "llama":
        batch = ids_of(TRAINED + 1, VOCABULARY)
        yield f"{title}, training step at {TRAINED:,}", models, lambda model: trained(model, batch), TRAINED


def smollm2() -> tuple[Path, str] | None:
    """The folder of SmolLM2's weights, and the name of the GGUF file in it."""
    from lowtri.pretrained import find_model

    try:
        folder, gguf = find_model("smollm2")
    except lowtri.DataError as error:
        print(f"SmolLM2 is left out: {error}")
        return None
    return folder, str(gguf)


def llama_shaped(folder: Path, window: int | None) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 4, "intermediate_size": 1408, "max_position_embeddings": LONG}
    sizes |= {"vocab_size": VOCABULARY, "tie_word_embeddings": True}
    if window is None:
        LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    else:
        MistralForCausalLM(MistralConfig(**sizes, sliding_window=window)).save_pretrained(folder)


def loaded(folder: Path, runner: str, dtype: torch.dtype, gguf: str | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    attention = {"registered": "lowtri", "lowtri": "eager"}.get(runner, runner)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention, gguf_file=gguf)
    return (as_decoder(model, dtype) if runner == "lowtri" else model).eval()


def as_decoder(llama: Any, dtype: torch.dtype) -> Decoder:
    """The same weights in lowtri's decoder, whose parameters have the same names."""
    c = llama.config
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"]
    names += ["num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"]
    sizes = {name: getattr(c, name) for name in names}
    window = getattr(c, "sliding_window", None)
    mask = "causal" if window is None else f"causal & window({window})"
    decoder = Decoder(DecoderConfig(**sizes, rope_theta=c.rope_parameters["rope_theta"], mask=mask))
    decoder.load_state_dict(llama.state_dict())
    return decoder.to(dtype)


def ids_of(n: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, (1, n), generator=torch.Generator().manual_seed(0))


def agree(models: dict[str, Any], ids: torch.Tensor) -> None:
    """All models answer alike, as far as the dtype goes, or nothing is timed."""
    with torch.no_grad():
        answers = {name: logits(model(ids)).float() for name, model in models.items()}
    expected = answers.get("sdpa", next(iter(answers.values())))
    for name, found in answers.items():
        away = float((found - expected).abs().max() / expected.abs().max())
        most = 1e-4 if next(models[name].parameters()).dtype == torch.float32 else 0.1
        if not away < most:
            raise SystemExit(f"{name} answers otherwise, by {away:.1e} of the greatest logit: nothing is timed")


def logits(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.logits


def step(model: Any, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
    """Logits of the last token, and the cache."""
    if isinstance(model, Decoder):
        cache = model.make_cache() if cache is None else cache
        return model(ids, cache=cache, logits_to_keep=1), cache
    out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits, out.past_key_values


def prompted(model: Any, ids: torch.Tensor) -> float:
    with torch.no_grad():
        started = time.perf_counter()
        step(model, ids, None)
        return time.perf_counter() - started


def decoding(model: Any, after: int) -> Callable[[], float]:
    """Seconds for NEW greedy tokens behind a prompt, which is read once and not counted: the cache is cropped back to it."""
    with torch.no_grad():
        first, prefilled = step(model, ids_of(after, 49152), None)

    def run() -> float:
        out = first
        cache = prefilled
        with torch.no_grad():
            started = time.perf_counter()
            for _ in range(NEW):
                out, cache = step(model, out[:, -1].argmax(-1, keepdim=True), cache)
            taken = time.perf_counter() - started
        cache.crop(after if isinstance(model, Decoder) else -NEW)  # transformers counts what is to go
        return taken

    return run


def trained(model: Any, batch: torch.Tensor) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5, fused=True)

    def run() -> float:
        started = time.perf_counter()
        options = {} if isinstance(model, Decoder) else {"use_cache": False}
        loss = F.cross_entropy(logits(model(batch[:, :-1], **options)).float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        loss.item()
        return time.perf_counter() - started

    return run


# Timing and telling.


def alternating(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The seconds of each run in each round, after a round that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        # The second finds warm memory, so the order alternates.
        names = list(runs) if number % 2 else list(reversed(runs))
        for name in names:
            taken = runs[name]()
            if number:
                seconds[name].append(taken)
    return seconds


def report(case: str, dtype: str, seconds: dict[str, list[float]], tokens: int) -> list[Row]:
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    base = medians.get("sdpa")
    print(f"\n{case}, {dtype}")
    rows = []
    for name, median in medians.items():
        ratio = None if base is None else base / median
        beside = "" if ratio is None or name == "sdpa" else f"   {ratio:5.2f} times sdpa"
        print(f"  {name:<11}{median * 1000:>10.1f} ms{tokens / median:>12,.1f} tokens/s{beside}", flush=True)
        rows.append({"case": case, "dtype": dtype, "runner": name, "seconds": seconds[name], "median": median})
        rows[-1] |= {"tokens": tokens, "tokens_per_second": tokens / median, "times_sdpa": ratio}
    return rows


def about(threads: int) -> dict[str, Any]:
    import transformers

    found = facts(threads)
    found["versions"] = {**found["versions"], "transformers": transformers.__version__}
    return found


if __name__ == "__main__":
    main()
