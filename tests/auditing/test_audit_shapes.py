"""The shapes that users come with: right, and with the mask removed, inverted and transposed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtri

N, D = 7, 6
TRI = np.tril(np.ones((N, N), bool))
# True = may see. Transposed, everyone sees itself and the future; inverted, the future alone.
TABLES = {"right": TRI, "removed": np.ones_like(TRI), "inverted": ~TRI, "transposed": TRI.T}


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, may: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~may, -1e9)
    weights = scores.softmax(-1)
    return weights @ v, weights


class WithMaskArgument(nn.Module):
    """(N, D) and a mask, True = hidden: the notebooks' module."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x) for m in self.maps)
        return plain(q, k, v, ~mask)[0]


class Pair(nn.Module):
    """Returns (output, weights)."""

    def __init__(self, may: torch.Tensor) -> None:
        super().__init__()
        self.qkv, self.may = nn.Linear(D, 3 * D), may

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n = x.shape[-2]
        return plain(*self.qkv(x).chunk(3, -1), self.may[:n, :n])


def case(shape: str, may: torch.Tensor) -> tuple[Any, Any]:
    torch.manual_seed(0)
    if shape == "unbatched with a mask argument":
        return WithMaskArgument(), (torch.randn(N, D), ~may)
    if shape == "mask by keyword":
        return WithMaskArgument(), {"x": torch.randn(N, D), "mask": ~may}
    if shape == "function of q, k, v":
        q, k, v = torch.randn(3, 2, 3, N, D)
        return (lambda q, k, v: plain(q, k, v, may[: q.shape[-2], : q.shape[-2]])[0]), (q, k, v)
    if shape == "output and weights":
        return Pair(may), torch.randn(2, N, D)
    if shape == "x for q, k and v":
        return (lambda x: plain(x, x, x, may[: len(x), : len(x)])), torch.randn(N, D)
    if shape == "numpy function of q, k, v":
        table = may.numpy()

        def numpy_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
            n = q.shape[-2]
            scores = np.where(table[:n, :n], q @ np.swapaxes(k, -1, -2), -1e9)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            return weights / weights.sum(-1, keepdims=True) @ v

        return numpy_attention, tuple(np.random.default_rng(0).standard_normal((3, N, D)))
    if shape == "argmax indices":
        head = nn.Linear(D, 200)
        return (lambda x: head(plain(x, x, x, may[: len(x), : len(x)])[0]).argmax(-1)), torch.randn(N, D)
    assert shape == "batch in the second axis"
    module = Pair(may)
    return (lambda x: module(x.movedim(0, 1))[0].movedim(1, 0)), torch.randn(N, 2, D)


SHAPES = [
    "unbatched with a mask argument",
    "mask by keyword",
    "function of q, k, v",
    "output and weights",
    "x for q, k and v",
    "numpy function of q, k, v",
    "argmax indices",
    "batch in the second axis",
]


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("shape", SHAPES)
def test_users_shape(shape: str, kind: str) -> None:
    model, example = case(shape, torch.from_numpy(TABLES[kind].copy()))
    more = {"batch in the second axis": {"axes": "NBD"}}.get(shape, {})
    report = lowtri.audit(lowtri.Model(model, **more), example)
    if kind == "right":
        assert report.ok, report
    else:
        assert (report.first.query, report.first.key) == (0, 1), report
        # In each of the three, every position sees all of its future.
        leaking = {(leak.query, leak.key) for leak in report.leaks}
        assert shape == "argmax indices" or leaking >= {(q, k) for q in range(N) for k in range(q + 1, N)}


def test_the_packages_own_module_from_the_notebooks() -> None:
    torch.manual_seed(42)
    module = lowtri.plain.MaskedSelfAttention(d_model=2)
    x = torch.tensor([[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]])
    hidden = torch.ones(3, 3, dtype=torch.bool).triu(1)
    assert lowtri.audit(module, (x, hidden)).ok
    leak = lowtri.audit(module, (x, torch.zeros(3, 3, dtype=torch.bool))).first
    assert leak is not None and (leak.query, leak.key) == (0, 1)


def test_lists_and_ids_without_torch() -> None:
    table = np.random.default_rng(0).standard_normal((20, 4))

    def model(ids: np.ndarray) -> np.ndarray:
        return np.cumsum(table[ids], axis=0)

    assert lowtri.audit(model, [3, 1, 4, 1, 5]).ok
    assert lowtri.audit(lowtri.Model(lambda ids: model(ids)[::-1], vocab_size=20), [3, 1, 4, 1, 5]).first is not None


@pytest.mark.parametrize("answer", [dict, tuple, list])
def test_answers_in_containers(answer: Callable[[Any], Any]) -> None:
    def model(x: torch.Tensor) -> Any:
        y = x.cumsum(0)
        return {"logits": y, "other": x.flip(0)} if answer is dict else answer((y, x.flip(0)))

    assert lowtri.audit(model, torch.randn(5, 3)).ok
    second = lowtri.audit(
        lowtri.Model(model, output=lambda a: a["other"] if answer is dict else a[1]), torch.randn(5, 3)
    )
    assert second.first is not None and (second.first.query, second.first.key) == (0, 4)


def test_channels_before_time() -> None:
    torch.manual_seed(0)
    conv = nn.Conv1d(3, 5, 3)
    right = lowtri.audit(lowtri.Model(lambda x: conv(nn.functional.pad(x, (2, 0))), axes="BDN"), torch.randn(2, 3, 8))
    assert right.ok
    wrong = lowtri.audit(lowtri.Model(lambda x: conv(nn.functional.pad(x, (1, 1))), axes="BDN"), torch.randn(2, 3, 8))
    assert (wrong.first.query, wrong.first.key) == (0, 1)


class Translating(nn.Module):
    """A decoder that hears its source's mean; ``across`` takes it over the batch as well, which no row may notice."""

    def __init__(self, *, across: bool = False) -> None:
        super().__init__()
        self.across, self.table = across, nn.Embedding(9, D)

    def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        heard = self.table(input_ids).mean((0, 1) if self.across else 1, keepdim=True)
        return self.table(decoder_input_ids).cumsum(1) + heard


@pytest.mark.parametrize("length", [N, N + 4])
def test_the_source_of_a_translation_goes_with_its_row(length: int) -> None:
    torch.manual_seed(0)
    source, ids = torch.randint(9, (2, length)), torch.randint(9, (2, N))
    named = {"input_ids": source, "decoder_input_ids": ids}
    report = lowtri.audit(lowtri.Model(Translating(), inputs="decoder_input_ids"), named)
    assert report.ok, report.message
    assert {finding.probe: finding.status for finding in report.findings}["batch"] == "clean"
    mixed = lowtri.audit(lowtri.Model(Translating(across=True), inputs="decoder_input_ids"), named)
    assert not mixed.ok and re.search(r"row 0 has other outputs alone: output 0 moves by 0\.\d+", mixed.message)
    if length != N:  # without a name, a length of its own tells that it does not follow the positions
        assert lowtri.audit(lowtri.Model(Translating(), inputs=1), (source, ids)).ok
        assert not lowtri.audit(lowtri.Model(Translating(across=True), inputs=1), (source, ids)).ok


def test_a_model_gets_tensors_in_memory_of_torch() -> None:
    """Whose alignment is always the same, so that a model repeats itself to the last bit."""
    starts = []

    def model(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        starts.extend((x.data_ptr(), bias.data_ptr()))
        return x.cumsum(1) + 0 * bias.sum()

    lowtri.audit(model, (torch.randn(2, 5, 3), torch.zeros(5, 5, dtype=torch.int64)), length=0)
    assert len(starts) > 50 and all(start % 64 == 0 for start in starts)
