"""torch's SDPA in a process where MKL takes its AVX-512 road, answering on demand so that it can be measured in turns.

torch's wheels bring Intel's MKL, which asks whether the CPU is Intel's before it uses AVX-512. A library of one function, loaded
first, answers yes; it is compiled with the machine's C compiler. On Intel CPUs it changes nothing.
"""

from __future__ import annotations

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

from lowtri.benching.cases import Case

__all__ = ["Opened", "serve"]

_SOURCE = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"


class Opened:
    """The other process, as a context; ``why_not`` says what is missing, and then nothing was started.

    It answers to JSON, a line each: {"case": {...}} with {"ready": true} or {"why_not": "..."}, {"run": true} with {"seconds": s}.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.why_not = _missing()
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Opened:
        if self.why_not is not None:
            return self
        self._folder = tempfile.TemporaryDirectory()
        source, library = (Path(self._folder.name) / name for name in ("answer.c", "answer.so"))
        source.write_text(_SOURCE, encoding="ascii")
        built = subprocess.run(
            ["cc", "-shared", "-fPIC", "-o", str(library), str(source)], capture_output=True, text=True, check=False
        )
        if built.returncode:
            self.why_not = f"cc could not build the library: {(built.stderr.strip() or 'no message').splitlines()[0]}"
            return self
        preload = " ".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from lowtri.benching.opened import serve; serve()", str(self.threads)],
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

    def prepare(self, case: Case) -> str | None:
        """Make the case ready there; or say why it cannot run."""
        if self.why_not is not None:
            return self.why_not
        answer = self._ask({"case": asdict(case)})
        return answer.get("why_not")

    def seconds(self) -> float:
        """Of one run there."""
        return float(self._ask({"run": True})["seconds"])

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return {"why_not": "its process ended", "seconds": float("nan")}
        answer: dict[str, Any] = json.loads(line)
        return answer


def _missing() -> str | None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the road is opened on Linux and x86-64 only"
    return None if shutil.which("cc") else "no C compiler: cc was not found"


def serve(questions: IO[str] | None = None, answers: IO[str] | None = None) -> None:
    """The loop of the other process."""
    import torch

    from lowtri.benching.peers import sdpa
    from lowtri.benching.runs import Tensors, timed

    questions, answers = questions or sys.stdin, answers or sys.stdout
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    attend: Any = None
    tensors: Any = None
    for line in questions:
        question = json.loads(line)
        if "case" in question:
            tensors = None  # the old ones go before the new ones come
            case = Case(**question["case"])
            attend = sdpa(case)
            if isinstance(attend, str):
                answer: dict[str, Any] = {"why_not": attend}
            else:
                tensors = Tensors(case)
                timed(attend, tensors)
                answer = {"ready": True}
        else:
            answer = {"seconds": timed(attend, tensors)}
        print(json.dumps(answer), file=answers, flush=True)
