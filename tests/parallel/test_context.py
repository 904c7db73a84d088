"""ContextParallel on 2, 3 and 4 processes: outputs and gradients of one process, and no more data than the plan says."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_ranks import Case, attention_case, bias_function

import lowtri
from lowtri import masks as lt
from random_masks import HEADS, ROWS
from ranks import Ranks
from shard_cases import shard_masks


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
    compare(case, ranks.run(attention_case, case, size=size), 1e-12)
