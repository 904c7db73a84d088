"""A cache under any sequence of what can be done with it: each output is that of one call over the row's whole history.

The model of the cache is the list of tokens of each row. ``FAULTS`` are planted one by one, and the machine finds each of them.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import lowtri
from lowtri.errors import CallError
from lowtri.generation.layers import Layer
from lowtri.generation.slots import SlotAllocator

HEADS, SIZE = 2, 3
ROWS = 2
MASKS: dict[str, Any] = {
    "causal": lowtri.causal(),
    "window": lowtri.window(5),
    "window of one": lowtri.window(1),
    "sinks": lowtri.mask("causal & (window(4) | first(2))"),
    "chunks": lowtri.mask("causal & chunks(4)"),
    "strided": lowtri.mask("causal & strided(3)"),
    "documents": lowtri.mask("causal & documents(lengths=[5, 3, 9], open_end=True)"),
    "sinks of documents": lowtri.documents(lengths=[5, 9], open_end=True, inner="causal & (window(3) | first(1))"),
    "heads": lowtri.heads(["causal & window(3)", "causal & (window(5) | first(1))"]),
    "a formula": lowtri.window(6) & lowtri.where(lambda q, k: (q * k) % 3 != 1),
    "keys of rows": lowtri.causal() & lowtri.keys([[True, False, True], [False, True, True]]) & lowtri.window(7),
    "documents of rows": lowtri.causal() & lowtri.documents([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]]),
    "lengths": lowtri.mask("causal & keys(lengths=[4, 12])"),
    "hidden all": lowtri.causal() - lowtri.full(),
}
KINDS = {
    "numpy float64": (lambda x: x, 1e-12),
    "numpy float32": (lambda x: x.astype(np.float32), 1e-5),
    "torch float64": (torch.from_numpy, 1e-12),
    "torch float32": (lambda x: torch.from_numpy(x).float(), 1e-5),
    "torch bfloat16": (lambda x: torch.from_numpy(x).bfloat16(), 0.03),
}


class CacheMachine(RuleBasedStateMachine):
    """``rows[b][layer]`` is the history of a row, (3, HEADS, tokens, SIZE): queries, keys, values."""

    @initialize(
        name=st.sampled_from(sorted(MASKS)),
        kind=st.sampled_from(sorted(KINDS)),
        block=st.sampled_from([1, 2, 5, 64]),
        rewind=st.sampled_from([0, 0, 2, 5]),
        capacity=st.sampled_from([0, 3]),
        layers=st.integers(1, 2),
        rows=st.integers(1, 3),
    )
    def begin(self, name: str, kind: str, block: int, rewind: int, capacity: int, layers: int, rows: int) -> None:
        self.mask, (self.convert, self.error) = MASKS[name], KINDS[kind]
        self.rng, self.layers = np.random.default_rng(0), layers
        self.cache = lowtri.KVCache(self.mask, block=block, rewind=rewind, capacity=capacity)
        self.fixed_rows = bool(self.mask.batch) and self.mask.batch[0] > 1
        count = ROWS if self.fixed_rows else rows
        self.rows = [[np.zeros((3, HEADS, 0, SIZE))] * layers for _ in range(count)]
        self.newest = [0] * count  # tokens of the last append in each row

    # What a step is compared with.

    def added(self, sizes: list[int]) -> list[Any]:
        """New tokens of each layer (3, B, HEADS, n, SIZE), of which row b has the last ``sizes[b]``; as this kind of array has them."""
        made = [self.rng.standard_normal((3, len(sizes), HEADS, max(sizes), SIZE)) for _ in range(self.layers)]
        return [np.asarray(self.plain(self.convert(x))) for x in made]

    @staticmethod
    def plain(x: Any) -> np.ndarray:
        return x.double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, np.float64)

    def of_row(self, b: int) -> Any:
        if len(self.mask.batch) < 2:
            return self.mask.for_row(b)
        return lowtri.heads([self.mask.for_row(b, h) for h in range(HEADS)])

    def check(self, out: Any, b: int, history: np.ndarray, n: int) -> None:
        """The last ``n`` queries of a row."""
        if n:
            expected = lowtri.attention(*history, self.of_row(b), engine="reference")[:, -n:]
            np.testing.assert_allclose(self.plain(out)[b, :, -n:], expected, atol=self.error, rtol=self.error)

    # What can be done.

    @rule(n=st.integers(0, 7), data=st.data(), ragged=st.booleans())
    def append(self, n: int, data: st.DataObject, ragged: bool) -> None:
        """A prompt, a chunk; rows without a token at some places."""
        sizes = [n - (data.draw(st.integers(0, n)) if ragged else 0) for _ in self.rows]
        lengths = [row[0].shape[2] for row in self.rows]
        positions = None
        if ragged and n:
            positions = [[at if at >= length else -1 for at in range(length + size - n, length + size)]
                         for length, size in zip(lengths, sizes, strict=True)]  # fmt: skip
        new = self.added([n] * len(self.rows)) if n else [np.zeros((3, len(self.rows), HEADS, 0, SIZE))] * self.layers
        for layer, x in enumerate(new):
            out = self.cache.attend(*(self.convert(part) for part in x), positions, layer)
            for b, row in enumerate(self.rows):
                if sizes[b]:
                    row[layer] = np.concatenate([row[layer], x[:, b, :, n - sizes[b] :]], 2)
                self.check(out, b, row[layer], sizes[b])
        self.newest = sizes

    @rule()
    def generate(self) -> None:
        """A token."""
        for layer, x in enumerate(self.added([1] * len(self.rows))):
            out = self.cache.attend(*(self.convert(part) for part in x), layer=layer)
            for b, row in enumerate(self.rows):
                row[layer] = np.concatenate([row[layer], x[:, b]], 2)
                self.check(out, b, row[layer], 1)
        self.newest = [1] * len(self.rows)

    @precondition(lambda self: not self.mask.batch or len(self.mask.batch) == 2)
    @rule(data=st.data(), n=st.integers(1, 5))
    def branch(self, data: st.DataObject, n: int) -> None:
        """A tree of drafts, of which each row keeps a path."""
        parents = [data.draw(st.integers(-1, i - 1)) for i in range(n)]
        paths: list[list[int]] = []
        for draft, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else []), draft])
        kept = [data.draw(st.sampled_from(paths)) for _ in self.rows]
        new = self.added([n] * len(self.rows))
        for layer, x in enumerate(new):
            out = self.cache.attend(*(self.convert(part) for part in x), layer=layer, mask=lowtri.tree(parents))
            for b, row in enumerate(self.rows):
                for draft, path in enumerate(paths):
                    history = np.concatenate([row[layer], x[:, b][:, :, path]], 2)
                    self.check(out[:, :, : draft + 1], b, history, 1)
                row[layer] = np.concatenate([row[layer], x[:, b][:, :, kept[b]]], 2)
        most = max(map(len, kept))
        self.cache.keep([path + [-1] * (most - len(path)) for path in kept])
        self.newest = [len(path) for path in kept]

    @precondition(lambda self: self.cache.length)  # before, it knows no rows
    @rule(data=st.data(), alike=st.booleans())
    def crop(self, data: st.DataObject, alike: bool) -> None:
        """What it must be able to remove; more raises, or is right afterwards."""
        lengths = [row[0].shape[2] for row in self.rows]
        longest = max(lengths)
        if alike:
            end = data.draw(st.integers(max(0, longest - 9), longest))
            ends = [min(end, length) for length in lengths]
            asked: Any = end
        else:
            asked = ends = [data.draw(st.integers(max(0, length - 9), length)) for length in lengths]
        sure = all(end >= length - new for end, length, new in zip(ends, lengths, self.newest, strict=True))
        try:
            self.cache.crop(asked)
        except CallError:
            assert not sure, "the last append can always be removed"
            return
        self.rows = [[x[:, :, :end] for x in row] for row, end in zip(self.rows, ends, strict=True)]
        self.newest = [max(0, new - (n - end)) for new, n, end in zip(self.newest, lengths, ends, strict=True)]

    @precondition(lambda self: not self.fixed_rows and self.cache.length)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        """Beams; the batch may grow and shrink."""
        index = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=4))
        self.cache.reorder(index)
        self.rows = [list(self.rows[i]) for i in index]
        self.newest = [self.newest[i] for i in index]

    @precondition(lambda self: self.mask in (MASKS["window"], MASKS["sinks"]))
    @rule()
    def shift(self) -> None:
        """The tokens between the sinks and the oldest key that is seen are forgotten."""
        before = np.broadcast_to(self.cache.next_positions(1).reshape(-1), len(self.rows))
        sinks = 2 if self.mask == MASKS["sinks"] else 0
        self.cache.shift(sinks)
        after = np.broadcast_to(self.cache.next_positions(1).reshape(-1), len(self.rows))
        for b, back in enumerate((before - after).tolist()):
            assert back >= 0
            self.rows[b] = [np.delete(x, np.s_[sinks : sinks + back], 2) for x in self.rows[b]]
        self.newest = [0] * len(self.rows)

    @rule(pickled=st.booleans())
    def copy(self, pickled: bool) -> None:
        """The copy goes on; what is done with it does not change the first."""
        if pickled and "where" in repr(self.mask):
            return  # a function of the test cannot be pickled
        first = self.cache
        self.cache = pickle.loads(pickle.dumps(first)) if pickled else copy.deepcopy(first)
        assert str(self.cache) == str(first)
        if first.length:
            first.crop(first.length)
            for layer in range(self.layers):
                x = self.convert(np.full((len(self.rows), HEADS, 1, SIZE), np.nan))
                first.append(x, x, layer=layer)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            lengths = [row[0].shape[2] for row in self.rows]
            assert self.cache.length == max(lengths)
            assert self.cache.bytes == 0 or self.cache.rows == len(self.rows)


class MachineOfWindows(CacheMachine):
    """Where a fault shows seldom under other masks."""

    @initialize(name=st.sampled_from(["window", "sinks"]), rewind=st.sampled_from([0, 2]), rows=st.integers(1, 2))
    def begin(self, name: str, rewind: int, rows: int) -> None:
        CacheMachine.begin(self, name, "numpy float64", 1, rewind, 0, 1, rows)


def settled(examples: int) -> settings:
    return settings(
        deadline=None, max_examples=examples, stateful_step_count=18, suppress_health_check=list(HealthCheck)
    )


def test_a_cache_is_the_whole_forward_whatever_is_done() -> None:
    run_state_machine_as_test(CacheMachine, settings=settled(120))


@pytest.mark.sweep
def test_sweep_a_cache_is_the_whole_forward_whatever_is_done() -> None:
    run_state_machine_as_test(CacheMachine, settings=settled(3000))


# Faults: what each replaces.


def evicts_a_token_early(sweep: Any) -> Any:
    return lambda self, first, n: sweep(self, first + 1, n)


def forgets_to_widen(keep: Any) -> Any:
    return lambda self, index: keep(self, index[:1])


def leaves_the_next_position(crop: Any) -> Any:
    def run(self: Any, n: Any) -> None:
        before = self.next.copy()
        crop(self, n)
        self.next = np.broadcast_to(before, self.next.shape).copy()

    return run


def leaves_the_positions(reorder: Any) -> Any:
    return lambda self, index: None


def turns_rows_the_other_way(select_rows: Any) -> Any:
    return lambda self, rows: select_rows(self, rows[::-1])


def keeps_the_first_drafts(choose: Any) -> Any:
    return lambda self, start, index: None


def moves_one_slot_too_far(move: Any) -> Any:
    def run(self: Any, slots: Any, capacity: int) -> None:
        move(self, slots, capacity)
        self.values = np.roll(self.values, 1, -2) if isinstance(self.values, np.ndarray) else self.values.roll(1, -2)

    return run


def forgets_what_is_complete(sweep: Any) -> Any:
    def run(self: Any, first: Any, n: int) -> None:
        sweep(self, first, n)
        self._complete_from = np.zeros_like(self._complete_from)

    return run


def shifts_no_position(shift: Any) -> Any:
    def run(self: Any, keep: int) -> Any:
        before = self.positions.copy()
        moved = shift(self, keep)
        self.positions = before
        return moved

    return run


OF_WINDOWS = (forgets_what_is_complete, shifts_no_position)
FAULTS: list[tuple[Any, str, Callable[[Any], Any]]] = [
    (SlotAllocator, "_sweep", evicts_a_token_early),
    (SlotAllocator, "_sweep", forgets_what_is_complete),
    (SlotAllocator, "keep", forgets_to_widen),
    (SlotAllocator, "crop", leaves_the_next_position),
    (SlotAllocator, "reorder", leaves_the_positions),
    (SlotAllocator, "shift", shifts_no_position),
    (Layer, "select_rows", turns_rows_the_other_way),
    (Layer, "choose", keeps_the_first_drafts),
    (Layer, "compact", moves_one_slot_too_far),
]


@pytest.mark.parametrize(("owner", "name", "fault"), FAULTS, ids=[fault.__name__ for _, _, fault in FAULTS])
def test_the_machine_finds_a_planted_fault(
    owner: Any, name: str, fault: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fault(getattr(owner, name)))
    found = settings(settled(400), report_multiple_bugs=False, database=None, phases=[Phase.generate])  # no shrinking
    with pytest.raises((AssertionError, CallError, ValueError, IndexError)):
        run_state_machine_as_test(MachineOfWindows if fault in OF_WINDOWS else CacheMachine, settings=found)
