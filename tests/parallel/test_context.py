"""ContextParallel on 2, 3 and 4 processes: outputs and gradients of one process, and no more data than the plan says."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import on_ranks
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_ranks import Case, bias_function
from random_masks import HEADS, ROWS
from ranks import Ranks
from shard_cases import shard_masks

import lowtri
from lowtri import masks as lt


def one_process(case: Case, dtype: torch.dtype = torch.float64, engine: str = "formula") -> dict[str, np.ndarray]:
    """The same call on the whole sequence."""
    whole = {
        name: x.to(dtype) if x.dtype.is_floating_point and name != "d_lse" else x for name, x in case.tensors().items()
    }
    leaves = {name: whole[name].requires_grad_() for name in ("q", "k", "v", "sinks", "table")}
    positions = torch.arange(case.n)
    bias = bias_function(case.bias, leaves["table"])
    options = {**case.options, "engine": engine}
    output, lse = lowtri.attention(
        leaves["q"], leaves["k"], leaves["v"], case.mask, return_lse=True, q_positions=positions, k_positions=positions,
        bias=None if bias is None else bias(positions[:, None], positions[None, :]),
        sinks=leaves["sinks"] if case.sinks else None, **options,
    )  # fmt: skip
    results = [(output, whole["d_output"]), (lse, whole["d_lse"].to(lse.dtype))]
    torch.autograd.backward(*zip(*((x, d) for x, d in results if x.requires_grad), strict=True))
    grads = {f"d{name}": leaves[name].grad for name in ("q", "k", "v")}
    if case.sinks:
        grads["dsinks"] = leaves["sinks"].grad
    if case.bias == "learned":
        grads["dbias"] = leaves["table"].grad
    return {name: x.detach().double().numpy() for name, x in {"output": output, "lse": lse, **grads}.items()}


def put_together(case: Case, parts: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """What the ranks hold, as one sequence; parameters' gradients are summed."""
    plan, whole = case.plan(len(parts)), {}
    for name, first in parts[0].items():
        if name in ("dsinks", "dbias"):
            whole[name] = sum(part[name] for part in parts)
        elif isinstance(first, np.ndarray):
            whole[name] = np.full((*first.shape[:2], case.n, *first.shape[3:]), np.nan)
            for rank, part in enumerate(parts):
                whole[name][:, :, plan.positions(rank)] = part[name]
    return whole


def compare(case: Case, parts: list[dict[str, Any]], limit: float) -> None:
    found, expected = put_together(case, parts), one_process(case)
    assert found.keys() == expected.keys()
    for name, exact in expected.items():
        finite = np.isfinite(exact)
        np.testing.assert_array_equal(found[name][~finite], exact[~finite], name)
        error = np.abs(found[name][finite] - exact[finite]).max(initial=0)
        assert error <= limit * max(1, np.abs(exact[finite]).max(initial=0)), (name, error)
    plan = case.plan(len(parts))
    assert [part["received"] for part in parts] == [
        # The all-gather has equal parts, so a rank with fewer tokens than others sends padding with them.
        (plan.ranks - 1) * plan.tokens.max() if plan.gathers[0] else plan.received[rank]
        for rank in range(plan.ranks)
    ]


@pytest.mark.sweep
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(shard_masks, st.integers(1, 300), st.integers(2, 4), st.data())
def test_random_masks(ranks: Ranks, mask: lt.Mask, n: int, size: int, data: st.DataObject) -> None:
    heads = (*mask.batch, 1, 1)[1]
    owner = None
    if data.draw(st.booleans(), "owner"):
        owner = data.draw(st.lists(st.integers(0, size - 1), min_size=-(-n // 64), max_size=-(-n // 64)))
    case = Case(
        # A function cannot be sent to another process: its pairs are.
        mask if "where" not in repr(mask) else lt.table(mask.dense(n)),
        n,
        owner,
        b=ROWS if mask.batch[:1] == (ROWS,) else data.draw(st.integers(1, ROWS), "b"),
        hq=HEADS if heads == HEADS else data.draw(st.sampled_from([1, 2, 4]), "hq"),
        seed=data.draw(st.integers(0, 9)),
        sinks=data.draw(st.booleans(), "sinks"),
        bias=data.draw(st.sampled_from(["", "slope", "learned"]), "bias"),
        options=data.draw(st.sampled_from([{}, {"softcap": 2.0}, {"scale": 0.3}]), "options"),
        context=data.draw(st.sampled_from([{}, {"overlap": False}, {"overlap": True}, {"keep": True}]), "context"),
    )
    compare(case, ranks.run(on_ranks.attention_case, case, size=size), 1e-12)


IDS = np.stack([np.repeat(np.arange(5), [100, 300, 7, 200, 93]), np.repeat(np.arange(3), [300, 50, 350])])
KERNELS = {"engine": "cpu"}
CASES = {
    "causal": Case("causal", 700, b=2, hq=4, hkv=2, d=32, dv=48, options=KERNELS),
    "window": Case("causal & window(100)", 700, hq=4, hkv=1, d=32, dv=48, options=KERNELS, sinks=True),
    "two calls, merged": Case("causal", 700, hq=4, hkv=2, d=32, dv=48, options=KERNELS, context={"overlap": True}),
    "documents by row": Case(lt.causal() & lt.documents(IDS), 700, b=2, hq=4, hkv=2, d=32, dv=48, options=KERNELS),
    "a rank without work": Case("causal", 700, np.array([1] * 6 + [0] * 5), d=32, dv=48, options=KERNELS),
    "fewer blocks than ranks": Case("causal", 100, d=32, dv=48, options=KERNELS),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_kernels(ranks: Ranks, name: str, dtype: str) -> None:
    """In bf16 the error is at most what the contract of precision allows one process, for outputs and gradients."""
    case = replace(CASES[name], dtype=dtype)
    parts = ranks.run(on_ranks.attention_case, case, size=3)
    if dtype == "float64":
        return compare(case, parts, 1e-12)
    found, exact, plain = put_together(case, parts), one_process(case), one_process(case, torch.bfloat16)
    for one, expected in exact.items():
        finite = np.isfinite(expected)
        error, allowed = (np.abs(x[one][finite] - expected[finite]) for x in (found, plain))
        ulp = 2 * torch.finfo(torch.bfloat16).eps * np.abs(expected[finite]).max(initial=0)
        assert error.max() <= 2 * allowed.max() + ulp, one
        assert np.sqrt((error**2).mean()) <= 1.5 * np.sqrt((allowed**2).mean()) + 1e-6, one
    return None


def test_a_layer_keeps_its_own_tokens_only(ranks: Ranks) -> None:
    """q, k, v, the output and its log-sum-exp: not more where more keys are received."""
    near, far = (Case(mask, 512, hq=2, hkv=2) for mask in ("causal & window(10)", "full"))
    few, many, kept = (
        ranks.run(on_ranks.attention_case, case) for case in (near, far, replace(far, context={"keep": True}))
    )
    own = 128 * 2 * (8 * 4 + 1) * 8  # bytes: tokens, heads, numbers, float64
    assert [part["kept"] for part in few] == [part["kept"] for part in many] == [own] * 4
    assert all(part["kept"] == own + 512 * 2 * 16 * 8 for part in kept)
    assert [part["messages"] for part in many] == [3] * 4 and [part["messages"] for part in kept] == [2] * 4


def test_a_bias_is_not_computed_in_half_types(ranks: Ranks) -> None:
    assert ranks.run(on_ranks.bias_under_autocast, size=1) == [torch.float32]


def test_garbage_that_nobody_sees_changes_nothing(ranks: Ranks) -> None:
    assert max(map(max, ranks.run(on_ranks.hidden_garbage))) < 1e-12


def test_masks_of_functions(ranks: Ranks) -> None:
    assert max(map(max, ranks.run(on_ranks.functions_as_masks))) < 1e-12


def test_shard_and_unshard(ranks: Ranks) -> None:
    assert ranks.run(on_ranks.round_trip, size=3) == [True] * 3


WORDS = {
    "another plan": "RankError: ContextParallel: rank 0 has n 256, but rank 2 has n 320",
    "other arrays": "RankError: ContextParallel: rank 0 has masks .documents.*but rank 2 has masks",
    "another length": r"CallError: .*q is \(1, 2, \d+, 8\), but this rank holds \d+ tokens.*context.shard",
    "another dtype": "RankError: .*rank 0 has q .* torch.float32, but rank 2 has q .* torch.float64.*Fix",
    "gradients on one": "RankError: .*gradients False, but rank 2 has gradients True",
    "another option": "RankError: .*softcap None, but rank 2 has softcap 2.0",
    "another mask": "CallError: .*mask is full, but the plan was made for causal.*plan_shards",
    "no mask of two": "CallError: .*mask is None, but the plan was made for causal, full",
    "another layer's mask": "RankError: .*mask 1, but rank 2 has mask 0",
    "a tensor as bias": "CallError: .*bias is Tensor.*function of positions",
    "unshard": r"CallError: unshard: x is .*this rank's \d+ tokens",
    "unshard with a gradient": r"CallError: unshard: x requires a gradient.*x.detach\(\)",
    "shard": r"CallError: shard: x is \(2, 255\), but its dimension 1 must be the 256 tokens",
    "another number of ranks": "CallError: .*the plan is for 4 ranks, but the group has 3 processes.*get_world_size",
    "positions": "CallError: .*k_positions are not the positions of this rank's tokens.*attend=context.attend",
    "weights": "CallError: .*neither weights nor dropout",
}


def test_every_error_is_raised_on_every_rank(ranks: Ranks) -> None:
    results = ranks.run(on_ranks.wrong_arguments, size=3)
    assert list(results[0]) == list(WORDS)
    for rank, messages in enumerate(results):
        for name, message in messages.items():
            assert re.match(WORDS[name], message, re.S), (rank, name, message)
    assert "This is the error of rank 2 of 3." in results[0]["another length"]
    assert "This is the error" not in results[2]["another length"]


def test_a_missing_rank_is_noticed_and_named_on_rank_0_and_a_killed_one_is_noticed_at_once() -> None:
    group = Ranks(3)
    try:
        results = group.run(on_ranks.absent, 1)
        for rank in (0, 2):
            message = r"ContextParallel: a process of the group has ended, or did not answer.*\nFix: "
            assert re.match(message, results[rank], re.S)
        assert "Ranks 1 failed" in results[0]
        group.start(on_ranks.killed, 1)
        results = group.results(30)  # gloo's time-out is a minute
        for rank in (0, 2):
            assert re.match(
                r"ContextParallel.*: a process of the group has ended.*\nFix: ", str(results[rank]), re.S
            ), results
        assert results[1] is None
    finally:
        group.stop()
