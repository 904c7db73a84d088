"""What shows only in training, only past the example's end, or only as NaN is found as surely as what shows at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from audited_models import vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowtri
from lowtri.errors import CallError, LeakError

N, D = 7, 4
NAN = float("nan")


class Model(nn.Module):
    """A right model with `leak(x)` on top, where `when(self, x)` says so."""

    def __init__(
        self, leak: Callable[[Tensor], Tensor] | None = None, when: Callable[[Any, Tensor], bool] = lambda m, x: True
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.leak, self.when = nn.Linear(D, D), leak, when

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).cumsum(1)
        return y + self.leak(x) if self.leak is not None and self.when(self, x) else y


def where_nan(condition: Tensor) -> Tensor:
    """NaN where true, else 0."""
    return torch.where(condition, NAN, 0.0)


BASE = vectors(2, N, D)


def new(x: Tensor) -> Tensor:
    """Which numbers are none of the example's."""
    return ~torch.isin(x, BASE.to(x))


LEAKS: dict[str, Callable[[Tensor], Tensor]] = {
    "the next position": lambda x: x.roll(-1, 1),
    "the mean": lambda x: x.mean(1, keepdim=True),
    "a choice": lambda x: (x > x.mean(1, keepdim=True)).to(x),
    "the length": lambda x: torch.full_like(x, x.shape[1]),
    "the neighbour": lambda x: x.roll(1, 0),
    "NaN by the last": lambda x: where_nan(new(x[:, -1:])),
    "NaN by the length": lambda x: where_nan(torch.full_like(x, x.shape[1]) < N - 1),
    "NaN by the neighbour": lambda x: where_nan(new(x.roll(1, 0)[:, :1])),
}
SIZES = [(name, size) for name in LEAKS for size in ([1.0] if "NaN" in name else [1.0, 1e-4, 1e-7, 1e-9])]


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_training_hides_no_leak(name: str, size: float) -> None:
    """Whatever the probes find of a leak in eval mode, they find of the same leak in training mode."""
    probes = ["change", "gradient", "prefix", "batch"]
    leak = LEAKS[name]

    def small(x: Tensor) -> Tensor:
        return leak(x) if size == 1 else size * leak(x)

    plain = lowtri.audit(Model(small), BASE, probes=probes)
    report = lowtri.audit(Model(small, lambda m, x: m.training), BASE, probes=probes, conditions="eval,training")
    if (
        name == "the length" and size < 1e-6
    ):  # runs of different shapes differ by a rounding, and nothing tells these apart
        assert plain.verdict == report.verdict == "no leak found"
        return
    assert plain.verdict == report.verdict == "leak", (plain, report)
    assert (report.first.query, report.first.key) == (plain.first.query, plain.first.key)
    assert report.first.condition == "training"
    assert report.message.startswith("leak against causal: in training mode, ")


def test_training_mode_behind_a_function_and_with_dropout() -> None:
    model = Model(lambda x: 1e-2 * x.roll(-1, 1), lambda m, x: m.training).eval()
    assert lowtri.audit(lambda x: model(x), vectors(2, N, D), conditions="training").first is not None
    assert not model.training and not model.linear.training
    dropping = nn.Sequential(Model(), nn.Dropout(0.5))
    report = lowtri.audit(dropping, vectors(2, N, D))
    assert report.ok, report
    ran = [f.probe for f in report.findings if f.condition == "training" and f.status != "skipped"]
    assert ran == ["change", "gradient", "batch"]
    leaking = nn.Sequential(Model(lambda x: 1e-7 * x.roll(-1, 1), lambda m, x: m.training), nn.Dropout(0.5))
    assert lowtri.audit(leaking, vectors(2, N, D)).first is not None


def test_a_mode_that_cannot_be_judged_is_left_out_of_the_verdict() -> None:
    class Noisy(Model):
        def forward(self, x: Tensor) -> Tensor:
            noise = torch.randn(x.shape, generator=generator) if self.training else 0.0
            return super().forward(x) + noise

    # Which is no attribute of the model, and which no seed of ours reaches.
    generator = torch.Generator().manual_seed(0)
    model = Noisy()
    report = lowtri.audit(model, vectors(2, N, D))
    assert report.ok and " positions in eval mode, " in report.message
    assert "the same input gives different outputs" in report.finding("training").message
    assert report.finding("training").status == "skipped"


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-7])
def test_other_code_paths_are_audited_as_closely(size: float) -> None:
    class WithKeyword(Model):
        def forward(self, x: Tensor, need_weights: bool = False) -> Tensor:
            return super().forward(x) + (size * x.roll(-1, 1) if need_weights else 0.0)

    report = lowtri.audit(WithKeyword(), vectors(2, N, D))
    assert report.first is not None and (report.first.query, report.first.key) == (0, 1)
    assert report.message.startswith("leak against causal: with need_weights=True, position 0 sees position 1: ")


def test_the_difference_of_a_code_path_is_measured_before_it_is_set() -> None:
    class Attention(Model):
        def __init__(self) -> None:
            super().__init__()
            self.config = type("Config", (), {"_attn_implementation": "sdpa"})()

        def set_attn_implementation(self, name: str) -> None:
            self.config._attn_implementation = name

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if self.config._attn_implementation == "eager" else 1)

    finding = lowtri.audit(Attention(), vectors(2, N, D), conditions="code_paths").finding("code_paths")
    assert finding.status == "warning" and "other outputs with attn_implementation=eager, by " in finding.message


# length


def late(start: int, size: float, back: int) -> Callable[[np.ndarray], np.ndarray]:
    """Right up to a position; from there on each position sees one that is `back` after it."""
    first: dict[int, np.ndarray] = {}  # of each length

    def model(x: np.ndarray) -> np.ndarray:
        y, ahead = np.cumsum(x, axis=0), x[start + back :]
        if np.isnan(size):  # NaN once the position ahead is another one than at the first call
            ahead = np.where(ahead == first.setdefault(len(x), ahead), 0.0, NAN)
        y[start : len(x) - back] += ahead if np.isnan(size) else size * ahead
        return y

    return model


STARTS = st.integers(24, 254), st.sampled_from([1.0, 1e-3, 1e-9, NAN]), st.integers(1, 60)


@settings(deadline=None, max_examples=8)
@given(*STARTS)
def test_a_leak_that_begins_at_any_position(start: int, size: float, back: int) -> None:
    check_late(start, size, back)


@pytest.mark.sweep
@settings(deadline=None, max_examples=500)
@given(*STARTS)
def test_a_leak_that_begins_at_any_position_swept(start: int, size: float, back: int) -> None:
    check_late(start, size, back)


def check_late(start: int, size: float, back: int) -> None:
    back = min(back, 255 - start)
    x = np.random.default_rng(0).standard_normal((24, 2))
    probes, conditions = ["change", "prefix"], "eval,longer"
    right = lowtri.audit(late(start, 0.0, back), x, probes=probes, conditions=conditions)
    assert right.ok and " 1 x 24 and 1 x 256 positions" in right.message
    report = lowtri.audit(late(start, size, back), x, probes=probes, conditions=conditions)
    assert report.first is not None, report
    assert report.first.condition == "longer" and report.first.query >= start and report.first.key >= report.first.query
    assert report.message.startswith("leak against causal: in an example of 256 positions, position ")


@pytest.mark.parametrize("start", [24, 100, 254])
@pytest.mark.parametrize("size", [1.0, 1e-7])
def test_a_late_leak_of_training_alone(start: int, size: float) -> None:
    def leak(x: Tensor) -> Tensor:
        return size * torch.nn.functional.pad(x[:, start + 1 :], (0, 0, start, 1))

    late_in_training = Model(leak, lambda m, x: m.training and x.shape[1] > start + 1)
    report = lowtri.audit(late_in_training, vectors(2, 24, D))
    assert report.message.startswith("leak against causal: in training mode, in an example of 256 positions, position ")


def test_how_long_the_longer_example_is() -> None:
    def tried(model: Any = lambda x: np.cumsum(x, axis=0), n: int = 24, **arguments: Any) -> Any:
        x = np.random.default_rng(0).standard_normal((n, 2))
        return lowtri.audit(model, x, probes="change", conditions="eval,longer", **arguments).finding("longer")

    assert tried().under.length == 256
    assert tried(n=200).under.length == 400
    assert tried(length=40).under.length == 40
    assert (tried(length=0).status, tried(length=24).status) == ("skipped", "skipped")
    assert tried(length=2).message == "length=2 is no longer than the example's 24 positions"
    short = lowtri.audit(
        lambda x: np.cumsum(x, axis=0), np.ones((24, 2)), probes="change", length=0, conditions="eval,longer"
    )
    assert short.ok and short.message.endswith("probes change; not tried: longer.")

    def at_most(most: int, multiple: int = 1) -> Callable[[np.ndarray], np.ndarray]:
        def model(x: np.ndarray) -> np.ndarray:
            if len(x) > most or len(x) % multiple:
                raise IndexError("position out of range")
            return np.cumsum(x, axis=0)

        return model

    assert tried(at_most(100)).under.length == 100  # a table of positions
    assert tried(at_most(999, 12)).under.length == 240  # chunks
    none = tried(at_most(24))
    assert none.status == "skipped" and none.message.endswith(
        "takes no longer example: IndexError: position out of range"
    )
    short = tried(at_most(100), length=120)
    assert short.status == "undecided" and "length= was requested and did not run" in short.message
    assert "no more than 100 positions" in short.message
    with pytest.raises(CallError, match="length=-1, expected a whole number, 0 for no longer example, or None"):
        tried(length=-1)


def test_the_config_bounds_the_longer_example_and_an_accelerator_needs_one() -> None:
    model = Model()
    model.config = type("Config", (), {"max_position_embeddings": 50})()
    assert lowtri.audit(model, vectors(2, N, D)).finding("longer").under.length == 50


def test_settings_go_on_with_a_longer_example() -> None:
    """A table that says what the mask says, constants and counts are continued; anything else is not guessed."""
    calls: list[dict[str, Any]] = []

    def model(x: np.ndarray, **settings: Any) -> np.ndarray:
        calls.append(settings)
        return np.cumsum(x, axis=0)

    x = np.random.default_rng(0).standard_normal((N, 2))
    hidden = np.triu(np.ones((N, N), bool), 1)
    given_ = {
        "x": x,
        "hidden": hidden,
        "bias": np.where(hidden, -np.inf, 0.0),
        "ones": np.ones(N, int),
        "count": np.arange(N),
    }
    assert lowtri.audit(lowtri.Model(model, inputs="x"), given_, conditions="longer", length=20).ok
    last = calls[-1] if len(calls[-1]["ones"]) == 20 else next(s for s in calls if len(s["ones"]) == 20)
    wide = np.triu(np.ones((20, 20), bool), 1)
    np.testing.assert_array_equal(last["hidden"], wide)
    np.testing.assert_array_equal(last["bias"], np.where(wide, -np.inf, 0.0))
    np.testing.assert_array_equal(last["ones"], np.ones(20, int))
    np.testing.assert_array_equal(last["count"], np.arange(20))
    documents = {"x": x, "document": np.array([0, 0, 0, 1, 1, 1, 1])}
    finding = lowtri.audit(lowtri.Model(model, inputs="x"), documents).finding("longer")
    assert finding.message == "other inputs follow the positions, and how they go on cannot be inferred"
    table = lowtri.audit(lambda x: np.cumsum(x, axis=0), x, mask=~hidden)
    assert table.ok and table.finding("longer").status == "skipped"


# words


def by_call(answers: Callable[[Tensor, bool], Tensor]) -> Any:
    """`answers(x, changed)`: whether x's last position is another one than at the first call of that shape."""
    first: dict[tuple[int, ...], Tensor] = {}
    return lambda x: answers(x, not torch.equal(first.setdefault(tuple(x.shape), x[..., -1, :].clone()), x[..., -1, :]))


NAN_MODELS: dict[str, Any] = {
    "change": by_call(lambda x, changed: x.cumsum(1) + where_nan(torch.full_like(x, changed) > 0)),
    "prefix": lambda x: x.cumsum(1) + (NAN if x.shape[1] < N else 0.0),
    "batch": lambda x: x.cumsum(1) + (NAN if len(x) < 2 else 0.0),
    "padding": lambda x, padding_mask=None: x.cumsum(1) + (NAN if x.shape[1] > N + 4 else 0.0),
    "cache": lambda x: x.cumsum(1),
}


@pytest.mark.parametrize("probe", ["change", "prefix", "batch", "padding", "cache"])
def test_nan_is_reported_in_words(probe: str) -> None:
    more: dict[str, Any] = {"pads": "padding_mask"} if probe == "padding" else {}
    if probe == "cache":
        more = {"step": lambda state, x: (x * NAN, x)}
    report = lowtri.audit(lowtri.Model(NAN_MODELS[probe], **more), vectors(2, N, D), probes=[probe])
    assert report.verdict == "leak", report
    assert "infinite or NaN" in str(report) and not re.search(r"\binf\b", str(report)), str(report)


def test_a_model_that_is_nan_now_and_then_is_not_judged() -> None:
    calls: list[int] = []

    def sometimes(x: np.ndarray) -> np.ndarray:
        calls.append(1)
        return np.cumsum(x, axis=0) + (NAN if len(calls) % 3 == 0 else 0.0)

    report = lowtri.audit(sometimes, np.ones((6, 3)))
    assert report.verdict == "could not decide"
    assert "from run to run (one side finite and the other infinite or NaN, seeds fixed)" in report.message


@pytest.mark.parametrize("mask", ["causal", "full", "causal & window(2)", lowtri.band(1, 1), np.ones((N, N), bool)])
def test_every_verdict_names_the_mask(mask: Any) -> None:
    said = "a table of (7, 7)" if isinstance(mask, np.ndarray) else str(mask) if isinstance(mask, str) else repr(mask)
    x = np.random.default_rng(0).standard_normal((N, 2))
    models = {
        "no leak found": lambda x: x * 2,
        "could not decide": lambda x: x * NAN,
        "leak": lambda x: x * 2 + len(x),
    }
    for verdict, model in models.items():
        report = lowtri.audit(model, x, mask=mask)
        if verdict != "leak" or said not in ("full", "a table of (7, 7)"):  # who sees all may see the length
            assert report.message.startswith(f"{verdict} against {said}: ")
            assert report.message in str(report).splitlines()[:2]
    long = lowtri.audit(lambda x: x, x, mask=" | ".join(["causal & window(2)"] * 50), probes=["change"])
    assert len(long.message) < 300 and "causal & window(2) |" in long.message


def test_a_container_that_is_never_called_is_not_named() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(D, D), nn.Linear(D, D)

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            parts = list(self.inner.children())
            return parts[1](parts[0](x).flip(1))

    torch.manual_seed(0)
    pair = nn.Linear(D, D), nn.Linear(D, D)
    for inner in (Holder(), nn.ModuleList(pair), nn.ModuleDict(dict(zip("ab", pair, strict=True)))):
        first = lowtri.audit(Outer(inner), vectors(2, N, D)).first
        assert first is not None and first.module == "Outer"
        first = lowtri.audit(nn.Sequential(Outer(inner)), vectors(2, N, D)).first
        assert first is not None and first.module == "0"


def test_a_faint_leak_raises_in_an_assertion_too() -> None:
    model = Model(lambda x: 1e-4 * x.roll(-1, 1), lambda m, x: m.training)
    with pytest.raises(LeakError, match=r"Model sees what causal hides: in training mode, position 0 sees position 1"):
        lowtri.assert_causal(model, vectors(2, N, D))
