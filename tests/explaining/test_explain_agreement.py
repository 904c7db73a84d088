"""explain says first where a module's own output is not that of the steps, and shows both; right modules get no warning."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowtri
from lowtri.cli.main import main
from lowtri.explaining.example import ENCODINGS, untrained
from lowtri.nn import Decoder, DecoderConfig, MaskedSelfAttention, MultiHeadAttention

Maps = Callable[..., nn.Module]


class Module(nn.Module):
    """Three maps, and attention as the flags have it."""

    def __init__(
        self,
        size: int = 2,
        *,
        softmax_dim: int = -1,
        divide: bool = True,
        bias: bool = False,
        heads: int = 1,
        out: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.W_q, self.W_k, self.W_v = (nn.Linear(size, size, bias=bias) for _ in range(3))
        self.softmax_dim, self.divide, self.heads = softmax_dim, divide, heads
        self.W_o = nn.Linear(size, size) if out else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def attend(self, x: Tensor, fill: Callable[[Tensor], Tensor]) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2) for w in (self.W_q, self.W_k, self.W_v))
        scores = q @ k.mT  # (..., H, N, N)
        scores = scores / q.shape[-1] ** 0.5 if self.divide else scores
        weights = self.dropout(torch.softmax(fill(scores), dim=self.softmax_dim))
        return self.W_o((weights @ v).transpose(-3, -2).flatten(-2))


class TrueHides(Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, lambda scores: scores if mask is None else scores.masked_fill(mask, -1e9))


class TrueShows(Module):
    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> tuple[Tensor, None]:
        return self.attend(
            x, lambda scores: scores if attn_mask is None else scores.masked_fill(attn_mask == 0, -1e9)
        ), None


class Adds(Module):
    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.attend(x, lambda scores: scores if attention_mask is None else scores + attention_mask)


class OwnMask(Module):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
        return self.attend(x, lambda scores: scores.masked_fill(hidden, -1e9))


class ThreeInputs(Module):
    def forward(self, for_q: Tensor, for_k: Tensor, for_v: Tensor, mask: Tensor | None = None) -> Tensor:
        assert for_q.shape == for_k.shape == for_v.shape
        return self.attend(for_q, lambda scores: scores if mask is None else scores.masked_fill(mask, -1e9))


class LowtriMask(Module):
    def forward(self, x: Tensor, mask: lowtri.Mask | None = None) -> Tensor:
        if mask is None:
            return self.attend(x, lambda scores: scores)
        assert isinstance(mask, lowtri.Mask)
        visible = torch.from_numpy(np.array(mask.dense(x.shape[-2])))
        return self.attend(x, lambda scores: scores.masked_fill(~visible, -1e9))


KINDS: list[type[Module]] = [TrueHides, TrueShows, Adds, OwnMask, ThreeInputs, LowtriMask]
X = torch.tensor(ENCODINGS)


def made(kind: type[Module], size: int = 2, seed: int = 42, **options: Any) -> Module:
    torch.manual_seed(seed)
    return kind(size, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_another_formula_is_said_first_and_both_are_shown(kind: type[Module]) -> None:
    """Without the root of d, and with softmax over the queries: the figures of a class that a user wrote."""
    module = made(kind, softmax_dim=-2, divide=False)
    explanation = lowtri.explain(module, X, mask="causal")
    assert explanation["output"].value[0].round(4).tolist() == [0.6038, 0.7434]
    assert explanation["own output"].value[0].round(4).tolist() == [0.1710, 0.2106]
    says = f"{kind.__name__}'s own output differs from these steps by up to 0.69 ("
    assert explanation.warning.startswith(says)
    assert explanation.warning.endswith(
        "the steps are what its weights give in the formulas shown, not what it computes."
    )
    assert str(explanation).splitlines()[0] == explanation.warning
    content = json.loads(explanation.to_json())
    assert next(iter(content)) == "warning" and content["warning"] == explanation.warning
    shown = {step["name"]: step["value"] for step in content["steps"]}
    np.testing.assert_allclose(shown["own output"], explanation["own output"].value)
    page = explanation.to_html()
    assert page.index(says.replace("'", "&#x27;")) < page.index("mask <code>") and "<h2>own output" in page
    assert "own output differs from these steps" in explanation._repr_html_()
    assert "own output differs" in explanation.to_svg()


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (TrueHides, "called with a table, True = hidden"),
        (TrueShows, "called with a table, True = may see"),
        (Adds, "called with numbers that are added"),
        (OwnMask, "its forward takes no mask"),
        (ThreeInputs, "called with a table, True = hidden"),
        (LowtriMask, "called with a lowtri mask"),
    ],
)
@pytest.mark.parametrize("wrong", [{"divide": False}, {"softmax_dim": -2}])
def test_the_convention_of_a_mask_is_measured(kind: type[Module], how: str, wrong: dict[str, Any]) -> None:
    assert f"({how})" in lowtri.explain(made(kind, **wrong), X, mask="causal").warning


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"out": True}, {"dropout": 0.5}, {"heads": 2}])
def test_the_formula_itself_gets_no_warning(kind: type[Module], options: dict[str, Any]) -> None:
    module = made(kind, 4, **options)
    for x in (torch.randn(5, 4), torch.randn(2, 5, 4)):
        explanation = lowtri.explain(module, x, mask="causal", heads=options.get("heads", 1))
        assert explanation.warning == "" and "own output" not in [step.name for step in explanation.steps]
        assert f"Computed anew in float64; {kind.__name__}'s own output differs by " in explanation.note
    assert module.training and module.dropout.training


@pytest.mark.parametrize("heads", [1, 3])
def test_fewer_heads_in_the_module_than_are_shown_is_a_difference(heads: int) -> None:
    module = made(TrueHides, 6, heads=heads)
    x = torch.randn(4, 6)
    assert lowtri.explain(module, x, mask="causal", heads=heads, head=heads - 1).warning == ""
    explanation = lowtri.explain(module, x, mask="causal", heads=2)
    assert explanation.warning.startswith("TrueHides's own output differs from these steps by up to ")
    assert explanation["own output"].value.shape == (2, 4, 3)
    one = lowtri.explain(module, x, mask="causal", heads=2, head=1)
    np.testing.assert_array_equal(one["own output"].value, explanation["own output"].value[1])


def test_a_missing_mask_is_a_difference() -> None:
    class NoMask(Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.attend(x, lambda scores: scores)

    module = made(NoMask)
    assert "own output differs" in lowtri.explain(module, X, mask="causal").warning
    assert lowtri.explain(module, X, mask="full").warning == ""


class NoForward(Module):
    pass


class Broken(Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        raise ValueError("no way\x1b[2J\n\u202eat all")


class NeedsMore(Module):
    def forward(self, x: Tensor, *, size: int) -> Tensor:
        return x * size


class Narrow(Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.W_q(x)[..., :1]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (NoForward, "NoForward's own output is not compared: its forward raised NotImplementedError"),
        (Broken, r"Broken's own output is not compared: its forward raised ValueError: no way\x1b[2J \u202eat all."),
        (
            NeedsMore,
            "NeedsMore's own output is not compared: its forward raised TypeError: NeedsMore.forward() missing",
        ),
        (Narrow, "Narrow's own output is not compared: none of its outputs is 3 x 2 for each head."),
    ],
)
def test_a_module_that_cannot_be_compared_says_so(kind: type[Module], words: str) -> None:
    explanation = lowtri.explain(made(kind), X, mask="causal")
    assert explanation.warning.startswith(words) and str(explanation).startswith(explanation.warning)
    assert explanation["output"].value[0].round(4).tolist() == [0.6038, 0.7434]


def test_minus_1e9_in_float16_is_said() -> None:
    explanation = lowtri.explain(made(TrueHides).half(), X, mask="causal")
    assert "its forward raised RuntimeError: value cannot be converted to type" in explanation.warning


def test_a_query_that_sees_no_key_is_said() -> None:
    """With -1e9 it gets the mean of all values; in lowtri 0."""
    explanation = lowtri.explain(made(TrueHides), X, mask="causal - first(1)")
    assert explanation.warning == (
        "TrueHides's own output differs from these steps: where a query sees no key (0), the output is 0 here and something "
        "else in TrueHides."
    )
    np.testing.assert_allclose(explanation["own output"].value[0], explanation["v"].value.mean(0), atol=1e-6)
    assert lowtri.explain(MaskedSelfAttention(2), X, mask="causal - first(1)").warning == ""


class Sharper(MultiHeadAttention):
    """Attention with sharper queries than the steps show."""

    def forward(self, x: Tensor, *others: Any, **options: Any) -> Any:
        def attend(q: Tensor, *arrays: Any, **more: Any) -> Any:
            return lowtri.attention(3 * q, *arrays, **more)

        return super().forward(x, *others, **options | {"attend": attend})


def test_modules_of_lowtri_are_compared_too() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 16)
    assert lowtri.explain(MultiHeadAttention(16, 4, num_kv_heads=2), x).warning == ""
    explanation = lowtri.explain(Sharper(16, 4), x, head=2)
    assert explanation.warning.startswith("Sharper's own output differs from these steps by up to ")
    assert explanation["own output"].value.shape == (5, 4)
    decoder = Decoder(DecoderConfig(vocab_size=9, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)).eval()
    assert lowtri.explain(decoder, [1, 2, 3], layer=1).warning == ""
    decoder.model.layers[1].self_attn.__class__ = Sharper
    assert lowtri.explain(decoder, [1, 2, 3], layer=1).warning.startswith("Decoder's own output differs")


def test_projections_that_are_no_linear_maps_are_refused() -> None:
    class Matrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W_q = self.W_k = self.W_v = nn.Parameter(torch.eye(2))

    with pytest.raises(
        lowtri.CallError, match=r"W_q of Matrices is Parameter, expected a linear map.*\nFix: explain\(\(q, k, v\)"
    ):
        lowtri.explain(Matrices(), X, mask="causal")
    fused = MultiHeadAttention(16, 4)
    fused.fuse_projections()
    with pytest.raises(lowtri.CallError, match=r"joined projections.*\nFix: explain before fuse_projections"):
        lowtri.explain(fused, torch.randn(3, 16))


def test_random_weights_are_shown_in_any_number_of_heads(capsys: pytest.CaptureFixture[str]) -> None:
    """The module only holds them, and has one head."""
    explanation = untrained("a b c", heads=3)
    assert explanation.warning == "" and explanation.steps[-1].name == "joined"
    assert main(["explain", "a b c", "--heads", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warning"] == ""


def test_the_module_is_left_as_it_was() -> None:
    class Counts(TrueHides):
        def __init__(self, size: int) -> None:
            super().__init__(size, dropout=0.5)
            self.norm = nn.BatchNorm1d(size)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            assert not self.training and not torch.is_grad_enabled()
            if mask is not None and mask.dtype == torch.bool:
                raise KeyError("not this way")
            return super().forward(self.norm(x), mask)

    module = made(Counts)
    module.dropout.eval()
    before = {name: x.clone() for name, x in module.state_dict().items()}
    torch.manual_seed(0)
    draw = torch.rand(3)
    torch.manual_seed(0)
    lowtri.explain(module, X, mask="causal")
    assert torch.equal(torch.rand(3), draw)
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
    assert module.training and not module.dropout.training and not module.norm._forward_pre_hooks
    assert all(not part._forward_pre_hooks and not part._forward_hooks for part in module.modules())


@pytest.mark.sweep
@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(KINDS[:5]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    tokens=st.integers(1, 70),
    size=st.sampled_from([1, 2, 16, 64]),
    scale=st.sampled_from([0.01, 1.0, 6.0]),
)
def test_rounding_is_never_a_difference(
    seed: int, kind: type[Module], dtype: torch.dtype, tokens: int, size: int, scale: float
) -> None:
    module = made(kind, size, seed=seed).to(dtype)
    x = (torch.randn(tokens, size) * scale).to(dtype)
    explanation = lowtri.explain(module, x, mask="causal")
    assert explanation.warning == "", explanation.warning


@pytest.mark.sweep
@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(KINDS),
    wrong=st.sampled_from([{"divide": False}, {"softmax_dim": -2}]),
    tokens=st.integers(3, 40),
    size=st.sampled_from([2, 16]),
)
def test_another_formula_is_never_taken_for_rounding(
    seed: int, kind: type[Module], wrong: dict[str, Any], tokens: int, size: int
) -> None:
    module = made(kind, size, seed=seed, **wrong)
    assert "own output differs" in lowtri.explain(module, torch.randn(tokens, size), mask="causal").warning
