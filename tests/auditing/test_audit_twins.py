"""Wrong models beside their right twins: leaks from public trackers, and faults outside of attention masks. Each is found by its
probe, and no twin is accused. Those with a file of their own are in examples/leaks (test_audit_zoo.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtri

B, N, D, V = 3, 16, 16, 40
IDS = torch.randint(2, V, (B, N), generator=torch.Generator().manual_seed(3))
VECTORS = torch.randn(B, N, D, generator=torch.Generator().manual_seed(0))
Compute = Callable[..., Tensor]


class Model(nn.Module):
    """What a kind computes; of ids, with `logits`, what it adds to their vectors (B, N, D), as logits."""

    def __init__(self, compute: Compute, wrong: bool, logits: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(V, D), nn.Linear(D, V)
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.compute, self.wrong, self.logits = compute, wrong, logits

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        if not self.logits:
            return self.compute(self, *inputs, **named)
        x = self.embed(*inputs)
        return self.out(x + self.compute(self, x))

    def scores(self, x: Tensor) -> Tensor:
        return self.q(x) @ self.k(x).mT / 4


def triangle(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def weighted(scores: Tensor, visible: Tensor, values: Tensor) -> Tensor:
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values


# from public trackers


def pooled(m: Model, x: Tensor) -> Tensor:
    """Groups of four are averaged and spread again (hourglass models): right is a shift by three before it."""
    n = x.shape[1]
    x = functional.pad(x, (0, 0, 0 if m.wrong else 3, (-n if m.wrong else -n - 3) % 4))
    return m.v(x).unflatten(1, (-1, 4)).mean(2).repeat_interleave(4, 1)[:, :n]


def best_keys(m: Model, x: Tensor) -> Tensor:
    """Only the five keys with the highest scores count; those that the mask hides compete, or do not."""
    visible = triangle(x.shape[1])
    scores = m.scores(x)
    compared = scores if m.wrong else scores.masked_fill(~visible, -torch.inf)
    least = compared.topk(min(5, x.shape[1]), -1).values[..., -1:]
    kept = visible & (scores >= least) | torch.eye(x.shape[1], dtype=torch.bool)
    return weighted(scores, kept, m.v(x))


def stretched_rotation(m: Model, x: Tensor) -> Tensor:
    """Rotary angles whose base grows with the length beyond eight (dynamic scaling)."""
    n = x.shape[1]
    base = 100.0 * max(1.0, n / 8) if m.wrong else 100.0
    angles = torch.arange(n)[:, None] * base ** -torch.linspace(0, 1, D // 2)

    def rotated(y: Tensor) -> Tensor:
        a, b = y.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    return weighted(rotated(m.q(x)) @ rotated(m.k(x)).mT / 4, triangle(n), m.v(x))


def shifted_scores(m: Model, x: Tensor) -> Tensor:
    """Scores of distances, put in place by a reshape, whose hidden half holds the next query's (Transformer-XL)."""
    n = x.shape[1]
    places = m.embed.weight[torch.arange(n) % V]
    by_distance = m.q(x) @ m.k(places.flip(0)).mT  # (B, N, N), distances n - 1 .. 0
    moved = functional.pad(by_distance, (1, 0)).reshape(-1, n + 1, n)[:, 1:]
    visible = triangle(n) | (torch.ones(n, n, dtype=torch.bool).triu(2) & m.wrong)
    return weighted(moved, visible, places)  # no value of a token: what leaks are the next query's scores


def balanced(m: Model, x: Tensor) -> Tensor:
    """Weights are normalised over keys alone, or over queries, too (Sinkhorn)."""
    visible = triangle(x.shape[1])
    weights = m.scores(x).exp() * visible
    for _ in range(3 if m.wrong else 0):
        weights = weights / weights.sum(1, keepdim=True)
        weights = weights / weights.sum(2, keepdim=True)
    return weights / weights.sum(2, keepdim=True) @ m.v(x)


def global_token(m: Model, x: Tensor) -> Tensor:
    """The first token is seen by all, and reads all (Longformer): it must not, in a decoder."""
    n = x.shape[1]
    visible = triangle(n) & ((torch.arange(n)[:, None] - torch.arange(n)) < 3) | (torch.arange(n) == 0)
    if m.wrong:
        visible = visible | (torch.arange(n)[:, None] == 0)
    for _ in range(2):
        x = x + weighted(m.scores(x), visible, m.v(x))
    return x


def halting(m: Model, x: Tensor) -> Tensor:
    """Another layer for positions that are not sure yet: for all of them while one is not, or each for itself."""
    for _ in range(4):
        unsure = m.out(x).softmax(-1).amax(-1, keepdim=True) < 0.12
        if m.wrong:
            unsure = unsure.sum(1, keepdim=True) > unsure.shape[1] // 2
        x = torch.where(unsure, x + m.v(x).tanh(), x)
    return x


def token_shift(m: Model, x: Tensor) -> Tensor:
    """Each position is mixed with its neighbour: the one before, or the one behind (RWKV)."""
    return m.v(functional.pad(x, (0, 0, -1, 1) if m.wrong else (0, 0, 1, -1)))


def next_embedding(m: Model, x: Tensor) -> Tensor:
    """A head for the token after the next one gets the next one's embedding; the main head must not (DeepSeek)."""
    hidden = weighted(m.scores(x), triangle(x.shape[1]), m.v(x))
    deeper = m.q(hidden) + m.k(x.roll(-1, 1))
    return hidden + (deeper.tanh() if m.wrong else 0 * hidden)


def weighted_by_rank(m: Model, x: Tensor) -> Tensor:
    """A token counts by its rank among the scores so far, or of the whole row."""
    score = x.sum(-1)
    above = score[:, None, :] > score[:, :, None]
    rank = (above if m.wrong else above & triangle(x.shape[1])).sum(-1, keepdim=True)
    return m.v(x) / (1 + rank)


# outside of attention masks


def clipped(m: Model, x: Tensor) -> Tensor:
    """Values are clipped at a share of the greatest one: of all positions, or of those so far."""
    y = m.q(x)
    most = y.abs().amax(-1, keepdim=True)
    bound = 0.7 * (most.amax(1, keepdim=True) if m.wrong else most.cummax(1).values)
    return torch.minimum(torch.maximum(y, -bound), bound)


def straight_through(m: Model, x: Tensor) -> Tensor:
    """A term of value 0, whose gradient goes to later inputs; no output moves."""
    later = x.flip(1)
    return x.cumsum(1) + (later - later.detach() if m.wrong else (later - later).detach())


def biased_by_length(m: Model, ids: Tensor) -> Tensor:
    """A bias of the distance, whose slope depends on how long the input is."""
    n = ids.shape[1]
    back = torch.arange(n)[:, None] - torch.arange(n)
    x = m.embed(ids)
    bias = (-0.3 * back / (n / 8 if m.wrong else 1.0)).to(x)
    return weighted(m.scores(x) + bias, triangle(n), m.v(x))


def normalised_chunks(m: Model, x: Tensor) -> Tensor:
    """Each chunk of four loses a mean: its own, or that of the chunk before."""
    n = x.shape[1]
    y = functional.pad(x, (0, 0, 0, -n % 4)).unflatten(1, (-1, 4))
    mean = y.mean(2, keepdim=True)
    mean = mean if m.wrong else functional.pad(mean[:, :-1], (0, 0, 0, 0, 1, 0))
    return (y - mean).flatten(1, 2)[:, :n]


def without_empty_columns(m: Model, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Columns that are pads in every row are cut away; of the others the mask is applied, or forgotten."""
    columns = attention_mask.any(0)
    x, real = m.embed(input_ids[:, columns]), attention_mask[:, columns].bool()
    n = x.shape[1]
    seen = torch.ones(n, n).tril().bool() & (real[:, None, :] | torch.tensor(m.wrong)) | torch.eye(n).bool()
    y = x.new_zeros(*input_ids.shape, D)
    y[:, columns] = weighted(m.scores(x), seen, m.v(x))
    return y


def same_token(m: Model, ids: Tensor) -> Tensor:
    """A token is divided by how often it occurs: in the whole row, or so far."""
    same = (ids[:, :, None] == ids[:, None, :]).to(m.embed.weight)
    return m.embed(ids) / (same if m.wrong else same.tril()).sum(-1, keepdim=True)


def shared_prefix(m: Model, ids: Tensor) -> Tensor:
    """Rows take the first row's keys where their prefixes are equal; the fault compares any id, and not all before it."""
    x = m.embed(ids)
    equal = ids[:, :8] == ids[:1, :8]
    shared = equal.any(1, keepdim=True).expand(-1, equal.shape[1]) if m.wrong else equal.cumprod(1).bool()
    keys = torch.cat([torch.where(shared[..., None], x[:1, :8], x[:, :8]), x[:, 8:]], 1)
    return weighted(m.q(x) @ m.k(keys).mT / 4, triangle(x.shape[1]), m.v(keys))


SHARED = IDS.clone()
SHARED[1, :5], SHARED[2, :8] = SHARED[0, :5], SHARED[0, :8]
REAL = torch.tensor([[0] * zeros + [1] * (N - zeros) for zeros in (4, 5, 8)])
PADDED = {"input_ids": IDS, "attention_mask": REAL}
ADDED = [
    pooled,
    best_keys,
    shifted_scores,
    balanced,
    global_token,
    halting,
    token_shift,
    next_embedding,
    weighted_by_rank,
]
KINDS: dict[Compute, tuple[Any, str]] = {
    **dict.fromkeys(ADDED, (IDS, "change")),
    stretched_rotation: (IDS, "prefix"),
    shared_prefix: (SHARED, "batch"),
    clipped: (VECTORS, "change"),
    straight_through: (VECTORS, "gradient"),
    biased_by_length: (IDS, "prefix"),
    normalised_chunks: (VECTORS, "change"),
    without_empty_columns: (PADDED, "change"),
    same_token: (IDS, "change"),
}


@pytest.mark.sweep
@pytest.mark.parametrize("compute", KINDS, ids=lambda compute: compute.__name__)
def test_the_fault_is_found_and_its_twin_is_clean(compute: Compute) -> None:
    example, probe = KINDS[compute]
    logits = compute in (*ADDED, stretched_rotation)
    wrong = lowtri.audit(Model(compute, True, logits), example, conditions="eval,code_paths,longer")
    assert wrong.first is not None and wrong.first.probe == probe, wrong
    right = lowtri.audit(Model(compute, False, logits), example, conditions="eval,code_paths,longer")
    assert right.ok, right


# caches


class Cropped:
    """A cache that is cropped with, or without, the count of its positions."""

    def __init__(self, k: Tensor, v: Tensor, count: int, wrong: bool) -> None:
        self.k, self.v, self.count, self.wrong = k, v, count, wrong

    def crop(self, n: int) -> None:
        self.k, self.v = self.k[:, :n], self.v[:, :n]
        self.count = self.count if self.wrong else n


class Counting(Model):
    def forward(self, ids: Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
        start = 0 if past_key_values is None else past_key_values.count
        n = ids.shape[1]
        x = self.embed(ids) + torch.arange(start, start + n).to(self.embed.weight)[:, None] / 10
        k, v = self.k(x), self.v(x)
        if past_key_values is not None:
            k, v = torch.cat([past_key_values.k, k], 1), torch.cat([past_key_values.v, v], 1)
        y = weighted(self.q(x) @ k.mT / 4, torch.ones(n, k.shape[1]).tril(k.shape[1] - n).bool(), v)
        return (y, Cropped(k, v, start + n, self.wrong)) if use_cache else y


@pytest.mark.parametrize("wrong", [True, False])
def test_a_crop_that_forgets_the_count(wrong: bool) -> None:
    report = lowtri.audit(Counting(clipped, wrong), IDS, length=0, conditions="eval,code_paths,longer")
    assert report.ok is not wrong, report
    if wrong:
        assert report.first is not None and "after a rejected draft" in report.message


class Ring(Model):
    """A window of six with a cache of five; the fault shows the next token of the same chunk."""

    def forward(self, ids: Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
        x, new = self.embed(ids), ids.shape[1]
        past, start = (x[:, :0], 0) if past_key_values is None else past_key_values
        source = torch.cat([past, x], 1)
        query, key = torch.arange(start, start + new)[:, None], torch.arange(start + new - source.shape[1], start + new)
        mask = (key <= query) & (key > query - 6)
        if self.wrong and past_key_values is not None:
            mask = mask | ((key >= start) & (key <= query + 1))
        logits = self.out(weighted(self.q(x) @ self.k(source).mT / 4, mask, self.v(source)))
        return (logits, (source[:, -5:], start + new)) if use_cache else (logits,)


@pytest.mark.parametrize("wrong", [True, False])
def test_a_cache_that_shows_the_next_token_of_a_chunk(wrong: bool) -> None:
    report = lowtri.audit(Ring(clipped, wrong), IDS, mask="causal & window(6)", probes="change,cache")
    assert report.ok is not wrong, report
    assert report.ok or "decoding in chunks differs" in report.message


def decoding(window: int | None, kept: int, counts: bool) -> lowtri.Model:
    """A model with a window, and a cache that keeps so many tokens and may forget where they stand."""
    places = nn.Embedding(2 * N, D)
    model = Model(clipped, False)

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
