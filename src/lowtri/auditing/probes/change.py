"""Change inputs: outputs that may not see them must not move."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding, Leak, by, moves
from lowtri.auditing.inputs import Inputs
from lowtri.auditing.noise import Difference, magnitude, movement
from lowtri.auditing.options import Bools
from lowtri.auditing.probe import Probe

__all__ = ["PROBE"]

_BISECTED = 16  # queries that are followed down to one key


def _change(context: Context) -> Finding:
    """Every key alone, and for every query all that is hidden from it at once, by random and by extreme values.

    Token ids are also changed to what the row itself holds: a leak of equality shows in no random draw from many ids.
    Short inputs are looked at pair by pair. Of long ones some positions are chosen, and a query that moves is
    bisected down to one key.
    """
    queries = context.queries()
    keys = queries if context.by_pair else []
    draws = context.options.draws * (4 if context.discrete_output else 1)
    sweep = _Sweep(context)
    kinds = [(100, "random"), (101, "extreme"), *([(102, "echoed")] if context.inputs.discrete else [])]
    if not context.by_pair and context.discrete_output:  # discrete answers move rarely
        kinds += [(103 + more, "random") for more in range(draws - 1)]
    total = draws * len(keys) + len(kinds) * len(queries)
    for salt in range(draws):
        fresh = context.fresh(salt)
        for key in keys:
            sweep.change_key(key, fresh)
            context.tick(sweep.runs, total)
    for salt, kind in kinds:
        fresh = context.inputs if kind == "echoed" else context.fresh(salt, kind)
        # Extreme vectors may overflow on the way and reach an output as 0 * inf; that is counted, and is no leak.
        non_finite = np.inf if kind == "random" or context.inputs.discrete else 0.0
        for query in queries:
            if not context.allowed[:, query].all():
                sweep.change_hidden(query, context.echoed(query) if kind == "echoed" else fresh, non_finite)
            context.tick(sweep.runs, total)
    return sweep.finding(len(keys), len(queries), draws)


class _Sweep:
    """The runs of one probe, and the largest movement of each pair that should not move."""

    def __init__(self, context: Context) -> None:
        self.context = context
        # A query that is not looked at may be found through one that is.
        self.sparse = len(context.queries()) < context.n
        self.sure: dict[tuple[int, int], Leak] = {}
        self.doubtful: dict[tuple[int, int], Leak] = {}
        self.runs = self.bisected = self.poisoned = 0
        self.witness: Any = None

    def change_key(self, key: int, fresh: Inputs) -> None:
        """Change one key everywhere in the batch: one column of the table of pairs."""
        where = np.arange(self.context.n) == key
        hidden = self.context.independent_of(where)  # (B, N)
        changed, moved = self._moved(where, fresh, np.inf, hidden)
        self.context.see(moved.sizes.max(axis=0), key)
        for row, query in np.argwhere(hidden & (moved.sizes > 0)).tolist():
            self._note(Leak(query, key, float(moved.sizes[row, query]), row), moved.scale, changed)

    def change_hidden(self, query: int, fresh: Inputs, non_finite: float) -> None:
        """Change all that is hidden from a query; if it moves, or one that sees no more of it, find a key that does it."""
        context = self.context
        where = ~context.allowed[:, query]  # (1 or B, N)
        hidden = context.independent_of(where)
        changed, moved = self._moved(where, fresh, non_finite, hidden)
        wrong = hidden & (moved.sizes > 0)  # (B, N)
        for row in np.flatnonzero(wrong.any(axis=1) if self.sparse else wrong[:, query]).tolist():
            if not wrong[row, query]:
                query = int(np.flatnonzero(wrong[row])[-1])
            size = float(moved.sizes[row, query])
            kind = context.noise.classify(size, moved.scale)
            known = {q for q, _ in [*self.sure, *([] if kind == "leak" else self.doubtful)]}
            if query in known or self.bisected >= _BISECTED:
                continue
            self.bisected += 1
            keys = np.flatnonzero(where[row % len(where)])
            one = self._bisect(row, query, keys, fresh, kind, non_finite)
            if one is not None:
                key, size, scale, inputs = one
                self._note(Leak(query, key, size, row), scale, inputs)
            else:
                how = moves(size, f" when all {len(keys)} inputs hidden from it change together")
                leak = Leak(query, int(keys[0]), size, row, note=f"output {query} {how}")
                self._note(leak, moved.scale, changed)

    def _moved(
        self, where: Bools, fresh: Inputs, non_finite: float, hidden: Bools | bool = False
    ) -> tuple[Inputs, Difference]:
        """The changed inputs, and how far each output moves; what turns NaN in `hidden` outputs is counted."""
        context = self.context
        changed = context.inputs.change(where, fresh)
        rows = context.adapter(changed)
        sizes = movement(context.base, rows)
        self.runs += 1
        self.poisoned += int((np.isnan(sizes) & hidden).sum())
        sizes = np.nan_to_num(sizes, nan=non_finite)
        return changed, Difference(sizes, magnitude(context.base, rows), context.noise, same_order=True)

    def _note(self, leak: Leak, scale: float, changed: Inputs) -> None:
        kind = self.context.noise.classify(leak.size, scale)
        if kind == "clean":
            return
        sure = kind == "leak" and self._repeats(leak, changed)
        leaks, pair = self.sure if sure else self.doubtful, (leak.query, leak.key)
        if pair not in leaks or leaks[pair].size < leak.size:
            leaks[pair] = leak
        if sure and self.witness is None:
            self.witness = (self.context.inputs, changed, leak.row)

    def _repeats(self, leak: Leak, changed: Inputs) -> bool:
        # The first accusation is made only of a movement that can be repeated; then the model is known to repeat itself.
        if self.witness is not None:
            return True
        before = self.context.adapter(self.context.inputs)
        size = movement(before, self.context.adapter(changed))[leak.row, leak.query]
        return bool(np.isnan(size) if np.isinf(leak.size) else size > leak.size / 2)

    def _bisect(
        self, row: int, query: int, keys: npt.NDArray[np.intp], fresh: Inputs, kind: str, non_finite: float
    ) -> tuple[int, float, float, Inputs] | None:
        """One of the keys that moves the query alone, by halving; None if only several together do."""
        while True:
            halves = (keys[: len(keys) // 2], keys[len(keys) // 2 :]) if len(keys) > 1 else (keys,)
            for half in halves:
                changed, moved = self._moved(np.isin(np.arange(self.context.n), half), fresh, non_finite)
                size = float(moved.sizes[row, query])
                if self.context.noise.classify(size, moved.scale) == kind:
                    break
            else:
                return None
            if len(half) == 1:
                return int(half[0]), size, moved.scale, changed
            keys = half

    def finding(self, keys: int, queries: int, draws: int) -> Finding:
        context, leaks = self.context, [*self.sure.values(), *self.doubtful.values()]
        every_pair = keys == context.n
        measured = {
            "runs": self.runs,
            "draws": draws * context.inputs.batch,
            "keys": keys,
            "queries": queries,
            "of": context.n,
            "every_pair": every_pair,
            "greatest": max((leak.size for leak in leaks), default=0.0),
            "poisoned": self.poisoned,
        }
        looked = "every pair" if every_pair else f"{keys} keys and {queries} queries of {context.n}"
        own = ", one of its own ids" if context.inputs.discrete else ""
        extent = f"{looked}, {draws * context.inputs.batch} draws and one extreme{own}"
        if not leaks:
            return Finding("clean", f"no hidden input moves an output ({extent})", (), measured)
        # Doubtful pairs add nothing to sure ones, and near-zero entries would only blur the picture.
        pairs = self.sure or self.doubtful
        leaks = [pairs[pair] for pair in sorted(pairs)]
        if self.sure:
            return Finding("leak", f"{len(leaks)} pairs leak ({extent})", tuple(leaks), measured, self.witness)
        return Finding("doubt", f"hidden inputs move outputs, {by(measured['greatest'])}", tuple(leaks), measured)


PROBE = Probe(
    name="change",
    does="changes each input alone, then all inputs hidden from a query at once, token ids also to other ids "
    "of the same row",
    finds="leaks of content: every pair for short inputs, pairs found by bisection for long ones",
    function=_change,
    pairs=True,
)
