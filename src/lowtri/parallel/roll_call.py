"""Which processes of a group answer: names those that are missing, which a failed collective does not."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from lowtri.compat.distributed_private import default_store
from lowtri.errors import LowtriError, RankError
from lowtri.parallel import heartbeat

__all__ = ["RollCall"]

_AFTER_FAILURE = 10.0  # seconds in which the others have to notice a failure, too
_met: Counter[tuple[int, ...]] = Counter()  # roll calls of each group of ranks; every process counts the same


class RollCall:
    """The processes of a group, by the store of torch.distributed, which works where collectives have failed.

    Every process of the group makes its roll calls in the same order.

    Args:
        group: a process group, or None for all processes.
        timeout: seconds to wait for all processes.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        self.rank, self.timeout = dist.get_rank(group), timeout
        self.ranks = tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
        self._before = f"lowtri/{'-'.join(map(str, self.ranks))}/{_met[self.ranks]}"
        _met[self.ranks] += 1
        self._name = f"lowtri/{'-'.join(map(str, self.ranks))}/{_met[self.ranks]}"
        self._store = default_store()
        self._failures = 0

    def meet(self, what: str) -> None:
        """Wait until every process is here.

        Raises:
            RankError: names the processes that are not, on every process that is.
        """
        missing = self._answer(f"{self._name}/meet", self.timeout)
        if not missing and self.rank == 0 and self._store is not None:  # all have left the meeting before
            with suppress(RuntimeError):
                for name in ("count", "all", *range(len(self.ranks))):
                    self._store.delete_key(f"{self._before}/meet/{name}")
        if missing:
            raise RankError(self._sentence(what, missing, self.timeout))

    @contextmanager
    def required(self, what: str) -> Iterator[None]:
        """Around a collective: if it fails, an error that names the processes that do not answer."""
        try:
            yield
        except LowtriError:  # several are RuntimeErrors, too
            raise
        except RuntimeError as error:  # torch's classes for it differ by version and by backend
            self._failures += 1
            reason = str(error).strip().splitlines()[0][:200]
            if (beats := heartbeat.running()) is not None and (ended := beats.missing(_AFTER_FAILURE)):
                raise RankError(f"{what}: {beats.sentence(ended)}.\n{reason}") from error
            missing = self._answer(f"{self._name}/failed/{self._failures}", min(_AFTER_FAILURE, self.timeout))
            if missing:
                sentence = self._sentence(what, missing, min(_AFTER_FAILURE, self.timeout))
                raise RankError(f"{sentence}\n{reason}") from error
            raise RankError(f"{what}: data could not be exchanged, but every rank answers.\n{reason}") from error

    def _answer(self, name: str, timeout: float) -> list[int]:
        """Answer, and wait for the others; the ranks of the group that did not answer in time."""
        others = [rank for rank in range(len(self.ranks)) if rank != self.rank]
        if self._store is None:
            return []
        try:
            self._store.set(f"{name}/{self.rank}", b"1")
            if self._store.add(f"{name}/count", 1) == len(self.ranks):
                self._store.set(f"{name}/all", b"1")
            until = time.monotonic() + timeout
            while not self._store.check([f"{name}/all"]):
                if time.monotonic() > until:
                    return [rank for rank in others if not self._store.check([f"{name}/{rank}"])]
                time.sleep(0.002)
        except RuntimeError:  # the store lives in one process, by default that of global rank 0
            return [self.ranks.index(0)] if 0 in self.ranks and self.ranks[self.rank] != 0 else []
        return []

    def _sentence(self, what: str, missing: list[int], timeout: float) -> str:
        several = len(missing) > 1
        names = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        return (
            f"{what}: rank{'s' * several} {names} of {len(self.ranks)} did not answer within {timeout:g} s.\n"
            "Fix: every process of the group makes the same calls in the same order; see whether one has ended. (One that waits for "
            "an ended one does not answer either.)"
        )
