"""Every part of lowtri in one run, each with its checks and its files.

    python examples/demo --out out/demo
    python examples/demo --part steps --part who

Each part says what it checks and measures whether it holds; the last line counts, and the exit code is 1 if a check failed.
Two small models are trained for why, writing and peeking: about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import lowtri
from demo import PARTS
from demo.context import Context, Result
from demo.page import Part, as_html

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; the result is the exit code."""
    parser = argparse.ArgumentParser(
        prog="python examples/demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="a folder for the page and its files")
    parser.add_argument("--part", action="append", choices=PARTS, help="this part alone; may be repeated")
    parser.add_argument("--threads", type=int, help="threads to compute with; default: torch's own choice")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(argv)
    if options.threads is not None:
        if options.threads < 1:
            parser.error(f"--threads is {options.threads}. Fix: at least 1")
        torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    context = Context(options.out, note=lambda line: print(line, file=sys.stderr, flush=True))
    parts: list[Part] = []
    for name in PARTS:
        if not options.part or name in options.part:
            parts.append(_run(name, context))
            if not options.json:
                _print(len(parts), parts[-1])
    checks = [check for part in parts for check in part.result.checks]
    passed = sum(check.passed for check in checks)
    verdict = f"{passed} of {len(checks)} checks passed"
    page = context.write("index.html", as_html(parts, verdict, _machine(sum(part.seconds for part in parts))))
    if options.json:
        print(json.dumps({"verdict": verdict, "parts": [_as_dict(part) for part in parts]}, indent=2))
    else:
        print(f"\n{options.out / page}\n{verdict}")
    return 0 if passed == len(checks) else 1


def _run(name: str, context: Context) -> Part:
    """Run one part. An exception is a failed check of that part; the others still run."""
    module = importlib.import_module(f"demo.{name}")
    started = time.perf_counter()
    try:
        result = module.run(context)
    except Exception as error:
        result = Result(f"{type(error).__name__}: {error}")
        result.check(f"it runs to its end: {type(error).__name__}", False)
    return Part(name, module.TITLE, module.SENTENCE, result, time.perf_counter() - started)


def _print(number: int, part: Part) -> None:
    print(f"\n{number}. {part.title}\n{part.sentence}\n")
    print(part.result.text + "\n")
    for check in part.result.checks:
        print(f"   {'✓' if check.passed else '✗ FAILED:'} {check.text}", flush=True)


def _as_dict(part: Part) -> dict[str, object]:
    checks = [check._asdict() for check in part.result.checks]
    files = [*part.result.pictures, *part.result.files]
    return {"part": part.name, "seconds": round(part.seconds, 1), "checks": checks, "files": files}


def _machine(seconds: float) -> str:
    versions = f"lowtri {lowtri.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    where = f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads of {os.cpu_count()} CPUs"
    return f"{versions}; {where}; {time.strftime('%Y-%m-%d')}, {seconds:.0f} s"
