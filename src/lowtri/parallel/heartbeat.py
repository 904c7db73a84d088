"""A sign of life from each process, in the store: which process has ended, while the others wait for it in a collective.

A process that was killed leaves the others waiting until the time-out of torch.distributed, which does not name it, and a thread that
waits in gloo cannot be interrupted. So a thread of each process writes a count to the store, reads that of the next process, and
ends its own process, with one line for all of them, when another one has ended and the main thread does not come back.

Each process watches the next one that has not completed its work, so that the work of the store grows with the number of processes and
not with its square.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from lowtri.compat.distributed_private import own_store

__all__ = ["Heartbeat", "beating", "running"]

_INTERVAL = 0.5  # seconds between two signs of life
_STALE = 3.0  # seconds without one that show who has ended, where something else shows that some process has
_GRACE = 3.0  # seconds for the main thread to notice by itself, and to raise
_DONE, _ENDED = b"done", "ended"

_current: Heartbeat | None = None
_sessions = 0  # every process counts the same


def running() -> Heartbeat | None:
    """The heartbeat of this process, if there is one."""
    return _current


class Heartbeat:
    """The signs of life of this process and of the others.

    Args:
        timeout: seconds without a sign of life after which a process counts as ended, without any other evidence. A process gives none
            while it holds Python's lock in one long call.
    """

    def __init__(self, timeout: float) -> None:
        global _sessions
        _sessions += 1
        self.rank, self.world, self._timeout = dist.get_rank(), dist.get_world_size(), timeout
        self._store, self._lock, self._leaving = own_store(), threading.Lock(), threading.Lock()
        self._name, self._count = f"lowtri/heartbeat/{_sessions}", 0
        self._wake, self._signals = socket.socketpair()
        self._wake.setblocking(False)
        self._signals.settimeout(_INTERVAL)  # unlike select, also with more than 1,024 open files
        self._stopped = False
        self._beat()
        self._thread = threading.Thread(target=self._run, name="lowtri heartbeat", daemon=True)
        self._thread.start()

    def missing(self, within: float = 10.0) -> dict[int, str]:
        """The processes that give no sign of life: their numbers, and why they ended, where they said so."""
        try:
            return self._missing(within)
        except RuntimeError:  # the store is in a process that has ended, by default in that of rank 0
            return {} if self.rank == 0 else {0: ""}

    def _missing(self, within: float) -> dict[int, str]:
        seen: dict[int, tuple[bytes, float]] = {}
        until = time.monotonic() + within
        while True:
            self._beat()  # the others may look for missing processes at the same time
            now = time.monotonic()
            for rank in range(self.world):
                value = self._read(rank)
                if rank not in seen or seen[rank][0] != value:
                    seen[rank] = (value, now)
            failed = {rank: _reason(value) for rank, (value, _) in seen.items() if value.startswith(b"!")}
            silent = {r: "" for r, (value, since) in seen.items() if value != _DONE and now - since >= _STALE}
            missing = {rank: reason for rank, reason in {**silent, **failed}.items() if rank != self.rank}
            if missing or now > until or self._stopped:
                return missing
            time.sleep(_INTERVAL / 2)

    def sentence(self, missing: dict[int, str]) -> str:
        """One line that names the processes that have ended."""
        names = ", ".join(map(str, sorted(missing)[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        reason = next((f" ({reason})" for reason in missing.values() if reason), "")
        return f"rank{'s' * (len(missing) > 1)} {names} of {self.world} ended{reason}; start again with --resume"

    def is_first_to_report(self) -> bool:
        """True for the first process that calls it: the one that prints an error which all of them have."""
        with suppress(RuntimeError), self._lock:
            return bool(self._store.add(f"{self._name}/reported", 1) == 1)
        return True

    def leave(self, message: str, code: int = 1) -> None:
        """End this process at once: a regular end would wait for threads and collectives. One process prints the message."""
        self._leaving.acquire()  # never released: of two threads one prints, and ends the other, too
        first = self.is_first_to_report()
        with suppress(RuntimeError), self._lock:  # the store may have ended, too
            self._store.set(f"{self._name}/{_ENDED}", message)
        if first:
            print(f"lowtri: {message}", file=sys.stderr, flush=True)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)

    def stop(self, error: BaseException | None) -> None:
        """Stop, and say to the others that this process has ended, and why."""
        self._stopped = True
        self._wake.send(b"\0")
        self._thread.join()
        text = _DONE if error is None else f"!{type(error).__name__}: {error}".splitlines()[0][:200].encode()
        with suppress(RuntimeError), self._lock:
            self._store.set(f"{self._name}/{self.rank}", text)
        self._wake.close()
        self._signals.close()

    @contextmanager
    def on_signal(self) -> Iterator[None]:
        """On SIGTERM, with which torchrun ends the processes when one has failed, name that one; also while a collective waits."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        descriptor = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            signal.signal(signal.SIGTERM, before)

    def _run(self) -> None:
        other, value, since = (self.rank + 1) % self.world, b"", time.monotonic()
        try:
            while not self._stopped:
                received = self._pause()
                self._beat()
                now, latest = time.monotonic(), self._read(other)
                if latest != value:
                    value, since = latest, now
                ended = self._ended()
                if ended:
                    self._end_unless_stopped(ended)
                elif signal.SIGTERM in received:
                    missing = self.missing(2 * _STALE)
                    if not self._stopped:  # else the work is complete
                        stopped = "stopped by SIGTERM; start again with --resume"
                        self.leave(self.sentence(missing) if missing else stopped, 143)
                elif value == _DONE:  # watch the process after it in its place
                    other, since = (other + 1) % self.world, now
                elif other != self.rank and (value.startswith(b"!") or now - since > self._timeout):
                    missing = self.missing()
                    if missing:
                        self._end_unless_stopped(self.sentence(missing))
        except RuntimeError:  # the store is in a process that has ended, by default in that of rank 0
            self._end_unless_stopped(f"rank 0 of {self.world} ended; start again with --resume")

    def _end_unless_stopped(self, message: str) -> None:
        with suppress(RuntimeError), self._lock:
            self._store.set(f"{self._name}/{_ENDED}", message)
        until = time.monotonic() + _GRACE
        while not self._stopped and time.monotonic() < until:
            self._pause()
            with suppress(RuntimeError):
                self._beat()
        if not self._stopped:
            self.leave(message)

    def _pause(self) -> bytes:
        """Wait for the next sign of life, or for a signal; the numbers of the signals that came."""
        try:
            return self._signals.recv(64)
        except TimeoutError:
            return b""

    def _beat(self) -> None:
        with self._lock:
            self._count += 1
            self._store.set(f"{self._name}/{self.rank}", str(self._count))

    def _ended(self) -> str:
        """The message of another process that has noticed an end, or nothing."""
        return self._value(_ENDED).decode()

    def _read(self, rank: int) -> bytes:
        return self._value(str(rank))

    def _value(self, name: str) -> bytes:
        key = f"{self._name}/{name}"
        with self._lock:
            return bytes(self._store.get(key)) if self._store.check([key]) else b""


def _reason(value: bytes) -> str:
    return value[1:].decode(errors="replace")


@contextmanager
def beating(timeout: float = 60.0) -> Iterator[Heartbeat | None]:
    """A heartbeat for the time of the context; None if this torch does not expose the store. All processes enter it together."""
    global _current
    if own_store() is None:
        yield None
        return
    heartbeat, error = Heartbeat(timeout), None
    _current = heartbeat
    try:
        with heartbeat.on_signal():
            yield heartbeat
    except BaseException as raised:
        error = raised
        raise
    finally:
        _current = None
        heartbeat.stop(error)
