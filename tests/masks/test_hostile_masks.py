"""Hostile texts and arguments: always a mask or a MaskError, quickly, and in little memory."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import pickle
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from subprocesses import printed

from lowtri import masks as lt
from lowtri.errors import MaskError
from lowtri.masks import POSITION_MAX, Mask
from lowtri.masks.text import _parsed

LONGEST = 65_536
SLOWNESS = float(os.environ.get("TEST_SLOWNESS", 1))  # of an emulator
QUICKLY = 0.05 * SLOWNESS  # seconds, for any text


def read(text: str) -> Mask | None:
    """The mask of a text, or None if it is rejected; fails if another error is raised or it takes long."""
    seconds = []
    for _ in range(5):  # another process may disturb the first attempts
        start = time.process_time()
        try:
            made, words = _parsed(text), ""
        except MaskError as error:
            made, words = None, str(error)
        seconds.append(time.process_time() - start)
        if seconds[-1] < QUICKLY:
            assert len(words) < 600
            return made
    raise AssertionError(f"{text[:40]!r}: {min(seconds)} s")


def whole(start: str, repeated: str, end: str) -> str:
    """The longest text of this form."""
    return start + repeated * ((LONGEST - len(start) - len(end)) // len(repeated)) + end


REJECTED = {
    "one name": whole("", "a", ""),
    "one number": whole("window(", "9", ")"),
    "one number in base 16": whole("window(0x", "f", ")"),
    "a number in a list": whole("documents([", "9", "])"),
    "an open list": whole("documents([", "1,", ""),
    "arguments": whole("window(", "1,", ")"),
    "names of arguments": whole("window(", "n=1,", ")"),
    "strings": whole("window(", "'a',", ")"),
    "a string": whole("window('", "a", "')"),
    "an open string": whole("window('", "a", ""),
    "quotes": whole("", "'", ""),
    "joined": whole("", "causal|", "causal"),
    "joined on the right": whole("", "causal|(", ""),
    "not": whole("", "~", "causal"),
    "minus": whole("window(", "-", "1)"),
    "parentheses": whole("", "(", ""),
    "closed parentheses": "(" * 30_000 + "causal" + ")" * 30_000,
    "brackets": whole("heads(", "[", ""),
    "nested heads": "heads([" * 5_000 + "causal" + "])" * 5_000,
    "nested lists": "documents(" + "[" * 90 + "1" + "]" * 90 + ")",
    "attributes": whole("a", ".a", ""),
    "powers": whole("", "1**", "1"),
    "functions": whole("", "lambda:", "1"),
    "and": whole("", "causal and ", "causal"),
    "in words": whole("", "not ", "causal"),
    "if": whole("", "a if a else ", "a"),
    "many heads": whole("heads([", "~~full,", "])"),
    "an array": whole("documents(<", "<", ""),
    "arrays": whole("", "documents(<", ">"),
    "a null": "causal\0",
    "no characters": "causal \ud800",
    "another alphabet": "ｃausal",
    "zeros": "documents(lengths=[0000, 1])",
    "too long": "a" * (LONGEST + 1),
    "a wrapping sum": f"documents(lengths=[{2**62}, {2**62}, {2**62}, {2**62}])",
    "twice": "window(n=1, n=2)",
}


@pytest.mark.parametrize("text", REJECTED.values(), ids=REJECTED)
def test_hostile_texts_are_rejected_quickly(text: str) -> None:
    assert read(text) is None


ACCEPTED = {
    "the lengths of many documents": whole("documents(lengths=[", "1, ", "])"),
    "ids": whole("documents([", "-1, ", "])"),
    "lengths of many rows": whole("keys(lengths=[", "7,", "])"),
    "keys": whole("keys([", "True, False,", "])"),
    "white space": whole("", " ", "causal"),
    "lines": "causal\n& (window(4)\n| first(1),)[0]".replace(",)[0]", ")"),
}


@pytest.mark.parametrize("text", ACCEPTED.values(), ids=ACCEPTED)
def test_long_texts_are_read_quickly(text: str) -> None:
    assert isinstance(read(text), Mask)


PIECES = [
    "causal",
    "full",
    "window(",
    "first(3)",
    "documents(",
    "keys(",
    "heads(",
    "lengths=",
    "cu_seqlens=",
    "table(",
    "n=",
]
PIECES += [*"()[],&|~-+*<>=:.'\"\\#\n\0"]
PIECES += ["**", "1", "0", "-1", "1e9", "0x", "9" * 30, str(2**62), str(2**63), "True", "None", "_0", "é"]
PIECES += ["not ", " and ", "lambda "]
pieces = st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from([1, 1, 1, 2, 99, 3000])), max_size=12)
texts = st.one_of(st.text(), pieces.map(lambda parts: "".join(piece * n for piece, n in parts)[:LONGEST]))


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(texts)
def test_any_text_is_a_mask_or_rejected(text: str) -> None:
    made = read(text)
    if made is not None and len(text) < 500 and "<" not in repr(made):
        assert lt.mask(repr(made)) == made


@pytest.mark.sweep
@settings(deadline=None, max_examples=6000, suppress_health_check=[HealthCheck.too_slow])
@given(texts)
def test_sweep_any_text_is_a_mask_or_refused(text: str) -> None:
    test_any_text_is_a_mask_or_rejected.hypothesis.inner_test(text)


REPEATED = [  # start, what is repeated, end
    ("documents(lengths=[1", " ", "x])"),
    ("documents(lengths=[1", " ", ",x])"),
    ("documents(lengths=[1,", " ", "x])"),
    ("documents(lengths=[", " ", "x])"),
    ("documents(lengths=[1", " ,1", "x])"),
    ("documents(lengths=[1", ",   1", " x])"),
    ("documents(lengths=[1", "1", "x])"),
    ("documents(lengths=[", "True,", "False x])"),
    ("documents(lengths=[True", "\t\n ", "1])"),
    ("documents(lengths=[", "-", "])"),
    ("documents(lengths=[", ",", "])"),
    ("documents(lengths=[1", ", 1", "])"),
    ("documents(lengths=", "[", "1])"),
    ("documents(lengths=", "[1,", "x])"),
    ("causal", " ", "& x"),
    ("causal(", " ", "x"),
    ("causal(x", " ", "= 1"),
    ("causal & '", "x", ""),
    ("causal & ", "'", ""),
    ("window(", "1_", "x"),
    ("window(", "1.", ")"),
    ("", "a", ""),
    ("", "\u3000", "x"),
]


@pytest.mark.parametrize(("start", "part", "end"), REPEATED)
def test_the_time_of_a_text_grows_with_its_length(start: str, part: str, end: str) -> None:
    """Four times the text takes about four times as long; a pattern that goes back takes sixteen times."""

    def seconds(length: int) -> float:
        text = start + part * ((length - len(start) - len(end)) // len(part)) + end
        times = []
        for _ in range(5):
            begin = time.process_time()
            with contextlib.suppress(MaskError):
                _parsed(text)
            times.append(time.process_time() - begin)
        return min(times)

    short, long = seconds(LONGEST // 4), seconds(LONGEST)
    assert long < 9 * short + 0.002 * SLOWNESS  # what is fast is not measured well


def test_too_many_joined_masks_are_rejected() -> None:
    """Every question recurses through the mask, so neither deep masks nor ones that double can be built."""
    some = [lt.first(n + 1) for n in range(2000)]
    with pytest.raises(MaskError, match="at most 1000 masks and 100 operators"):
        functools.reduce(operator.or_, some)
    with pytest.raises(MaskError, match="at most 1000 masks and 100 operators"):
        functools.reduce(lambda one, _: ~one, some, lt.causal())
    with pytest.raises(MaskError, match="1024 masks under 10 operators"):
        functools.reduce(lambda one, _: one & one, some, lt.causal())
    deepest = functools.reduce(operator.or_, some[:101])
    with pytest.raises(MaskError, match="at most 1000 masks and 100 operators"):
        lt.heads([lt.causal(), deepest]) & lt.causal()


def test_the_deepest_mask_can_be_used() -> None:

    deepest = functools.reduce(operator.or_, [lt.first(n + 1) for n in range(101)])
    assert deepest.pairs(200) == 200 * 101
    assert pickle.loads(pickle.dumps(deepest)) == deepest and hash(deepest) == hash(lt.mask(repr(deepest)))
    assert deepest.tile(0, 5, 101, 102) == lt.EMPTY


# Arguments.

NUMBERS: list[Any] = [0, 1, 7, -1, POSITION_MAX, POSITION_MAX + 1, -(2**63), 2**63, 2**64, 10**4000]
NUMBERS += [True, None, 1.5, float("nan"), float("inf"), "3", b"3"]
NUMBERS += [np.int8(3), np.uint64(2**64 - 1), np.float32(2), np.array(3), 3 + 0j, [3], (), {}, object()]
NUMBERS += [lt.causal(), print]
numbers = st.sampled_from(NUMBERS)
ARRAYS: list[Any] = [[], [[]], [[[1]]], [[1], [1, 2]], [None], ["a"], [2**63], [2**64], [-(2**63)], [10**400]]
ARRAYS += [[1.0], [True, 2], "ids", {1}, [2**62] * 4, [2**62, 2**62], [POSITION_MAX], [POSITION_MAX, 1], [10**9]]
ARRAYS += [[0, 10**9], [0, 2**63 - 1], range(5), iter([1]), lt.causal(), np.zeros((0, 3), int)]
ARRAYS += [np.array([2**63], np.uint64), np.array([1, 2], np.uint8), np.zeros(3, "M8[s]"), np.array(1)]
ARRAYS += [np.broadcast_to(np.int64(1), 2**46), np.zeros(3, [("a", int)]), np.array([True, False])]
ARRAYS += [np.zeros((1, 1, 2), bool), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, device="meta")]
ARRAYS += [torch.zeros(1, dtype=torch.int64).expand(2**46), torch.eye(2).to_sparse(), torch.tensor([True, False])]
ARRAYS += [torch.zeros(2, requires_grad=True), torch.zeros(2).conj()]
arrays = st.one_of(st.sampled_from(ARRAYS), st.lists(numbers, max_size=4), numbers)
FUNCTIONS: list[Any] = [print, len, max, int, np.less, lambda: True, lambda q: q, lambda b, h, q, k: q >= k]
FUNCTIONS += [lambda *a: a[0] >= a[1], 3, "q >= k", lambda q, k: np.ones((7, 3), bool), lambda q, k: None]

calls = st.one_of(
    st.tuples(st.sampled_from([lt.window, lt.first, lt.chunks, lt.strided]), st.tuples(numbers), st.just({})),
    st.tuples(st.just(lt.band), st.tuples(numbers, numbers), st.just({})),
    st.tuples(st.sampled_from([lt.documents, lt.keys, lt.table, lt.hidden, lt.heads]), st.tuples(arrays), st.just({})),
    st.tuples(st.just(lt.documents), st.tuples(arrays, arrays), st.just({})),
    st.tuples(
        st.sampled_from([lt.documents, lt.keys]),
        st.just(()),
        st.one_of(arrays.map(lambda a: {"lengths": a}), arrays.map(lambda a: {"cu_seqlens": a})),
    ).filter(lambda call: not (call[0] is lt.keys and "cu_seqlens" in call[2])),
    st.tuples(st.just(lt.where), st.sampled_from(FUNCTIONS).map(lambda fn: (fn,)), st.just({})),
    st.tuples(st.just(lt.mask), st.tuples(st.one_of(numbers, arrays)), st.just({})),
)


def result_of(act: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """The result, or None if a MaskError with a short message is raised."""
    try:
        return act(*args, **named)
    except MaskError as error:
        words = str(error)
    assert len(words) < 600
    return None


def use(mask: Mask, n: Any) -> None:
    """Use the mask in several ways: each gives a result or a MaskError."""
    for act in (
        lambda: (repr(mask), hash(mask), mask == ~mask),
        lambda: mask.tile(0, POSITION_MAX, n, POSITION_MAX),
        lambda: mask.tile(np.array([0, 5]), np.array([9, POSITION_MAX]), n, 2**62),
        lambda: mask(n, 10**9),
        lambda: mask(np.arange(3), n),
        lambda: mask.draw(3, n),
        lambda: mask.dense(2, n).size if isinstance(n, int) and n < 10**5 else mask.dense(n, 10**6),
    ):
        result_of(act)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(calls, numbers.filter(lambda n: not isinstance(n, list | tuple)))
def test_any_argument_makes_a_mask_or_is_rejected(call: Any, n: Any) -> None:
    start = time.process_time()
    make, args, named = call
    mask = result_of(make, *args, **named)
    if mask is not None and make is not lt.where:
        use(mask, n)
    assert time.process_time() - start < 2 * SLOWNESS


@pytest.mark.sweep
@settings(deadline=None, max_examples=5000, suppress_health_check=[HealthCheck.too_slow])
@given(calls, numbers.filter(lambda n: not isinstance(n, list | tuple)))
def test_sweep_any_argument_makes_a_mask_or_is_refused(call: Any, n: Any) -> None:
    test_any_argument_makes_a_mask_or_is_rejected.hypothesis.inner_test(call, n)


def test_numbers_that_python_refuses_to_print() -> None:
    with pytest.raises(MaskError, match="window: n is a whole number of 16610 bits"):
        lt.window(10**5000)
    with pytest.raises(MaskError, match="documents: ids is not an array"):
        lt.documents([10**5000])


def test_a_sum_of_lengths_does_not_wrap() -> None:
    """The sum of these in 64 bits is 0; an array of that size was then written to."""
    with pytest.raises(MaskError, match=f"lengths add up to {2**64}, but positions end at"):
        lt.documents(lengths=[2**62] * 4)
    assert lt.documents(lengths=[2**61, 2**61]).tile(0, 2**61, 2**61, POSITION_MAX) == lt.EMPTY
    with pytest.raises(MaskError, match=r"at most 2\*\*62"):
        lt.keys(lengths=[2**62 + 1])


def test_documents_of_any_length_take_no_memory_for_their_tokens() -> None:
    lt.causal().draw(4)  # what is loaded for pictures is not counted
    tracemalloc.start()
    try:
        mask = lt.causal() & lt.documents(lengths=[10**9, 5, 10**12])
        assert not mask(10**9 + 4, np.array([0, 10**9 - 1, 10**9 + 5])).any()
        assert mask(10**9 + 4, np.array([10**9, 10**9 + 4])).all()
        assert mask.tile(10**9 + 5, POSITION_MAX, 0, 10**9 + 5) == lt.EMPTY
        assert lt.documents(cu_seqlens=[0, 10**9, 10**9 + 1]).draw(4, 2**40).split()[0] == "▒" + "█" * 63
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2e6


def test_positions_of_any_integer_type_are_the_same_positions() -> None:
    """Differences of unsigned numbers, and small integer types with large masks, must not wrap."""
    q, k = np.arange(120)[:, None], np.arange(120)[None, :]
    for mask in (lt.band(3, 5), lt.window(300), lt.chunks(300), lt.strided(7), lt.documents(lengths=[40, 300])):
        for dtype in (np.int8, np.uint8, np.uint16, np.uint32, np.uint64):
            np.testing.assert_array_equal(mask(q.astype(dtype), k.astype(dtype)), mask(q, k))
    late = np.array([2**63, 2**64 - 1], np.uint64)
    assert lt.causal()(late, 5).all() and not lt.window(9)(late, 5).any()
    assert lt.first(4).tile(np.array([0], np.uint64), late[:1], 0, 2) == [lt.FULL]
    assert lt.first(4).tile(0, 1e300, 0, 2) is lt.FULL and lt.first(4).tile(0, 2**70, 0, 2) is lt.FULL


def test_pictures_of_any_size_cost_the_same() -> None:
    *picture, scale = lt.causal().draw(10**15).splitlines()
    assert f"{10**15:,} x {10**15:,} pairs" in scale
    assert len(picture) == 64 and picture[0] == "▒" + "·" * 63
    lt.documents(lengths=[1] * 20_000).draw(4)
    (lt.keys(lengths=[1] * 3000) & lt.heads([lt.causal()] * 3000)).draw(2)
    with pytest.raises(MaskError, match="at most 64 each way"):
        lt.causal().draw(10**12, ticks=True)


def test_sizes_that_do_not_fit_are_rejected_and_not_allocated() -> None:
    code = """
import resource, numpy as np
from lowtri import masks as lt
from lowtri.errors import MaskError
lt.causal().draw(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30,) * 2)
for ask in (
    lambda: lt.documents(np.broadcast_to(np.int64(1), 2**40)),
    lambda: lt.documents(np.broadcast_to(np.int8(1), 2**40)),
    lambda: lt.table(np.broadcast_to(True, (2**20, 2**20))),
    lambda: lt.hidden(np.broadcast_to(True, (2**20, 2**20))),
    lambda: lt.causal().dense(10**6),
    lambda: lt.causal().dense(10**9),
    lambda: lt.causal().additive(10**6),
    lambda: lt.causal().pairs(10**12),
    lambda: lt.documents(lengths=[2**62] * 4),
):
    try:
        ask()
    except MaskError:
        continue
    raise SystemExit("not rejected")
lt.documents(lengths=[10**9])(5, 10**9)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    assert int(printed("-c", code, timeout=60)) < 60_000  # kB


def test_a_number_in_place_of_a_mask_is_shown_as_a_number_of_any_size() -> None:
    for number, text in ((7, "7"), (2.5, "2.5"), (np.float64(2.5), "2.5"), (10**5000, "a whole number of [0-9]+ bits")):
        with pytest.raises(MaskError, match=f"got {text}; expected a mask or its text"):
            lt.as_mask(number)


@pytest.mark.parametrize(
    "mask", [lt.causal() & lt.keys([True]), ~lt.causal(), lt.window(3), lt.heads(["causal", "full"])]
)
def test_the_batch_of_a_mask_cannot_be_set(mask):
    with pytest.raises(AttributeError):
        mask.batch = (2,)
