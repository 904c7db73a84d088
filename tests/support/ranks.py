"""Real processes for the tests of lowtri.parallel: gloo over loopback, started once, for many functions.

The processes are forked from a server that has imported torch once. Groups of 2 and 3 are sub-groups of the 4 processes.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

PRELOADED = ["torch", "torch.distributed", "lowtri.parallel.context", "lowtri.dispatch.autograd", "lowtri.nn"]
PRELOADED += ["lowtri.integrations.transformers", "transformers.models.llama.modeling_llama"]


stores: list[Any] = []  # in a process of Ranks: the store in which its processes meet


class Ranks:
    """``size`` processes of one torch.distributed world; ``run`` calls a function on some of them.

    Args:
        timeout: of collectives, in seconds.
        once: the processes end after the first function, as those of a program do.
    """

    def __init__(self, size: int, timeout: float = 60, *, once: bool = False) -> None:
        self.size = size
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a free port
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, self._store.port, rank, size, timeout, once), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def start(self, function: Callable[..., Any], *arguments: Any, size: int | None = None) -> None:
        """Call ``function(group, *arguments)`` on the first ``size`` processes, in their group."""
        self._size = self.size if size is None else size
        for pipe in self._pipes[: self._size]:
            pipe.send((function, arguments, self._size))

    def results(self, timeout: float = 120) -> list[Any]:
        """What each process returned, or the exception that it raised; None for a process that has ended."""
        results: list[Any] = [None] * self._size
        left = {pipe: rank for rank, pipe in enumerate(self._pipes[: self._size])}
        while left:
            ready = wait(list(left), timeout)
            assert ready, f"ranks {sorted(left.values())} do not answer"
            for pipe in ready:
                rank = left.pop(pipe)  # type: ignore[arg-type]
                try:
                    results[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    results[rank] = None
        return results

    def run(self, function: Callable[..., Any], *arguments: Any, size: int | None = None) -> list[Any]:
        """``start`` and ``results``; an exception on any process fails, with its traceback."""
        self.start(function, *arguments, size=size)
        results = self.results()
        for rank, result in enumerate(results):
            if isinstance(result, Failed):
                raise AssertionError(f"rank {rank}:\n{result.traceback}")
        return results

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()


class Failed:
    """An exception on a process."""

    def __init__(self, error: BaseException) -> None:
        self.kind = type(error).__name__
        self.message = str(error)
        self.traceback = "".join(traceback.format_exception(error))

    def __repr__(self) -> str:
        return f"{self.kind}: {self.message}"


def _serve(pipe: Connection, port: int, rank: int, size: int, timeout: float, once: bool) -> None:
    import torch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    stores.append(store)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    groups = {n: dist.new_group(list(range(n)), timeout=limit) for n in range(1, size)}
    groups[size] = None
    while True:
        try:
            function, arguments, count = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(function(groups[count], *arguments))
        except BaseException as error:
            pipe.send(Failed(error))
        if once:
            os._exit(0)
