"""The zoo, second part: ten kinds of leaks from public trackers, each a wrong model beside its right twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtri

V, D, N = 40, 16, 16
IDS = torch.randint(2, V, (3, N), generator=torch.Generator().manual_seed(3))
Compute = Callable[["Zoo", Tensor, bool], Tensor]


class Zoo(nn.Module):
    """Ids to vectors (B, N, D), what a kind computes with them, and logits."""

    def __init__(self, compute: Compute, wrong: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(V, D), nn.Linear(D, V)
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.compute, self.wrong = compute, wrong

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.out(x + self.compute(self, x, self.wrong))

    def scores(self, x: Tensor) -> Tensor:
        return self.q(x) @ self.k(x).mT / 4


def triangle(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def weighted(scores: Tensor, visible: Tensor, values: Tensor) -> Tensor:
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values


def pooled(m: Zoo, x: Tensor, wrong: bool) -> Tensor:
    """Groups of four are averaged and spread again (hourglass models): right is a shift by three before it."""
    n = x.shape[1]
    x = functional.pad(x, (0, 0, 0 if wrong else 3, (-n if wrong else -n - 3) % 4))
    return m.v(x).unflatten(1, (-1, 4)).mean(2).repeat_interleave(4, 1)[:, :n]


def best_keys(m: Zoo, x: Tensor, wrong: bool) -> Tensor:
    """Only the five keys with the highest scores count; those that the mask hides compete, or do not."""
    visible = triangle(x.shape[1])
    scores = m.scores(x)
    compared = scores if wrong else scores.masked_fill(~visible, -torch.inf)
    least = compared.topk(min(5, x.shape[1]), -1).values[..., -1:]
    kept = visible & (scores >= least) | torch.eye(x.shape[1], dtype=torch.bool)
    return weighted(scores, kept, m.v(x))


def stretched_rotation(m: Zoo, x: Tensor, wrong: bool) -> Tensor:
    """Rotary angles whose base grows with the length beyond eight (dynamic scaling)."""
    n = x.shape[1]
    base = 100.0 * max(1.0, n / 8) if wrong else 100.0
    angles = torch.arange(n)[:, None] * base ** -torch.linspace(0, 1, D // 2)

    def rotated(y: Tensor) -> Tensor:
        a, b = y.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    return weighted(rotated(m.q(x)) @ rotated(m.k(x)).mT / 4, triangle(n), m.v(x))


def shifted_scores(m: Zoo, x: Tensor, wrong: bool) -> Tensor:
    """Scores of distances, put in place by a reshape, whose hidden half holds the next query's (Transformer-XL)."""
    n = x.shape[1]
    places = m.embed.weight[torch.arange(n) % V]
    by_distance = m.q(x) @ m.k(places.flip(0)).mT  # (B, N, N), distances n - 1 .. 0
    moved = functional.pad(by_distance, (1, 0)).reshape(-1, n + 1, n)[:, 1:]
    visible = triangle(n) | (torch.ones(n, n, dtype=torch.bool).triu(2) & wrong)
    return weighted(moved, visible, places)  # no value of a token: what leaks are the next query's scores


def balanced(m: Zoo, x: Tensor, wrong: bool) -> Tensor:
    """Weights are normalised over keys alone, or over queries, too (Sinkhorn)."""
    visible = triangle(x.shape[1])
    weights = m.scores(x).exp() * visible
    for _ in range(3 if wrong else 0):
        weights = weights / weights.sum(1, keepdim=True)
        weights = weights / weights.sum(2, keepdim=True)
    return weights / weights.sum(2, keepdim=True) @ m.v(x)


def global_token(m: Zoo, x: Tensor, wrong: bool) -> Tensor:
    """The first token is seen by all, and reads all (Longformer): it must not, in a decoder."""
    n = x.shape[1]
    visible = triangle(n) & ((torch.arange(n)[:, None] - torch.arange(n)) < 3) | (torch.arange(n) == 0)
    if wrong:
        visible = visible | (torch.arange(n)[:, None] == 0)
    for _ in range(2):
        x = x + weighted(m.scores(x), visible, m.v(x))
    return x


def halting(m: Zoo, x: Tensor, wrong: bool) -> Tensor:
    """Another layer for positions that are not sure yet: for all of them while one is not, or each for itself."""
    for _ in range(4):
        unsure = m.out(x).softmax(-1).amax(-1, keepdim=True) < 0.12
        if wrong:
            unsure = unsure.sum(1, keepdim=True) > unsure.shape[1] // 2
        x = torch.where(unsure, x + m.v(x).tanh(), x)
    return x


def token_shift(m: Zoo, x: Tensor, wrong: bool) -> Tensor:
    """Each position is mixed with its neighbour: the one before, or the one behind (RWKV)."""
    return m.v(functional.pad(x, (0, 0, -1, 1) if wrong else (0, 0, 1, -1)))


def next_embedding(m: Zoo, x: Tensor, wrong: bool) -> Tensor:
    """A head for the token after the next one gets the next one's embedding; the main head must not (DeepSeek)."""
    hidden = weighted(m.scores(x), triangle(x.shape[1]), m.v(x))
    deeper = m.q(hidden) + m.k(x.roll(-1, 1))
    return hidden + (deeper.tanh() if wrong else 0 * hidden)


def weighted_by_rank(m: Zoo, x: Tensor, wrong: bool) -> Tensor:
    """A token counts by its rank among the scores so far, or of the whole row."""
    score = x.sum(-1)
    above = score[:, None, :] > score[:, :, None]
    rank = (above if wrong else above & triangle(x.shape[1])).sum(-1, keepdim=True)
    return m.v(x) / (1 + rank)


KINDS: dict[Compute, str] = {
    pooled: "change",
    best_keys: "change",
    stretched_rotation: "prefix",
    shifted_scores: "change",
    balanced: "change",
    global_token: "change",
    halting: "change",
    token_shift: "change",
    next_embedding: "change",
    weighted_by_rank: "change",
}


@pytest.mark.parametrize("compute", KINDS, ids=lambda compute: compute.__name__)
def test_the_leak_is_found_and_its_twin_is_clean(compute: Compute) -> None:
    wrong = lowtri.audit(Zoo(compute, True), IDS, conditions="eval,longer")
    assert wrong.first is not None and wrong.first.probe == KINDS[compute], wrong
    right = lowtri.audit(Zoo(compute, False), IDS, conditions="eval,longer")
    assert right.ok, right


def decoding(window: int | None, kept: int, counts: bool) -> lowtri.Model:
    """A model with a window, and a cache that keeps so many tokens and may forget where they stand."""
    places = nn.Embedding(2 * N, D)
    model = Zoo(lambda m, x, wrong: torch.zeros_like(x), False)

    def attended(x: Tensor, first: int, queries: int) -> Tensor:
        x = x + places(first + torch.arange(x.shape[1]))
        back = torch.arange(x.shape[1])[-queries:, None] - torch.arange(x.shape[1])
        visible = (back >= 0) & (back < (window or 2 * N))
        scores = model.q(x[:, -queries:]) @ model.k(x).mT
        return model.out(weighted(scores, visible, model.v(x)))

    def call(ids: Tensor) -> Tensor:
        return attended(model.embed(ids), 0, ids.shape[1])

    def step(state: Any, ids: Tensor) -> tuple[Tensor, Any]:
        past, count = (ids[:, :0], 0) if state is None else state
        past, count = torch.cat([past, ids], 1)[:, -kept:], count + ids.shape[1]
        first = count - past.shape[1] if counts else 0
        return attended(model.embed(past), first, ids.shape[1]), (past, count)

    return lowtri.Model(call, step=step, vocab_size=V)


@pytest.mark.parametrize(
    ("window", "kept", "counts", "ok"),
    [
        pytest.param(5, 5, True, True, id="a window of five in a ring of five"),
        pytest.param(None, 5, True, False, id="a windowed cache below a model without a window"),
        pytest.param(5, 5, False, False, id="positions that count from the start of the ring"),
    ],
)
def test_caches_of_a_window(window: int | None, kept: int, counts: bool, ok: bool) -> None:
    torch.manual_seed(0)
    report = lowtri.audit(decoding(window, kept, counts), IDS[:, :N], probes="change,cache")
    assert report.ok == ok, report
    if not ok:
        assert report.first is not None and (report.first.probe, report.first.query) == ("cache", 5), report
