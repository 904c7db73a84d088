"""Calls in a child process: one that ends its process, by a segmentation fault or an exit, leaves a report.

The child is forked, so it has the function without pickling it, whatever it is. Below it a worker makes the calls. When the worker
ends, the child says how, and forks the next one: a process that has made no call, and that nothing has damaged.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from lowtri.errors import CallError
from lowtri.verifying.calling import Caller, CallFailed
from lowtri.verifying.cases import Case
from lowtri.verifying.definition import Problem, Results

_LOADING = 5.0  # seconds more for the first call of each worker, which loads libraries and compiles
_SPARE = 60.0  # seconds beyond the limits of its calls that a case may take before its process is ended


class _Request(NamedTuple):
    """What a worker computes."""

    arrays: str  # of which library
    case: Case
    dtype: torch.dtype
    gradients: bool


class ChildProcess:
    """A context in which calls are made by a process of their own.

    What the function prints goes to stderr. torch has one thread there: its pool of threads does not live on after a fork.

    Args:
        make: a caller for the arrays of a library.
        limit: seconds that one call may take.

    Raises:
        CallError: if this process cannot be forked.
    """

    def __init__(self, make: Callable[[str], Caller], limit: float) -> None:
        if not hasattr(os, "fork"):
            raise CallError("verify: isolate=True, but this system has no os.fork.\nFix: isolate=False.")
        if torch.cuda.is_initialized():
            raise CallError(
                "verify: isolate=True, but this process has used CUDA, and a child of it could not.\n"
                "Fix: isolate=False, or verify before the first use of CUDA."
            )
        self._make, self._limit = make, limit

    def __enter__(self) -> ChildProcess:
        self._connection, other = Pipe()
        self._pid = _fork()
        if self._pid == 0:
            try:
                self._connection.close()
                os.setpgid(0, 0)
                _supervise(other, self._make)
            finally:
                os._exit(0)  # whatever happened: the code of the parent is not run a second time
        other.close()
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        with contextlib.suppress(OSError):
            os.setpgid(self._pid, self._pid)  # if the child has not come to it
        with contextlib.suppress(OSError):
            os.killpg(self._pid, signal.SIGKILL)  # a call may still run
        os.waitpid(self._pid, 0)

    def caller(self, arrays: str) -> IsolatedCaller:
        """A caller with the arrays of one library, whose calls are made in the child process."""
        return IsolatedCaller(self, arrays, self._make(arrays).gradients)

    def ask(self, request: _Request) -> Any:
        """The worker's answer to a request.

        Raises:
            CallFailed: if the worker ended, or does not answer.
        """
        try:
            self._connection.send_bytes(pickle.dumps(request))
            if not self._connection.poll(4 * self._limit + _SPARE):  # a call that holds the interpreter's lock, too
                raise CallFailed("timeout", f"no result within {self._limit:g} s")
            answer = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):  # for want of memory, for example
            raise CallFailed("timeout", "the child process was ended from outside") from None
        if isinstance(answer, int):
            raise CallFailed("ended", f"it ended its process: {_how(answer)}", "ends its process")
        return answer


@dataclass
class IsolatedCaller:
    """Makes the calls of a :class:`Caller` in a child process."""

    child: ChildProcess
    arrays: str
    gradients: bool
    no_gradient: dict[str, str] = field(default_factory=dict)
    noted: list[CallFailed] = field(default_factory=list)

    def results(self, problem: Problem, dtype: torch.dtype) -> list[tuple[str, Results]]:
        """As :meth:`Caller.results`."""
        case = replace(problem.case)  # without what it has computed
        results, no_gradient, self.noted = self.child.ask(_Request(self.arrays, case, dtype, self.gradients))
        self.no_gradient.update(no_gradient)
        if isinstance(results, CallFailed):
            raise results
        return list(results)


def _fork() -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with warnings.catch_warnings():  # Python and JAX warn of locks that other threads hold
        warnings.simplefilter("ignore")
        return os.fork()


def _supervise(connection: Connection, make: Callable[[str], Caller]) -> None:
    """Fork a worker, and another one after each that ended, until the parent closes its end of the connection."""
    import resource

    faulthandler.disable()  # the report says it
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    torch.set_num_threads(1)
    while True:
        worker = _fork()
        if worker == 0:
            _work(connection, make)
        _, status = os.waitpid(worker, 0)
        connection.send_bytes(pickle.dumps(os.waitstatus_to_exitcode(status)))


def _work(connection: Connection, make: Callable[[str], Caller]) -> None:
    """Answer requests; the end of the connection is an EOFError, which ends the process."""
    callers: dict[str, Caller] = {}
    while True:
        request: _Request = pickle.loads(connection.recv_bytes())
        is_first = not callers
        caller = callers.setdefault(request.arrays, make(request.arrays))
        limit = caller.limit
        caller.limit += _LOADING if is_first else 0.0
        caller.gradients = request.gradients
        results: list[tuple[str, Results]] | CallFailed
        try:
            results = caller.results(request.case.draw(request.dtype), request.dtype)
        except CallFailed as error:
            results = error
        caller.limit = limit
        connection.send_bytes(pickle.dumps((results, caller.no_gradient, caller.noted)))


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"{(signal.strsignal(-exit_code) or name).lower()} ({name})"
