"""nn.RecurrentLM: a recurrent state instead of attention, with the decoder's interface."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import lowtri
from lowtri.errors import CallError
from lowtri.nn.recurrent import RecurrentLM

# Logits are sums of 16 products of numbers below 1, after at most 9 steps whose states are below 1.
close = {"atol": 9 * 16 * torch.finfo(torch.float32).eps, "rtol": 0.0}


@pytest.fixture(params=["lstm", "gru", "rnn"])
def model(request: pytest.FixtureRequest) -> RecurrentLM:
    torch.manual_seed(0)
    return RecurrentLM(30, 16, cell=request.param).eval()


def some_ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 30, shape, generator=torch.Generator().manual_seed(1))


def test_steps_with_a_cache_equal_the_whole_forward(model: RecurrentLM) -> None:
    ids = some_ids(2, 9)
    cache = model.make_cache(2)
    parts = [model(ids[:, a:b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids), **close)
    assert cache.length == 9


def test_the_state_does_not_grow(model: RecurrentLM) -> None:
    cache = model.make_cache(1)
    model(some_ids(1, 3), cache=cache)
    before = cache.bytes
    model(some_ids(1, 50), cache=cache)
    assert cache.bytes == before > 0


def test_padding_does_not_change_the_state(model: RecurrentLM) -> None:
    ids = some_ids(2, 5)
    places = torch.tensor([[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]])
    padded = model(ids, positions=places)
    torch.testing.assert_close(padded[:1, 2:], model(ids[:1, 2:]), **close)
    torch.testing.assert_close(padded[1:], model(ids[1:]), **close)


def test_generation_continues_after_left_padding(model: RecurrentLM) -> None:
    ids, more = some_ids(2, 5), some_ids(2, 2)
    cache = model.make_cache(2)
    model(ids, positions=torch.tensor([[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]]), cache=cache)
    assert cache.next_positions(2).tolist() == [[3, 4], [5, 6]]
    got = model(more, cache=cache)
    torch.testing.assert_close(got[:1], model(torch.cat([ids[:1, 2:], more[:1]], 1))[:, 3:], **close)


def test_packed_documents_equal_the_documents_alone(model: RecurrentLM) -> None:
    ids = some_ids(1, 7)
    alone = torch.cat([model(ids[:, :4]), model(ids[:, 4:])], 1)
    packed = model(ids, mask="causal & documents(lengths=[4, 3])")
    restarted = model(ids, positions=np.array([0, 1, 2, 3, 0, 1, 2]))
    torch.testing.assert_close(packed, alone, **close)
    torch.testing.assert_close(restarted, alone, **close)


def test_generate_takes_a_recurrent_model(model: RecurrentLM) -> None:
    with_state = list(lowtri.generate(model, [3, 1, 4], max_new_tokens=6))
    without = list(
        lowtri.generate(lambda ids: model(torch.as_tensor(ids)).detach().numpy(), [3, 1, 4], max_new_tokens=6)
    )
    assert with_state == without
    together = list(lowtri.generate(model, [[3, 1, 4], [5, 6]], max_new_tokens=4))
    alone = list(lowtri.generate(model, [[5, 6]], max_new_tokens=4))
    assert [step[1] for step in together] == [step[0] for step in alone]


def test_rows_can_be_reordered(model: RecurrentLM) -> None:
    ids, more = some_ids(2, 5), some_ids(2, 1)
    cache = model.make_cache(2)
    model(ids, cache=cache)
    cache.reorder([1, 1])
    got = model(more, cache=cache)
    torch.testing.assert_close(got[:1], model(torch.cat([ids[1:], more[:1]], 1))[:, -1:], **close)


@pytest.mark.sweep
def test_the_audit_finds_no_leak(model: RecurrentLM) -> None:
    report = lowtri.audit(model, some_ids(2, 10))
    assert report.ok, report
    ran = {finding.probe for finding in report.findings if finding.status == "clean"}
    assert {"change", "gradient", "prefix", "batch", "padding", "cache"} <= ran


def test_the_audit_finds_the_leak_of_a_bidirectional_model() -> None:
    torch.manual_seed(0)
    twin = RecurrentLM(30, 16, num_hidden_layers=1)
    twin.cells = torch.nn.LSTM(16, 8, batch_first=True, bidirectional=True)
    report = lowtri.audit(twin, some_ids(2, 8), probes=["change"])
    assert (report.first.query, report.first.key, report.first.module) == (0, 1, "cells")


def test_it_trains_in_the_training_loop(model: RecurrentLM) -> None:
    torch.manual_seed(0)
    ids = some_ids(4, 12)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        logits = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: RecurrentLM(30, 16, cell="qrnn"), "cell is 'qrnn'; expected one of lstm, gru, rnn"),
        (lambda m: RecurrentLM(30, 0), "hidden_size is 0; it is a whole number, at least 1"),
        (lambda m: m(some_ids(5)), r"ids are \(5,\) torch.int64; expected \(B, N\) int64"),
        (lambda m: m(some_ids(2, 5), cache=m.make_cache(1)), r"ids have 2 rows, .* 1. Fix: make_cache\(2\)"),
        (lambda m: m(some_ids(2, 5), mask="causal & window(2)"), "cannot follow the mask"),
        (lambda m: m.make_cache(0), "at least 1"),
        (lambda m: m.make_cache(1, mask="full"), "make_cache: the mask is full"),
    ],
)
def test_invalid_arguments_are_refused(call: Any, words: str) -> None:
    with pytest.raises(CallError, match=words):
        call(RecurrentLM(30, 16))
