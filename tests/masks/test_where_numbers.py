"""where(): tiles and pairs are computed in one number system, whatever the dtypes of NumPy's numbers in the formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtri
from lowtri import MaskError, where
from lowtri.masks.tile import EMPTY, FULL, PARTIAL, POSITION_MAX

WHOLE = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, int]
FLOATS = [np.float16, np.float32, np.float64, float]


@st.composite
def numbers(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from([*WHOLE, *FLOATS]))
    if kind in FLOATS:
        return kind(draw(st.sampled_from([0.0, 0.5, 2.25, 3.0, 100.75])))
    value = draw(st.sampled_from([0, 1, 3, 7, 100, 127]))
    signed = kind is int or np.dtype(kind).kind == "i"
    return kind(-value if signed and draw(st.booleans()) else value)


@st.composite
def terms(draw: st.DrawFn, constants: list[Any]) -> str:
    """A term of q, k and constants c[0], c[1], ..."""
    text = draw(st.sampled_from(["q", "k", "(q - k)", "(q + k)", "(k + q - k)"]))
    for _ in range(draw(st.integers(0, 2))):
        if draw(st.booleans()):
            constants.append(draw(numbers()))
            sides = [text, f"c[{len(constants) - 1}]"]
            if draw(st.booleans()):
                sides.reverse()
            text = f"({sides[0]} {draw(st.sampled_from('+-'))} {sides[1]})"
        else:
            constants.append(draw(st.sampled_from(WHOLE))(draw(st.sampled_from([1, 2, 3, 100]))))
            text = f"({text} {draw(st.sampled_from(['//', '%']))} c[{len(constants) - 1}])"
    return text


@st.composite
def formulas(draw: st.DrawFn) -> tuple[str, list[Any]]:
    constants: list[Any] = []
    conditions = []
    for _ in range(draw(st.integers(1, 2))):
        left = draw(terms(constants))
        constants.append(draw(numbers()))
        right = draw(st.sampled_from(["q", "k", f"c[{len(constants) - 1}]"]))
        sign = draw(st.sampled_from(["<", "<=", "==", "!=", ">", ">="]))
        conditions.append(f"({draw(st.sampled_from(['', '~']))}({left} {sign} {right}))")
    return draw(st.sampled_from([" & ", " | "])).join(conditions), constants


STARTS = st.sampled_from([0, 1, 120, 250, 255, 32_760, 65_530, 2**31 - 5])


def exactly(text: str, constants: list[Any], q: int, k: int) -> bool:
    """The formula in Python's numbers, which neither wrap nor round here."""
    plain = [float(c) if isinstance(c, (float, np.floating)) else int(c) for c in constants]
    return bool(eval(text.replace("~", "not "), {"c": plain, "q": q, "k": k}))


@settings(max_examples=300, deadline=None)
@given(formulas(), STARTS, STARTS, st.integers(1, 9), st.integers(1, 9))
def test_pairs_and_tiles_of_numbers_of_any_dtype(
    formula: tuple[str, list[Any]], q0: int, k0: int, nq: int, nk: int
) -> None:
    text, constants = formula
    mask = where(eval(f"lambda q, k: {text}", {"c": constants}))
    q, k = range(q0, q0 + nq), range(k0, k0 + nk)
    right = np.array([[exactly(text, constants, i, j) for j in k] for i in q])
    assert np.array_equal(mask(np.array(q)[:, None], np.array(k)), right)
    assert mask(q0, k0) == right[0, 0] and np.array_equal(mask(q0, np.array(k)), right[0])
    (many,) = mask.tile(np.array([q0]), np.array([q0 + nq]), np.array([k0]), np.array([k0 + nk]))
    for answer in (many, mask.tile(q0, q0 + nq, k0, k0 + nk), mask.tile(q0, POSITION_MAX, k0, POSITION_MAX)):
        assert answer == PARTIAL or right.all() == right.any() == (answer == FULL), (text, constants)


@pytest.mark.parametrize("kind", WHOLE)
def test_a_window_whose_width_has_any_dtype(kind: Any) -> None:
    """Hidden keys stay hidden in a call, whose tiles begin before the width: an unsigned difference would wrap."""
    n = kind(3)
    formula = where(lambda q, k: k <= q - n)
    assert formula.dense(5).astype(int).tolist() == [[0] * 5] * 3 + [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert formula.tile(0, 3, 0, 3) == EMPTY and formula.tile(300, 400, 0, 290) == FULL
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 3, 32)).astype(np.float32)
    assert not lowtri.attention(q, k, v, formula).any()


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32])
def test_a_cache_drops_what_a_formula_with_small_numbers_hides(kind: Any) -> None:
    formula = where(lambda q, k: (k <= q) & (q - k < kind(4)))
    assert formula.tile(10, POSITION_MAX, 6, 7) == EMPTY
    assert formula.tile(9, POSITION_MAX, 6, 7) == PARTIAL


def test_remainders_of_floats_decide_no_tile() -> None:
    """The greatest remainder of a float by 4 is above 3."""
    formula = where(lambda q, k: (q + 0.5) % 4 < 3.2)
    assert formula(3, 0) is False and formula.tile(0, 8, 0, 1) == PARTIAL
    assert where(lambda q, k: (q + 0.5) // 2 < 3).tile(0, 4, 0, 1) == PARTIAL


FAR = 2**60


@pytest.mark.parametrize("constant", [np.float64(0.5), 0.5, np.float16(0.5), np.uint64(1)])
def test_floats_far_away(constant: Any) -> None:
    """A float64 does not tell whole numbers beyond 2**53 apart, and NumPy computes int64 with uint64 in it."""
    formula = where(lambda q, k: k <= q - constant)
    assert formula.tile(FAR, FAR + 1, FAR, FAR + 1) == PARTIAL
    assert formula.tile(0, POSITION_MAX, 0, 1) == PARTIAL
    for q, k in ((FAR, FAR), (np.array([FAR]), np.array([1, FAR]))):
        with pytest.raises(MaskError, match="where: the formula has floats, which cannot tell whole numbers beyond"):
            formula(q, k)
    assert where(lambda q, k: k <= q - 1)(FAR, FAR) is False and formula(2**40, 2**40) is False


def test_whole_numbers_beyond_64_bits() -> None:
    """In int64 a sum may wrap, so such tiles are decided pair by pair; a number that has no int64 is refused."""
    formula = where(lambda q, k: q + q + q > k)
    assert formula.tile(5, 9, 0, 4) == FULL and formula.tile(5, POSITION_MAX, 0, 4) == PARTIAL
    bound = where(lambda q, k: q + (2**63 - 3) > k)
    assert bound.tile(0, 2, 0, 2) == FULL and bound.tile(0, 6, 0, 2) == PARTIAL
    assert bound.tile(np.array([0, 0]), np.array([2, 6]), 0, 2).tolist() == [PARTIAL, PARTIAL]
    with pytest.raises(MaskError, match=r"a number that does not fit into 64 bits.*\nFix: numbers below"):
        where(lambda q, k: k <= q + 2**70).dense(3)
