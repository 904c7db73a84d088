"""Faults outside of attention masks: thresholds, scales, routing, convolutions, positions; each with its correct twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtri

B, N, D, V = 3, 14, 8, 40
VECTORS = torch.randn(B, N, D, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(1, V, (B, N), generator=torch.Generator().manual_seed(0))


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None)


class Model(nn.Module):
    def __init__(self, forward: Callable[..., Tensor], wrong: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.route = nn.Embedding(V, D), nn.Linear(D, 4)
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.compute, self.wrong = forward, wrong

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        return self.compute(self, *inputs, **named)


def clipped(m: Model, x: Tensor) -> Tensor:
    """Values are clipped at a share of the greatest one: of all positions, or of those so far."""
    y = m.q(x)
    most = y.abs().amax(-1, keepdim=True)
    bound = 0.7 * (most.amax(1, keepdim=True) if m.wrong else most.cummax(1).values)
    return torch.minimum(torch.maximum(y, -bound), bound)


def int8_keys(m: Model, x: Tensor) -> Tensor:
    """Keys are rounded to 8 bits with one scale: for everything, or for each token."""
    k = m.k(x)
    scale = (k.abs().amax() if m.wrong else k.abs().amax(-1, keepdim=True)) / 127
    return attend(m.q(x), (k / scale).round() * scale, m.v(x))


def experts(m: Model, x: Tensor) -> Tensor:
    """Experts choose tokens, or tokens choose experts."""
    share = m.route(x).softmax(-1)
    chosen = share.topk(6, dim=1).indices if m.wrong else share.argmax(-1, keepdim=True)
    mixed = torch.zeros_like(share).scatter(1 if m.wrong else -1, chosen, 1.0) * share
    return mixed @ m.route.weight * x


def convolved(m: Model, x: Tensor) -> Tensor:
    """A long convolution by FFT, which wraps around unless it is padded to twice the length."""
    n = x.shape[1]
    size = n + n // 2 if m.wrong else 2 * n
    kernel = functional.pad(m.embed.weight[:n], (0, 0, 0, max(0, n - V)))
    spectra = torch.fft.rfft(x, size, dim=1) * torch.fft.rfft(kernel, size, dim=0)
    return torch.fft.irfft(spectra, size, dim=1)[:, :n]


def straight_through(m: Model, x: Tensor) -> Tensor:
    """A term of value 0, whose gradient goes to later inputs; no output moves."""
    later = x.flip(1)
    return x.cumsum(1) + (later - later.detach() if m.wrong else (later - later).detach())


def biased_by_length(m: Model, ids: Tensor) -> Tensor:
    """A bias of the distance, whose slope depends on how long the input is."""
    n = ids.shape[1]
    back = torch.arange(n)[:, None] - torch.arange(n)
    bias = (-0.3 * back / (n / 8 if m.wrong else 1.0)).masked_fill(back < 0, -torch.inf)
    x = m.embed(ids)
    return attend(m.q(x), m.k(x), m.v(x), bias.to(x))


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
    y[:, columns] = attend(m.q(x), m.k(x), m.v(x), seen)
    return y


def same_token(m: Model, ids: Tensor) -> Tensor:
    """A token is divided by how often it occurs: in the whole row, or so far."""
    same = (ids[:, :, None] == ids[:, None, :]).to(m.embed.weight)
    return m.embed(ids) / (same if m.wrong else same.tril()).sum(-1, keepdim=True)


PADDED = {"input_ids": IDS, "attention_mask": torch.tensor([[0] * 4 + [1] * 10, [0] * 5 + [1] * 9, [0] * 8 + [1] * 6])}
CASES: list[tuple[Callable[..., Tensor], Any, str]] = [
    (clipped, VECTORS, "change"),
    (int8_keys, VECTORS, "change"),
    (experts, VECTORS, "change"),
    (convolved, VECTORS, "change"),
    (straight_through, VECTORS, "gradient"),
    (biased_by_length, IDS, "prefix"),
    (normalised_chunks, VECTORS, "change"),
    (without_empty_columns, PADDED, "change"),
    (same_token, IDS, "change"),
]


@pytest.mark.parametrize(("compute", "example", "probe"), CASES, ids=[case[0].__name__ for case in CASES])
def test_the_fault_is_found_and_its_twin_is_clean(compute: Any, example: Any, probe: str) -> None:
    wrong = lowtri.audit(Model(compute, True), example, conditions="eval,code_paths,longer")
    assert wrong.first is not None and wrong.first.probe == probe, wrong
    right = lowtri.audit(Model(compute, False), example, conditions="eval,code_paths,longer")
    assert right.ok, right


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
        y = attend(self.q(x), k, v, torch.ones(n, k.shape[1]).tril(k.shape[1] - n).bool())
        return (y, Cropped(k, v, start + n, self.wrong)) if use_cache else y


@pytest.mark.parametrize("wrong", [True, False])
def test_a_crop_that_forgets_the_count(wrong: bool) -> None:
    report = lowtri.audit(Counting(clipped, wrong), IDS, length=0, conditions="eval,code_paths,longer")
    assert report.ok is not wrong, report
    if wrong:
        assert report.first is not None and "after a rejected draft" in report.message
