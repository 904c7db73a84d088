"""Faults of serving: experts with a capacity, states of convolutions, shared prefixes, packed rows, rings, FFT convolutions, models
with time first. Each fault has a correct twin."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad, silu

import lowtri

VOCABULARY, D, N = 60, 16, 24
IDS = torch.randint(2, VOCABULARY, (3, N), generator=torch.Generator().manual_seed(2))


class Model(nn.Module):
    """Embedding, one head and an output layer; `wrong` chooses the faulty twin."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong
        self.embed, self.out = nn.Embedding(VOCABULARY, D), nn.Linear(D, VOCABULARY)
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4)

    def attend(self, x: Tensor, source: Tensor, mask: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(source).transpose(-1, -2) / 4
        return self.out(scores.masked_fill(~mask, -1e9).softmax(-1) @ self.v(source))


class Experts(Model):
    """Each expert takes three tokens of a row: the first ones, or those with the highest scores of the whole row."""

    def __init__(self, wrong: bool) -> None:
        super().__init__(wrong)
        self.router = nn.Linear(D, 4)
        nn.init.normal_(self.router.weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        score, expert = self.router(x).max(-1)
        chosen = one_hot(expert, 4)  # (B, N, 4)
        first = (chosen.cumsum(1) * chosen).sum(-1) - 1
        better = (score[:, None, :] > score[:, :, None]) & (expert[:, None, :] == expert[:, :, None])
        rank = better.sum(-1) if self.wrong else first
        return self.out(x * (1 + expert[..., None]) * (rank < 3)[..., None])


class Convolution(Model):
    """A causal convolution with its last three inputs as state, which a chunk of two forgets to store."""

    def __init__(self, wrong: bool) -> None:
        super().__init__(wrong)
        self.convolution = nn.Conv1d(D, D, 4, groups=D)

    def forward(self, ids: Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
        x = self.embed(ids).transpose(1, 2)
        state = x.new_zeros(len(x), D, 3) if past_key_values is None else past_key_values
        x = torch.cat([state, x], -1)
        logits = self.out(silu(self.convolution(x)).transpose(1, 2))
        new = state if self.wrong and ids.shape[1] == 2 else x[..., -3:]
        return (logits, new) if use_cache else (logits,)


class SharedPrefix(Model):
    """Rows take the first row's keys where their prefixes are equal; the fault compares any id, and not all before it."""

    def forward(self, ids: Tensor) -> Tensor:
        x, n = self.embed(ids), ids.shape[1]
        equal = ids[:, :8] == ids[:1, :8]
        shared = equal.any(1, keepdim=True).expand(-1, equal.shape[1]) if self.wrong else equal.cumprod(1).bool()
        keys = torch.cat([torch.where(shared[..., None], x[:1, :8], x[:, :8]), x[:, 8:]], 1)
        return self.attend(x, keys, torch.ones(n, n, dtype=torch.bool).tril())


class TimeFirst(Model):
    """Ids are (N, B); the fault reads them as (B, N)."""

    def __init__(self, wrong: bool) -> None:
        super().__init__(wrong)
        self.gru = nn.GRU(D, D, batch_first=wrong)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.gru(self.embed(ids))[0])


class Packed(Model):
    """Documents begin at position 0; the fault's begin one token late."""

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        document = (position_ids == 0).cumsum(1)
        document = torch.cat([document[:, :1], document[:, :-1]], 1) if self.wrong else document
        x = self.embed(ids) + torch.sin(position_ids[..., None] * torch.arange(1, D + 1) / D)
        n = ids.shape[1]
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        return self.attend(x, x, causal & (document[:, :, None] == document[:, None, :]))


class Mean(Model):
    """The mean of the real tokens so far; the fault divides by how many there are in the row."""

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        real = attention_mask[..., None].float()
        count = real.sum(1, keepdim=True) if self.wrong else real.cumsum(1)
        return self.out((self.embed(ids) * real).cumsum(1) / count.clamp(min=1))


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
        logits = self.attend(x, source, mask)
        return (logits, (source[:, -5:], start + new)) if use_cache else (logits,)


class Fourier(Model):
    """A convolution by FFT, whose rounding moves earlier outputs; without pads it is circular."""

    def __init__(self, wrong: bool) -> None:
        super().__init__(wrong)
        self.filter = nn.Parameter(torch.randn(N, D) * 0.3)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        x = pad(self.embed(ids), (0, 0, 0, 0 if self.wrong else n))
        spectrum = torch.fft.rfft(x, dim=1) * torch.fft.rfft(self.filter[:n], x.shape[1], dim=0)
        return self.out(torch.fft.irfft(spectrum, x.shape[1], dim=1)[:, :n])


SHARED = IDS.clone()
SHARED[1, :5], SHARED[2, :8] = SHARED[0, :5], SHARED[0, :8]
POSITIONS = torch.cat([torch.arange(7), torch.arange(9), torch.arange(8)]).expand(3, -1).contiguous()
REAL = torch.ones_like(IDS)
REAL[1, :5] = REAL[2, 20:] = 0
PAIRS: dict[type[Model], tuple[Any, dict[str, Any], str]] = {
    Experts: (IDS, {}, "First seen in Experts"),
    Convolution: (IDS, {}, "decoding in chunks differs"),
    SharedPrefix: (SHARED, {}, "row 1 sees row 0"),
    TimeFirst: (IDS.T.contiguous(), {}, r"row \d sees row \d"),
    Packed: (
        {"ids": IDS, "position_ids": POSITIONS},
        {"mask": "causal & documents(lengths=[7, 9, 8])"},
        "position 7 sees position [0-6]:",
    ),
    Mean: ({"ids": IDS, "attention_mask": REAL}, {}, "sees the length"),
    Ring: (IDS, {"mask": "causal & window(6)"}, "decoding in chunks differs"),
    Fourier: (IDS, {}, "position 0 sees position 1"),
}


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
@pytest.mark.parametrize("kind", PAIRS)
def test_faults_of_serving(kind: type[Model], wrong: bool) -> None:
    example, arguments, words = PAIRS[kind]
    torch.manual_seed(1)
    model = lowtri.Model(kind(wrong).eval(), axes="NB->NBV" if kind is TimeFirst else None)
    report = lowtri.audit(model, example, length=0, **arguments, conditions="eval,code_paths,longer")
    assert report.verdict == ("leak" if wrong else "no leak found"), report
    if wrong:
        assert re.search(words, report.message), report.message
