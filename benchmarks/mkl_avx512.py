"""The table of attention.py with one more column: torch's SDPA where MKL may use AVX-512 on an AMD CPU.

Linux on x86-64; needs a C compiler.

    python benchmarks/mkl_avx512.py
    python benchmarks/mkl_avx512.py --case "decode" --case "window bf16" --json

torch's wheels contain Intel's MKL, which uses AVX-512 on Intel's CPUs only. This script compiles a shared library that
overrides that check and preloads it into a second process, which runs cases on request, so that both are timed interleaved.
On Intel CPUs it changes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from attention import PEERS, note, options
from lowtri.benching import TimedElsewhere, as_json, as_text, facts, measure, sdpa, timed
from presets import PresetCall, choose

NAME = "torch SDPA, MKL with AVX-512"

_SOURCE = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"


class AvxWorker:
    """The second process, as a context manager; where ``why_not`` is a reason, none was started.

    Requests and replies are JSON, one a line: {"case": {...}} gets {"ready": true} or {"why_not": "..."},
    and {"run": true} gets {"seconds": s}.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.why_not = _missing()
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> AvxWorker:
        if self.why_not is not None:
            return self
        self._folder = tempfile.TemporaryDirectory()
        source, library = (Path(self._folder.name) / name for name in ("mkl.c", "mkl.so"))
        source.write_text(_SOURCE, encoding="ascii")
        built = subprocess.run(
            ["cc", "-shared", "-fPIC", "-o", str(library), str(source)], capture_output=True, text=True, check=False
        )
        if built.returncode:
            self.why_not = f"cc could not build the library: {(built.stderr.strip() or 'no message').splitlines()[0]}"
            return self
        preload = " ".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(self.threads)],
            env={**os.environ, "LD_PRELOAD": preload},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()  # it ends at the end of its input
            self._process.stdout.close()
            self._process.wait()
        if self._folder is not None:
            self._folder.cleanup()

    def prepare(self, case: PresetCall) -> str | None:
        """Set the case up there; or the reason why it cannot run."""
        if self.why_not is not None:
            return self.why_not
        reply = self._request({"case": asdict(case)})
        return reply.get("why_not")

    def seconds(self) -> float:
        """The time of one run there."""
        return float(self._request({"run": True})["seconds"])

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return {"why_not": "its process ended", "seconds": float("nan")}
        reply: dict[str, Any] = json.loads(line)
        return reply


def _missing() -> str | None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the preloaded library works on Linux and x86-64 only"
    return None if shutil.which("cc") else "no C compiler: cc was not found"


def serve(threads: int, requests: IO[str], replies: IO[str]) -> None:
    """The loop of the second process."""
    import torch

    torch.set_num_threads(threads)
    attend: Any = None
    tensors: Any = None
    for line in requests:
        request = json.loads(line)
        if "case" in request:
            tensors = None  # freed before the new ones are allocated
            case = PresetCall(**request["case"])
            attend = sdpa(case)
            if isinstance(attend, str):
                reply: dict[str, Any] = {"why_not": attend}
            else:
                tensors = case.tensors()
                timed(attend, tensors)
                reply = {"ready": True}
        else:
            reply = {"seconds": timed(attend, tensors)}
        print(json.dumps(reply), file=replies, flush=True)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--serve", type=int, metavar="THREADS", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve is not None:
        serve(chosen.serve, sys.stdin, sys.stdout)
        return
    calls = choose(chosen.full, chosen.case)
    machine = facts(chosen.threads)
    with AvxWorker(chosen.threads) as worker:

        def elsewhere(call: PresetCall) -> TimedElsewhere | str:
            return worker.prepare(call) or TimedElsewhere(worker.seconds)

        rows = list(measure(calls, {**PEERS, NAME: elsewhere}, chosen.threads, chosen.rounds, progress=note))
    print(json.dumps(as_json(rows, machine), indent=2) if chosen.json else as_text(rows, machine))


if __name__ == "__main__":
    main()
