"""A verdict that can be trusted: noise, rounding, randomness and NaN are answered honestly, and nothing is left changed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from audited_models import vectors
from torch import nn

import lowtri
from lowtri.errors import CallError, LeakError, UndecidedError


class Fft(nn.Module):
    """A zero-padded (causal) convolution by FFT, with a leak of a chosen size on top."""

    def __init__(self, leak: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.leak = nn.Linear(4, 4), leak

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        kernel = torch.exp(-torch.arange(n, device=x.device, dtype=x.dtype) / 3.0)
        spectrum = torch.fft.rfft(self.linear(x), n=2 * n, dim=1) * torch.fft.rfft(kernel, n=2 * n)[:, None]
        return torch.fft.irfft(spectrum, n=2 * n, dim=1)[:, :n] + self.leak * x.sum(dim=1, keepdim=True)


def test_rounding_noise_is_no_leak() -> None:
    model, x = Fft(), vectors(2, 12, 4)
    changed = x.clone()
    changed[:, 6:] += 1
    assert not torch.equal(model(x)[:, :6], model(changed)[:, :6])  # the noise is there
    report = lowtri.audit(model, x)
    assert report.ok, report
    assert any("float64" in finding.message for finding in report.findings) or any("float64" in n for n in report.notes)


@pytest.mark.parametrize("size", [1e-6, 1e-8])
def test_a_leak_below_the_noise_stands_out_in_float64(size: float) -> None:
    report = lowtri.audit(Fft(leak=size), vectors(2, 12, 4))
    assert report.first is not None and (report.first.query, report.first.key) == (0, 1)
    assert any("confirmed in float64" in note for note in report.notes)


def test_models_that_cast_to_float32_inside_are_copied_to_float64_throughout() -> None:
    class Casting(Fft):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.to(torch.float32).float()).to(torch.float32)

    assert lowtri.audit(Casting(), vectors(2, 12, 4)).ok
    assert lowtri.audit(Casting(leak=1e-7), vectors(2, 12, 4)).first is not None


def test_doubt_without_a_float64_copy_is_no_verdict() -> None:
    linear = Fft()

    def only_float32(x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32, "float32 only"
        return linear(x)

    report = lowtri.audit(only_float32, vectors(2, 12, 4))
    assert report.verdict == "could not decide" and report.exit_code == 3
    assert "near the noise, and no float64 copy could settle it (float32 only)" in report.message


def test_a_model_that_does_not_repeat_itself_is_not_judged() -> None:
    states = [np.random.default_rng(0)]  # in a list, which no seed of the audit reaches

    def noisy(x: np.ndarray) -> np.ndarray:
        return np.cumsum(x, axis=0) + 0.1 * states[0].standard_normal(x.shape)

    report = lowtri.audit(noisy, np.ones((6, 3)))
    assert report.verdict == "could not decide" and not report.ok and not report.decided
    assert "the same input gives different outputs from run to run" in report.message
    with pytest.raises(UndecidedError, match="make the model repeat itself"):
        report.raise_for_leak()


def test_nan_is_not_judged() -> None:
    def broken(x: np.ndarray) -> np.ndarray:
        out = np.cumsum(x, axis=0)
        out[3] = np.nan
        return out

    report = lowtri.audit(broken, np.ones((6, 3)))
    assert report.verdict == "could not decide"
    words = "the output is NaN at 1 of 6 positions already for the example itself (first: row 0, position 3)"
    assert words in report.message


def test_nan_at_a_pad_does_not_matter() -> None:
    def model(x: np.ndarray) -> np.ndarray:
        out = np.cumsum(x, axis=0)
        out[0] = np.nan  # softmax over nothing
        out[1:] -= x[0]
        return out

    mask = lowtri.causal() & lowtri.keys([False, True, True, True, True, True])
    assert lowtri.audit(model, np.random.default_rng(0).standard_normal((6, 3)), mask=mask).ok


def test_minus_infinity_in_logits_is_a_number() -> None:
    def model(x: np.ndarray) -> np.ndarray:
        return np.concatenate([np.cumsum(x, axis=0), np.full((len(x), 1), -np.inf)], axis=1)

    assert lowtri.audit(model, np.random.default_rng(0).standard_normal((6, 3))).ok


def test_random_models_are_seeded_alike() -> None:
    model = nn.Sequential(nn.GRU(4, 4, batch_first=True))

    def dropping(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(model[0](x)[0], 0.5, training=True) + random.random() + np.random.rand()  # noqa: NPY002

    report = lowtri.audit(dropping, vectors(2, 8, 4))
    assert report.ok, report
    assert any("every call started from the same seed" in note for note in report.notes)
    wrong = lowtri.audit(lambda x: dropping(x).flip(1), vectors(2, 8, 4))
    assert wrong.first is not None and (wrong.first.query, wrong.first.key) == (0, 1)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(x.mT).mT).cumsum(1)


def test_the_model_is_left_as_it_was() -> None:
    model = Dropping().train()
    model.drop.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    expected = (torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    lowtri.audit(model, vectors(2, 8, 4))
    assert model.training and model.norm.training and not model.drop.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(torch.random.get_rng_state(), expected[0])
    assert random.getstate() == expected[1]
    assert np.random.get_state()[1].tolist() == expected[2]  # noqa: NPY002
    assert not any(part._forward_hooks for part in model.modules())


def test_train_mode_on_request() -> None:
    model = Dropping()
    assert lowtri.audit(model, vectors(2, 8, 4), probes=["change"]).ok
    report = lowtri.audit(model, vectors(2, 8, 4), probes=["change"], conditions="training")
    assert report.first is not None and report.first.module == "norm"


def test_fresh_weights_hide_what_redrawn_ones_show() -> None:
    class Faint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.cumsum(1) + x.mean(1, keepdim=True) @ self.gate

    model = Faint()
    assert lowtri.audit(model, vectors(2, 6, 4)).ok
    assert lowtri.audit(model, vectors(2, 6, 4), redraw=True).first is not None
    assert not model.gate.any()  # the copy's were redrawn
    with pytest.raises(CallError, match="redraw= needs a torch module, got function"):
        lowtri.audit(lambda x: x, vectors(2, 6, 4), redraw=True)


def test_assert_causal() -> None:
    lowtri.assert_causal(nn.GRU(4, 4, batch_first=True), vectors(2, 6, 4))
    with pytest.raises(LeakError) as caught:
        lowtri.assert_causal(nn.GRU(4, 4, batch_first=True, bidirectional=True), vectors(2, 6, 4))
    first = str(caught.value).splitlines()[0]
    assert first.startswith(
        "GRU sees what causal hides: position 0 sees position 1: changing input 1 moves output 0 by"
    )
    assert "✗" in str(caught.value)
    with pytest.raises(AssertionError):
        lowtri.assert_causal(lambda x: x.flip(0), vectors(6, 4))


def test_answers_without_positions_are_refused() -> None:
    with pytest.raises(CallError, match=r"the model's answer has shape \(3,\); no axis with one row for each of the 5"):
        lowtri.audit(lambda x: x.sum(0), np.ones((5, 3)))
    with pytest.raises(CallError, match="the 2 rows of the batch were not found"):
        lowtri.audit(lambda x: x.sum(0), np.ones((2, 5, 3)))


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
def test_a_hidden_change_that_makes_an_output_infinite_or_nan_is_a_leak(value: float) -> None:
    """The last token decides whether one number of the first output is finite; nothing else leaks."""
    table = np.random.default_rng(0).standard_normal((20, 4))

    def model(ids: np.ndarray) -> np.ndarray:
        out = np.cumsum(table[ids], axis=1)
        out[ids[:, -1] % 2 == 0, 0, 3] = value
        return out

    odd = np.random.default_rng(1).integers(0, 19, (2, 8))
    odd[:, -1] = 7
    report = lowtri.audit(lowtri.Model(model, vocab_size=20), odd)
    assert report.message.startswith(
        "leak against causal: position 0 sees position 7: "
        "changing input 7 turns output 0 from finite to infinite or NaN, or back (noise 0)."
    )
    assert {(leak.query, leak.key) for leak in report.leaks if leak.probe == "change"} == {(0, 7)}
    assert "Infinity" not in report.to_json()
    if not np.isnan(value):  # an infinite number of the example itself is a number: it turns finite
        assert lowtri.audit(lowtri.Model(model, vocab_size=20), odd + 1).first is not None


def test_infinite_outputs_are_bisected_and_reported_by_length_and_neighbour() -> None:
    table = np.random.default_rng(0).standard_normal((20, 4))

    def late(ids: np.ndarray) -> np.ndarray:
        out = np.cumsum(table[ids], axis=1)
        out[ids[:, 183] % 2 == 0, :150, 3] = -np.inf
        return out

    ids = np.random.default_rng(1).integers(0, 20, (2, 200))
    report = lowtri.audit(lowtri.Model(late, vocab_size=20), ids, probes=["change"])
    assert report.first is not None and report.first.key == 183

    def by_length(ids: np.ndarray) -> np.ndarray:
        out = np.cumsum(table[ids], axis=1)
        out[:, 0, 3] = -np.inf if ids.shape[1] < 8 else 0.0
        return out

    report = lowtri.audit(lowtri.Model(by_length, vocab_size=20), ids[:, :8], probes=["prefix"])
    assert "position 0 sees the length: output 0 turns from finite to infinite or NaN, or back, when" in report.message

    def by_neighbour(ids: np.ndarray) -> np.ndarray:
        out = np.cumsum(table[ids], axis=1)
        out[:, 3, 2] = -np.inf if (ids[:, 0] % 2 == 0).any() else 0.0
        return out

    odd = np.full((2, 8), 7)
    report = lowtri.audit(lowtri.Model(by_neighbour, vocab_size=20), odd, probes=["batch"])
    assert report.first is not None and report.first.probe == "batch" and report.first.size == np.inf


def test_extreme_vectors_that_overflow_accuse_nobody() -> None:
    """What half precision loses by overflow at a hundred times the usual size is the poison probe's to tell."""
    weights = np.tril(np.ones((6, 6)))

    def model(x: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            squared = np.where(np.abs(x) > 30, np.inf, x)
            return np.stack([(weights[i][:, None] * squared).sum(0) for i in range(len(x))])

    report = lowtri.audit(model, np.random.default_rng(0).standard_normal((6, 3)), probes=["change"])
    assert report.ok and report.finding("change").measured["poisoned"] > 0
