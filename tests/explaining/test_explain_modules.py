"""explain reads attention under the names that people use, tokens as a text, and the four languages; a step is an array."""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtri
from lowtri.cli.main import main
from lowtri.explaining.example import untrained, worked
from lowtri.explaining.projections import JOINED, NAMES
from lowtri.sentences import LANGUAGES, sentence, texts


class Named(nn.Module):
    """Causal attention with heads, whose maps have any names."""

    def __init__(self, names: tuple[str, ...], joined: str | None = None, d: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.names, self.joined, self.num_heads = names, joined, heads
        if joined is None:
            for name in names:
                setattr(self, name, nn.Linear(d, d))
        else:
            setattr(self, joined, nn.Linear(d, 3 * d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.joined is None:
            q, k, v = (getattr(self, name)(x) for name in self.names)
        else:
            q, k, v = getattr(self, self.joined)(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3) for t in (q, k, v))
        output = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return output.transpose(-2, -3).flatten(-2)


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
def test_maps_of_any_name(names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    module, x = Named(names), torch.randn(5, 8)
    steps = lowtri.explain(module, x)
    assert steps.mask == "causal", "found out from the module's outputs"
    assert steps.warning == "" and "own output differs by" in steps.note
    assert np.allclose(steps["joined"], module(x).detach(), atol=1e-6) and steps["weights"].shape == (2, 5, 5)
    assert np.array_equal(steps["W_q^T"].shape, (2, 8, 4)), "as many heads as the module says"
    assert steps["q"].formula == "encoding W_q^T + b_q"
    assert np.allclose(steps["q"].value, steps["encoding"].value @ steps["W_q^T"].value + steps["b_q"].value)


@pytest.mark.parametrize("joined", JOINED)
def test_one_map_to_all_three(joined: str) -> None:
    torch.manual_seed(0)
    module, x = Named((), joined), torch.randn(2, 5, 8)
    steps = lowtri.explain(module, x, batch=1)
    assert steps.mask == "causal" and steps.warning == ""
    assert np.allclose(steps["joined"], module(x)[1].detach(), atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"batch_first": True}, {"kdim": 8, "vdim": 8}])
def test_torch_s_multihead_attention(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(8, 2, **options), torch.randn(5, 8)
    steps = lowtri.explain(module, x, mask="causal")
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    with torch.no_grad():
        _, weights = module(x, x, x, attn_mask=hidden, average_attn_weights=False)
    assert np.allclose(steps["weights"], weights, atol=1e-6)
    assert steps.warning == "" and "MultiheadAttention's own output differs by" in steps.note
    pair = torch.stack([x, 2 * x], 0 if options.get("batch_first") else 1)
    assert np.allclose(lowtri.explain(module, pair, mask="causal", batch=0)["weights"], weights, atol=1e-6)


def test_a_model_of_one_s_own() -> None:
    """Its attentions are found by their maps, and the mask by what the whole model lets through."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(8), Named(("query", "key", "value"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.attention(self.norm(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks, self.last = nn.Embedding(11, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 11)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.last(self.blocks(self.embed(ids)))

    torch.manual_seed(0)
    model, ids = Model(), torch.tensor([[3, 1, 4, 1, 5]])
    steps = lowtri.explain(model, ids, layer=1)
    with torch.no_grad():
        read = model.blocks[1].norm(model.blocks[0](model.embed(ids)))
        expected = model.blocks[1].attention(read)[0]
    assert steps.mask == "causal" and np.allclose(steps["joined"], expected, atol=1e-6)
    assert "attention of layer 1 reads" in steps["encoding"].sentence
    with pytest.raises(lowtri.CallError, match=r"there is no layer 2 among 2\. Fix: 0 to 1"):
        lowtri.explain(model, ids, layer=2)
    with pytest.raises(lowtri.CallError, match="inputs are missing"):
        lowtri.explain(model)


def test_grouped_heads_of_a_strange_module_are_refused() -> None:
    module = nn.Module()
    module.q_proj, module.k_proj, module.v_proj = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
    with pytest.raises(
        lowtri.CallError, match=r"maps to queries of 8 and keys of 4 numbers.\nFix: explain\(\(q, k, v\)"
    ):
        lowtri.explain(module, torch.randn(3, 8), mask="causal")


def test_tokens_as_a_text() -> None:
    scores = np.zeros((3, 3))
    assert lowtri.explain(scores=scores, mask="causal", tokens="Write a poem").tokens == ("Write", "a", "poem")
    assert lowtri.explain(scores=scores, mask="causal", tokens="我寫詩").tokens == ("我", "寫", "詩")
    with pytest.raises(
        lowtri.CallError, match=r"2 tokens for 3 keys, cut at spaces: two \| words.\nFix: a list with one"
    ):
        lowtri.explain(scores=scores, mask="causal", tokens="two words")
    with pytest.raises(lowtri.CallError, match=r"explain: 2 tokens for 3 keys.\nFix: a list"):
        lowtri.explain(scores=scores, mask="causal", tokens=["two", "words"])


def test_a_step_is_an_array_with_a_picture() -> None:
    steps = worked()
    weights = steps["weights"]
    assert isinstance(weights, np.ndarray) and np.allclose(weights, weights.value) and weights.shape == (3, 3)
    assert weights[1, 0] == weights.value[1, 0] and type(weights[0]) is np.ndarray, "a part is a plain array"
    assert type(weights + 1) is np.ndarray and type(weights @ weights) is np.ndarray
    assert isinstance(weights.sum(), float) and np.allclose(weights.sum(-1), 1)
    assert repr(weights).startswith("Step([[1.") and torch.as_tensor(np.asarray(weights)).shape == (3, 3)
    html = weights._repr_html_()
    assert html is not None and html.count("<td") == 18 and 'class="hidden"' in html and weights.sentence in html
    assert len(html) < 20_000
    again = pickle.loads(pickle.dumps(weights))
    assert np.array_equal(again, weights) and again.name == "weights" and again._repr_html_() == html
    assert weights.reshape(-1)._repr_html_() is None


@pytest.mark.parametrize("lang", LANGUAGES)
def test_every_sentence_in_every_language(lang: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = {
        re.sub(r"\\\{\w+\\\}", ".*", re.escape(text)) for key, text in texts(lang).items() if key.startswith("explain.")
    }
    for explained in (worked(lang=lang), untrained("a b a b c", heads=2, lang=lang)):
        for step in explained.steps:
            assert any(re.fullmatch(pattern, step.sentence) for pattern in known), step.sentence
        assert any(re.fullmatch(pattern, explained.note, re.S) for pattern in known)
        page = explained.to_html()
        assert sentence(lang, "explain.title") in page and sentence(lang, "explain.axes") in page
        assert sentence(lang, "explain.hidden") in str(explained) and sentence(lang, "explain.with") in str(explained)
    assert main(["explain", "Write a poem", "--lang", lang]) == 0
    assert sentence(lang, "explain.output") in capsys.readouterr().out
    with pytest.raises(lowtri.DataError, match=r"explain: there is no language 'fr'. Fix: one of en, id, th, zh"):
        worked(lang="fr")
