"""SmolLM2-135M token by token: lowtri with each kind of weights, transformers and ctranslate2, as far as they are installed.

    python benchmarks/generating.py                          # one thread, after prompts of 32 and 1,024 tokens
    python benchmarks/generating.py --threads 2 --after 32 --runner "lowtri float16" --runner "ctranslate2 int8"

Each runner has a process of its own, because their OpenMP libraries disturb each other in one; the processes run in turns, and the
medians are compared. With one thread a token is timed in CPU time, which other load does not lengthen. A pause before each run lets the
threads of the process before it fall asleep. "lowtri float32" is ``Decoder.quantize("float32")``, "lowtri" the model as it is loaded.
The same prompt of random tokens for all; the next token is the most probable one.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowtri.benching import facts
from lowtri.nn.gguf import converted
from lowtri.nn.names import PACKAGED

NEW, PAUSE = 24, 0.3  # tokens of a run, and seconds before it
VOCABULARY = 49152
RUNNERS = (
    *("lowtri", "lowtri float32", "lowtri float16", "lowtri int8", "lowtri bf16"),
    *("transformers float32", "ctranslate2 float32", "ctranslate2 int8"),
)
Times = tuple[float, float]  # seconds of the prompt with the first token, and of each further token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runner", action="append", choices=RUNNERS)
    parser.add_argument("--after", action="append", type=int, metavar="TOKENS")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    found = facts(chosen.threads)
    clock = "CPU time" if chosen.threads == 1 else "wall-clock time"
    print(
        f"{found['cpu']}, {chosen.threads} threads of {found['cpus']} CPUs, load {found['load']}, {clock}; {found['date']}"
    )
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)  # the processes read it as they start
    folder = converted(PACKAGED["smollm2"].path(), print)
    for after in chosen.after or (32, 1024):
        compare([name for name in chosen.runner or RUNNERS if installed(name)], folder, after, chosen)


def installed(runner: str) -> bool:
    package = runner.split()[0]
    if importlib.util.find_spec(package) is None:
        print(f"{runner} is left out: {package} is not installed")
        return False
    return True


def compare(runners: list[str], folder: Path, after: int, chosen: argparse.Namespace) -> None:
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in runners:
        pipes[name], theirs = spawn.Pipe()
        processes.append(spawn.Process(target=serve, args=(theirs, name, folder, after, chosen.threads), daemon=True))
        processes[-1].start()
        theirs.close()  # so that a process that fails is an end of file
        pipes[name].recv()  # it is ready: one after the other, since they need memory to load
    times: dict[str, list[Times]] = {name: [] for name in runners}
    for number in range(chosen.rounds + 1):
        for name in runners if number % 2 else reversed(runners):
            time.sleep(PAUSE)
            pipes[name].send(True)
            taken = pipes[name].recv()
            if number:  # the first round warms up
                times[name].append(taken)
    for pipe, process in zip(pipes.values(), processes, strict=True):
        pipe.send(False)
        process.join()
    print(f"\nafter {after:,} tokens")
    for name, taken in times.items():
        first, each = (statistics.median(column) for column in zip(*taken, strict=True))
        print(f"  {name:<22}{1 / each:>8.1f} tokens/s{first:>10.3f} s to the first token", flush=True)


def serve(pipe: Any, runner: str, folder: Path, after: int, threads: int) -> None:
    """A runner's process: runs on request."""
    import torch

    torch.set_num_threads(threads)
    ids = torch.randint(10, VOCABULARY, (1, after), generator=torch.Generator().manual_seed(0))
    clock = time.process_time if threads == 1 else time.perf_counter
    package, _, kind = runner.partition(" ")
    with tempfile.TemporaryDirectory() as scratch:
        if package == "ctranslate2":
            run = with_ctranslate2(folder, kind, ids, threads, Path(scratch), clock)
        else:
            run = with_torch(
                with_lowtri(folder, kind) if package == "lowtri" else with_transformers(folder), ids, clock
            )
        pipe.send("ready")
        with torch.no_grad():
            while pipe.recv():
                pipe.send(run())


def with_torch(start: Callable[[], Callable[[Any], Any]], ids: Any, clock: Callable[[], float]) -> Callable[[], Times]:
    def run() -> Times:
        step = start()
        started = clock()
        token = step(ids).argmax(-1)
        first = clock()
        for _ in range(NEW):
            token = step(token).argmax(-1)
        return first - started, (clock() - first) / NEW

    return run


def with_lowtri(folder: Path, weights: str) -> Callable[[], Callable[[Any], Any]]:
    from lowtri.nn import Decoder

    model = Decoder.from_pretrained(folder).eval()
    if weights:
        model.quantize(weights)

    def start() -> Callable[[Any], Any]:
        cache = model.make_cache()
        return lambda ids: model(ids, cache=cache, logits_to_keep=1)

    return start


def with_transformers(folder: Path) -> Callable[[], Callable[[Any], Any]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def start() -> Callable[[Any], Any]:
        cache = None

        def step(ids: Any) -> Any:
            nonlocal cache
            output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            return output.logits

        return step

    return start


def with_ctranslate2(
    folder: Path, kind: str, ids: Any, threads: int, scratch: Path, clock: Callable[[], float]
) -> Callable[[], Times]:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter
    from tokenizers import Tokenizer

    TransformersConverter(str(folder)).convert(str(scratch / "model"), quantization=kind)
    generator = ctranslate2.Generator(
        str(scratch / "model"), device="cpu", compute_type=kind, intra_threads=threads, inter_threads=1
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = [tokenizer.id_to_token(int(token)) for token in ids[0]]

    def seconds(count: int) -> float:
        started = clock()
        generator.generate_batch(
            [prompt], max_length=count, min_length=count, include_prompt_in_result=False, sampling_topk=1
        )
        return clock() - started

    def run() -> Times:
        first = seconds(1)
        return first, (seconds(NEW + 1) - first) / NEW

    return run


if __name__ == "__main__":
    main()
