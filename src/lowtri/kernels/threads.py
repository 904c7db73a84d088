"""Running a kernel on a team of threads.

A kernel is a C function of one argument, the address of its record. Each thread of the team calls it and takes tasks from a counter in
the record until none is left. If torch is loaded, the team is torch's own OpenMP team, because its workers spin for a while after each
torch operation, and other threads would have to share cores with them. An interrupt (Ctrl-C) is raised when all threads are done.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from lowtri.forks import after_fork
from lowtri.kernels.library import Code

_forked = False
_team_has_run = False


def _one_thread_after_fork() -> None:
    # An OpenMP team does not survive a fork: a child process that needs it waits for ever. So kernels run on one thread there, and,
    # where a kernel has started torch's team, torch's own operations, too.
    global _forked
    _forked = True
    if _team_has_run:
        sys.modules["torch"].set_num_threads(1)


after_fork(_one_thread_after_fork)


@cache
def openmp_team() -> tuple[str, Any] | None:
    """torch's OpenMP library, by its file's name, and its GOMP_parallel: libgomp on Linux, libomp on macOS; None without one.

    LLVM's libomp exports the functions of GNU's libgomp; Windows' vcomp does not, and threads of Python run there.
    """
    torch = sys.modules.get("torch")
    if torch is None or torch.__file__ is None:
        return None
    folder = Path(torch.__file__).parent / "lib"
    for path in (*sorted(folder.glob("libgomp*")), *sorted(folder.glob("libomp*"))):
        try:
            start = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):  # it cannot be loaded, or was built without these functions
            continue
        start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        start.restype = None
        return path.name, start
    return None


def run_team(code: Code, record: int, threads: int) -> None:
    """Call the code on ``threads`` threads, each with the record's address; returns when all are done."""
    global _team_has_run
    if threads <= 1 or _forked:
        code.call(record)
        return
    team = openmp_team() if "torch" in sys.modules else None
    if team is not None:
        _team_has_run = True
        team[1](code.address, record, threads, 0)
        return
    _python_team(code.call, record, threads)


def _python_team(code: Callable[[int], None], record: int, threads: int) -> None:
    """Call the code on Python threads. An interrupt waits until all are done, so that no memory they write to is freed before."""
    done, locks = False, [threading.Lock() for _ in range(threads - 1)]

    def work(lock: threading.Lock) -> None:
        with lock:
            if not done:  # else all tasks were taken before this thread began
                code(record)

    interrupt: BaseException | None = None
    try:
        for lock in locks:
            threading.Thread(target=work, args=(lock,)).start()
        code(record)
    except BaseException as error:  # Ctrl-C, or any exception of a signal handler
        interrupt = error
    done = True
    for lock in locks:
        while lock.locked():  # by a thread that works; one that begins only now reads `done`
            try:
                with lock:
                    pass
            except BaseException as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt
