"""Change inputs: outputs that may not see them must not move."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.context import Bools, Context
from lowtri.auditing.finding import Finding, Leak, by, moves
from lowtri.auditing.noise import movement
from lowtri.auditing.probe import Probe

__all__ = ["PROBE"]

_BISECTED = 16  # queries that are followed down to one key


def _change(context: Context) -> Finding:
    """Every key alone, and for every query all that is hidden from it at once, by random and by extreme values.

    Token ids are also changed to what the row itself holds: a leak of equality shows in no random draw from many ids.
    Short inputs are looked at pair by pair. Of long ones a choice of places is taken, and a query that moves is
    bisected down to one key.
    """
    queries = context.queries()
    keys = queries if context.by_pair else []
    draws = context.draws * 4 if context.discrete_output else context.draws
    sweep = _Sweep(context)
    kinds = [(100, "random"), (101, "extreme"), *([(102, "echoed")] if context.inputs.discrete else [])]
    if not context.by_pair and context.discrete_output:  # discrete answers move rarely
        kinds += [(103 + more, "random") for more in range(draws - 1)]
    total = draws * len(keys) + len(kinds) * len(queries)
    for salt in range(draws):
        fresh = context.fresh(salt)
        for key in keys:
            where = np.arange(context.n) == key
            sweep.single(where, fresh, key)
            context.tick(sweep.runs, total)
    for salt, kind in kinds:
        fresh = context.fresh(salt, kind) if kind != "echoed" else context.inputs
        for query in queries:
            if kind == "echoed":
                fresh = context.echoed(query)
            where = ~context.allowed[:, query, :]  # (1 or B, N)
            if where.any():
                sweep.joint(where, fresh, query, kind)
            context.tick(sweep.runs, total)
    return sweep.finding(len(keys), len(queries), draws)


class _Sweep:
    """The runs of one probe, and the worst that they showed."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.sparse = (
            len(context.queries()) < context.n
        )  # a query that is not looked at may be found through one that is
        self.pairs: dict[tuple[int, int], Leak] = {}  # the largest movement of each pair that should not be
        self.doubtful: dict[tuple[int, int], Leak] = {}
        self.runs = 0
        self.bisected = 0
        self.poisoned = 0
        self.witness: Any = None

    def single(self, where: Bools, fresh: Any, key: int) -> None:
        """Change one key everywhere in the batch: one column of the table of pairs."""
        changed = self.context.inputs.change(where, fresh)
        clean = self.context.independent_of(where)
        sizes, scale = self._moved(changed, clean, ordinary=True)
        self.context.see(sizes.max(axis=0), key)
        for row, query in np.argwhere(clean & (sizes > 0)):
            self._note(int(row), int(query), key, float(sizes[row, query]), scale, changed)

    def joint(self, where: Bools, fresh: Any, query: int, kind: str) -> None:
        """Change all that is hidden from one query; if it moves, or one that sees no more of it, find a key that does it."""
        changed = self.context.inputs.change(where, fresh)
        clean = self.context.independent_of(where)
        ordinary = kind == "random" or self.context.inputs.discrete
        sizes, scale = self._moved(changed, clean, ordinary=ordinary)
        wrong = clean & (sizes > 0)  # (B, N)
        for row in np.flatnonzero(wrong.any(axis=1) if self.sparse else wrong[:, query]):
            if not wrong[row, query]:
                query = int(np.flatnonzero(wrong[row])[-1])
            size = float(sizes[row, query])
            sure = self.context.noise.classify(size, scale) == "leak"
            known = {q for q, _ in self.pairs} | (set() if sure else {q for q, _ in self.doubtful})
            if query in known or self.bisected >= _BISECTED:
                continue
            self.bisected += 1
            hidden = np.flatnonzero(where[row % where.shape[0]])
            found = self._bisect(int(row), query, hidden, fresh, self.context.noise.classify(size, scale), ordinary)
            if found is not None:
                key, alone, alone_scale, inputs = found
                self._note(int(row), query, key, alone, alone_scale, inputs)
            else:
                self._note(int(row), query, int(hidden[0]), size, scale, changed, jointly=len(hidden))

    def _moved(self, changed: Any, clean: Bools, *, ordinary: bool) -> tuple[npt.NDArray[np.float64], float]:
        """How far each row moves, infinitely far where a number turns from finite to infinite or NaN, or back.

        Extreme vectors may overflow on the way and reach an output as 0 * inf; that is counted, and is no leak.
        """
        sizes, scale = self.context.moved(changed)
        self.runs += 1
        self.poisoned += int((np.isnan(sizes) & clean).sum())
        return np.nan_to_num(sizes, nan=np.inf if ordinary else 0.0), scale

    def _note(self, row: int, query: int, key: int, size: float, scale: float, changed: Any, jointly: int = 0) -> None:
        kind = self.context.noise.classify(size, scale)
        if kind == "clean":
            return
        note = f"output {query} {moves(size, f' when all {jointly} inputs hidden from it change together')}"
        leak = Leak(query, key, size, row, note=note if jointly else "")
        sure = kind == "leak" and self._again(row, query, changed, size)
        found = self.pairs if sure else self.doubtful
        if (query, key) not in found or found[query, key].size < size:
            found[query, key] = leak
        if sure and self.witness is None:
            self.witness = (self.context.inputs, changed, row)

    def _again(self, row: int, query: int, changed: Any, size: float) -> bool:
        # The first accusation is made only of a movement that can be repeated; then the model is known to repeat itself.
        if self.witness is not None:
            return True
        before = self.context.adapter(self.context.inputs)
        again = movement(before, self.context.adapter(changed))[row, query]
        return bool(np.isnan(again) if np.isinf(size) else again > size / 2)

    def _bisect(
        self, row: int, query: int, hidden: npt.NDArray[np.intp], fresh: Any, kind: str, ordinary: bool
    ) -> tuple[int, float, float, Any] | None:
        """One key among `hidden` that moves the query alone, by halving; None if only several together do."""
        result = None
        while True:
            halves = (hidden[: len(hidden) // 2], hidden[len(hidden) // 2 :]) if len(hidden) > 1 else (hidden,)
            for half in halves:
                where = np.isin(np.arange(self.context.n), half)
                changed = self.context.inputs.change(where, fresh)
                sizes, scale = self._moved(changed, np.zeros((1, 1), bool), ordinary=ordinary)
                if self.context.noise.classify(float(sizes[row, query]), scale) == kind:
                    hidden = half
                    result = (int(half[0]), float(sizes[row, query]), scale, changed)
                    break
            else:
                return None
            if len(hidden) == 1:
                return result

    def finding(self, keys: int, queries: int, draws: int) -> Finding:
        context = self.context
        everything = bool(keys == context.n)
        measured = {
            "runs": self.runs,
            "draws": draws * context.inputs.batch,
            "keys": keys,
            "queries": queries,
            "of": context.n,
            "every_pair": everything,
            "greatest": max((leak.size for leak in [*self.pairs.values(), *self.doubtful.values()]), default=0.0),
            "poisoned": self.poisoned,
        }
        looked = "every pair" if everything else f"{keys} keys and {queries} queries of {context.n}"
        own = ", one of its own ids" if context.inputs.discrete else ""
        extent = f"{looked}, {draws * context.inputs.batch} draws and one extreme{own}"
        if self.pairs:
            # Doubtful pairs add nothing to sure ones, and near-zero entries would only blur the picture.
            leaks = tuple(self.pairs[pair] for pair in sorted(self.pairs))
            return Finding("leak", f"{len(leaks)} pairs leak ({extent})", leaks, measured, self.witness)
        if self.doubtful:
            leaks = tuple(self.doubtful[pair] for pair in sorted(self.doubtful))
            message = f"hidden inputs move outputs, {by(measured['greatest'])}"
            return Finding("doubt", message, leaks, measured)
        return Finding("clean", f"no hidden input moves an output ({extent})", (), measured)


PROBE = Probe(
    name="change",
    does="changes each input alone, and all that is hidden from a query at once, ids to the row's own as well",
    finds="any content that leaks, the pairs exactly for short inputs, by bisection for long ones",
    function=_change,
    pairs=True,
)
