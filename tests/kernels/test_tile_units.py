"""Attention in bf16 on tile registers by units of 32 queries and 96 keys.

Each unit's product with the values is one unit late, and weights are computed before their maximum is known: so there are tests of
scores that rise late, of units that end early, and of values that are not finite in one half of the queries.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import EPS, on_threads
from gradient_cases import compare, inputs, results

import lowtri
from lowtri.backends.cpu import launch

HEAD_SIZES = [(64, 64), (128, 128), (192, 64), (64, 256), (256, 32), (33, 17)]
RAGGED = [1, 15, 16, 17, 31, 33, 47, 65, 95, 97, 111, 129, 191, 193, 205]


def attention(x: list[torch.Tensor], mask: Any, engine: str = "cpu", **options: Any) -> torch.Tensor:
    return lowtri.attention(*x[:3], mask, engine=engine, **options)


def check_output(x: list[torch.Tensor], mask: Any, **options: Any) -> None:
    """The precision contract's greatest error."""
    exact = attention([y.double() for y in x], mask, "formula", **options)
    plain, actual = (attention(x, mask, engine, **options) for engine in ("formula", "cpu"))
    allowed = 2 * (plain - exact).abs().max() + 2 * EPS["bfloat16"] * x[2].abs().max()
    assert (actual - exact).abs().max() <= allowed


def rising(d: int, dv: int, jump: float, nk: int = 500) -> list[torch.Tensor]:
    """Scores that rise by ``jump`` units of log 2 at every 70th key, for three queries of four."""
    x = inputs((70, nk, d, dv))
    x[0][..., 0] = (torch.arange(70) % 4 > 0).float()
    x[1][..., 0] = (torch.arange(nk) // 70 * jump * 0.6931).bfloat16()
    return x


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (128, 128)])
def test_scores_may_rise_by_any_amount_at_any_key(tiles: None, d: int, dv: int) -> None:
    """Beyond 2 ** 8 the weights of a unit are computed again; beyond 2 ** 128 they overflow first."""
    for jump in (7, 9, 40, 200, 1000, 10_000):
        check_output(rising(d, dv, jump), "full", scale=1.0)


@pytest.mark.sweep
@pytest.mark.parametrize("jump", [9, 60, 130, 1e4])
@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"sinks": torch.ones(4)}, {"scale": -1.0}], ids=str)
def test_scores_may_rise_with_options(tiles: None, options: dict[str, Any], jump: float) -> None:
    check_output(rising(64, 64, jump), "causal & window(300)", **{"scale": 1.0, **options})


def test_scores_that_rise_for_one_query_change_no_bit_of_others(tiles: None) -> None:
    x = inputs((64, 300, 64, 64))
    x[0][..., 0], x[1][..., 0] = 0, (torch.arange(300) > 150).float()
    before = attention(x, "full", scale=1.0)
    for jump in (8.0, 12, 1e3, float("inf"), float("nan")):
        x[0][:, :, 5, 0] = jump
        after = attention(x, "full", scale=1.0)
        others = torch.arange(64) != 5
        assert torch.equal(before[:, :, others], after[:, :, others]), jump
        assert not torch.equal(before[:, :, 5], after[:, :, 5])


@pytest.mark.parametrize(
    ("d", "dv"), [HEAD_SIZES[0], *(pytest.param(*x, marks=pytest.mark.sweep) for x in HEAD_SIZES[1:])]
)
def test_any_number_of_keys(tiles: None, d: int, dv: int) -> None:
    """Keys that are no multiple of 96, 32 or 16; the last query sees all of them, and the first half fewer than the second."""
    for nk in RAGGED:
        check_output(inputs((70, nk, d, dv)), "full")
        check_output(inputs((min(70, nk), nk, d, dv)), "causal")


@pytest.mark.sweep
@pytest.mark.parametrize(("d", "dv"), HEAD_SIZES)
def test_any_edge_of_windows_and_documents(tiles: None, d: int, dv: int) -> None:
    for width in (1, 31, 33, 64, 97):
        compare(inputs((150, 150, d, dv)), f"causal & window({width})")
    for lengths in ("1, 31, 64, 54", "95, 2, 53", "16, 80, 54", "33, 33, 84"):
        compare(inputs((150, 150, d, dv)), f"documents(lengths=({lengths}))")
    compare(inputs((40, 150, d, dv)), "band(3, 40)")


@pytest.mark.sweep
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", range(4), ids=["q", "k", "v", "gradient"])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (128, 96), (40, 24)])
def test_values_that_are_not_finite_in_one_half(tiles: None, d: int, dv: int, place: int, value: float) -> None:
    """Row 45 belongs to the second half of the queries, and is seen by a part of it and of the next tile: 45 <= q < 75."""
    good = inputs((140, 140, d, dv))
    bad = [x.clone() for x in good]
    bad[place][1, 1, 45, 3] = value
    before, after = (results(x, "causal & window(30)", "cpu") for x in (good, bad))
    rows = torch.arange(140)
    queries = (rows >= 45) & (rows < 75) if place in (1, 2) else rows == 45
    keys = (rows > 15) & (rows < 75)  # those that such a query sees
    for number, (expected, actual) in enumerate(zip(before, after, strict=True)):
        untouched = ~(queries if number < 2 else keys)
        assert torch.equal(expected[0], actual[0])
        assert torch.equal(expected[1][:, untouched], actual[1][:, untouched]), number
    if place < 3:
        reached = after[0][1][:2, queries] if place else after[0][1][1, queries]
        exact = attention([x.double() for x in bad], "causal & window(30)", "reference")[1]
        exact = exact[:2, queries] if place else exact[1, queries]
        assert torch.equal(reached.isnan(), exact.isnan())


@pytest.mark.sweep
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (128, 128)])
@pytest.mark.parametrize("mask", ["causal", "causal & window(50)", "documents(lengths=(70, 131, 99))"])
def test_two_threads_give_the_same_bits(tiles: None, d: int, dv: int, mask: str) -> None:
    tensors = inputs((300, 300, d, dv))
    tensors[2][0, 0, 77, 0] = float("inf")
    runs = on_threads((1, 2, 2), partial(results, tensors, mask, "cpu"))
    for run in runs[1:]:
        assert all(torch.equal(a.view(torch.int64), b.view(torch.int64)) for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("fill", [0xFF, 0x3F])
def test_scratch_memory_is_written_before_it_is_read(tiles: None, fill: int) -> None:
    """Its bytes, those of a NaN or of a number, change no bit, also where one half of the queries sees nothing but a sink."""
    for mask, shape in (
        ("causal & window(40)", (130, 130, 64, 48)),
        (lowtri.causal() & lowtri.keys(torch.arange(130) >= 40), (130, 130, 128, 96)),
        ("documents(lengths=(33, 40, 57))", (20, 130, 16, 16)),
    ):
        x, sinks = inputs(shape), torch.ones(4)
        before = results(x, mask, "cpu", sinks=sinks)
        for memory in launch._pool:
            np.asarray(memory.bytes)[:] = fill
        after = results(x, mask, "cpu", sinks=sinks)
        assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (128, 96)])
def test_queries_that_see_nothing_but_a_sink_have_an_output_of_0(tiles: None, d: int, dv: int) -> None:
    """No product sets the output of their half, whose memory has that of another tile."""
    mask = lowtri.causal() & lowtri.keys(torch.arange(130) >= 40)
    output = attention(inputs((130, 130, d, dv)), mask, sinks=torch.ones(4))
    assert (output[:, :, :40] == 0).all() and (output[:, :, 40:] != 0).any()
