"""How the backward is cut for threads: into parts of the keys, each with its own gradients of keys and values, and its own dQ.

A task is a part of the keys of one key/value head. dK and dV of its keys are its own, so they need no sums of parts. One part writes
dQ itself, the others sums for the rows of queries that see any of their keys, which are added in order. Cuts are where visible pairs
are equal; there are no more parts than keep the threads busy, nor than fit into the memory of three backwards without parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from lowtri.kernels.abi import KEYS, PART
from lowtri.kernels.spec import QUERIES
from lowtri.masks.plan import Plan, row_of_runs

BUSY = 0.9  # of the threads' time; more parts are not needed
_MOST_MEMORY = 3  # times that without parts
_MOST_PARTS = 64


@dataclass(frozen=True, eq=False)
class Part:
    """Key tiles ``first_tile .. last_tile``, and the tiles of queries ``first_row .. last_row`` that see any of them."""

    first_tile: int
    last_tile: int
    first_row: int
    last_row: int

    def queries(self, nq: int) -> tuple[int, int]:
        """The first query, and one past the last."""
        return self.first_row * QUERIES, min(self.last_row * QUERIES, nq)


def choose_parts(plan: Plan, heads: int, threads: int, whole: int, query_bytes: int, thread_bytes: int) -> list[Part]:
    """The parts for so many key/value heads and threads.

    Args:
        whole: bytes of the backward without parts, the scratch memory aside.
        query_bytes: of dQ for one query of all heads.  thread_bytes: of scratch memory.
    """
    best = cut(plan, 1)
    if threads == 1 or heads % threads == 0:
        return best
    most, busy = _MOST_MEMORY * (whole + thread_bytes), share_busy(heads, threads)
    for count in range(2, min(_MOST_PARTS, ceil(plan.nk / KEYS)) + 1):
        if busy >= BUSY:
            break
        share = share_busy(heads * count, threads)
        if share > busy:
            parts = cut(plan, count)
            ranges = [part.queries(plan.nq) for part in parts[1:]]  # the first one has dQ itself
            own = sum(stop - start for start, stop in ranges) * query_bytes
            if whole + own + min(threads, heads * count) * thread_bytes > most:
                break
            best, busy = parts, share
    return best


def share_busy(tasks: int, threads: int) -> float:
    """The share of the threads' time in which they work on equal tasks."""
    return tasks / (threads * ceil(tasks / threads))


def cut(plan: Plan, count: int) -> list[Part]:
    """At most so many parts with about equal visible pairs, the first one with the most rows of queries."""
    tiles = ceil(plan.nk / KEYS)
    if count == 1:
        return [Part(0, tiles, 0, plan.rows)]
    first, last = plan.runs[:, 0].astype(np.int64), plan.runs[:, 1].astype(np.int64)
    row = row_of_runs(plan) % max(plan.rows, 1)
    edges = np.zeros(tiles + 1, np.int64)
    np.add.at(edges, first, 1)
    np.add.at(edges, last, -1)
    pairs = np.cumsum(np.cumsum(edges[:-1]))  # tiles of pairs up to each key tile
    ends = np.searchsorted(pairs, pairs[-1] * np.arange(1, count) / count) + 1
    bounds = np.unique(np.concatenate([[0], ends, [tiles]]))
    parts = []
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        seeing = row[(first < high) & (last > low)]
        rows = (int(seeing.min()), int(seeing.max()) + 1) if len(seeing) else (0, 0)
        parts.append(Part(low, high, *rows))
    widest = max(parts, key=lambda part: part.last_row - part.first_row)
    return [widest, *(part for part in parts if part is not widest)]


def table(
    parts: list[Part], plan: Plan, dq: tuple[int, ...], shape: tuple[int, int, int]
) -> tuple[NDArray[np.void], int]:
    """The record of each part for the kernel, and how many numbers the sums of dQ have.

    Args:
        dq: the strides of dQ.  shape: (batch, heads, head size).
    """
    batch, heads, size = shape
    records, offset = np.zeros(len(parts), PART), 0
    for n, part in enumerate(parts):
        start, stop = part.queries(plan.nq)
        if n == 0:
            records[n] = (part.first_tile, part.last_tile, 0, plan.rows, 0, *dq[:3])
            continue
        steps = heads * (stop - start) * size, (stop - start) * size, size
        # The kernel counts queries from the first of all.
        records[n] = (part.first_tile, part.last_tile, part.first_row, part.last_row, offset - start * size, *steps)
        offset += batch * steps[0]
    return records, offset
