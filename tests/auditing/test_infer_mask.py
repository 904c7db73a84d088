"""`infer_mask`: the formula that agrees with what is measured, on tables with every atom, on layers, and on models that have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audited_models import decoder, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowtri
from lowtri.errors import CallError, UndecidedError

ATOMS = ["full", "causal", "causal & window(3)", "first(3)", "chunks(4)", "strided(2)", "band(1, 2)"]
JOINED = [
    "causal | first(4)",
    "causal & chunks(4)",
    "causal & strided(3)",
    "causal - window(1)",
    "causal & (window(3) | first(2))",
    "causal & documents(lengths=[4, 5])",
    "documents(lengths=[2, 3, 4])",
    "causal & window(2) & documents(lengths=[4, 5])",
    "causal & chunks(4) | first(2)",
]


def mean_over(table: np.ndarray) -> Any:
    weights = table / np.maximum(table.sum(-1, keepdims=True), 1)
    return lambda x: weights @ x


def vectors(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape)


WITHIN = [  # each document begins anew; two documents of the same length would say less
    'documents(lengths=[6, 8, 4], inner="causal & (window(2) | first(2))")',
    'documents(lengths=[8, 10], inner="causal | first(3)")',
]


@pytest.mark.parametrize("text", WITHIN)
def test_masks_that_begin_anew_with_each_document_are_read_back(text: str) -> None:
    table = np.array(lowtri.mask(text).dense(18))
    found = lowtri.infer_mask(mean_over(table), vectors(18, 3))
    assert found.text == text and found.mask == lowtri.mask(text) and not found.differs


def test_chunks_of_given_documents_are_chunks_within_each() -> None:
    text = 'documents(lengths=[5, 7, 6], inner="causal & chunks(2)")'
    model, labels = mean_over(np.array(lowtri.mask(text).dense(18))), np.repeat([0, 1, 2], [5, 7, 6])
    assert lowtri.infer_mask(model, vectors(18, 3), labels=labels).text == text
    assert lowtri.infer_mask(model, vectors(18, 3)).text.startswith("causal & documents(lengths=[2, 2, 1, 2, 2, 2, 1,")


def test_documents_alone_are_printed_where_they_say_the_same_pairs() -> None:
    text = 'documents(lengths=[8, 10], inner="causal & window(3)")'
    found = lowtri.infer_mask(mean_over(np.array(lowtri.mask(text).dense(18))), vectors(18, 3))
    assert found.text == "window(3) & documents(lengths=[8, 10])"


def test_sinks_of_documents_that_differ_from_row_to_row() -> None:
    ids = np.array([[0] * 5 + [1] * 7, [0] * 8 + [1] * 4])
    mask = lowtri.documents(ids, inner="window(2) | first(1)")
    weights = np.array(mask.dense(12), float)
    found = lowtri.infer_mask(lambda x: np.einsum("bqk,bkd->bqd", weights, x), vectors(2, 12, 3))
    assert found.mask == mask


@pytest.mark.parametrize("n", [9, 17])
@pytest.mark.parametrize("text", ATOMS + JOINED)
def test_the_formula_is_read_back(text: str, n: int) -> None:
    text = text.replace("5]", f"{n - 4}]") if "documents" in text and "[4, 5]" in text else text
    if "[2, 3, 4]" in text:
        text = text.replace("4]", f"{n - 5}]")
    table = np.array(lowtri.mask(text).dense(n))
    found = lowtri.infer_mask(mean_over(table), vectors(n, 3))
    np.testing.assert_array_equal(np.array(found.mask.dense(n)), table)
    np.testing.assert_array_equal(np.array(lowtri.mask(found.text).dense(n)), table)  # a text that `mask` takes
    assert not found.differs and str(found) == found.text == found.nearest
    assert text not in (*ATOMS, *JOINED[:6]) or found.text == text


PARTS = ["causal", "window(2)", "window(5)", "first(2)", "chunks(3)", "strided(2)", "band(1, 1)"]


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(PARTS), st.sampled_from(["&", "|", "-"]), st.sampled_from(PARTS), st.sampled_from([8, 11]))
def test_any_two_atoms_are_explained(left: str, sign: str, right: str, n: int) -> None:
    explained(left, sign, right, n)


@pytest.mark.sweep
@pytest.mark.parametrize("n", [6, 9, 13, 16])
@pytest.mark.parametrize("left", PARTS)
def test_every_two_atoms_are_explained(left: str, n: int) -> None:
    for right in PARTS:
        for sign in "&|-":
            explained(left, sign, right, n)


def explained(left: str, sign: str, right: str, n: int) -> None:
    table = np.array(lowtri.mask(f"{left} {sign} {right}").dense(n))
    if not table.any():
        with pytest.raises(UndecidedError, match=r"no output depends on any of the .* inputs.*\nFix: Model.output=."):
            lowtri.infer_mask(mean_over(table), vectors(n, 3))
        return
    found = lowtri.infer_mask(mean_over(table), vectors(n, 3))
    np.testing.assert_array_equal(np.array(found.mask.dense(n)), table)
    assert not found.differs, found.message


def test_what_layers_do_not_reach_is_no_mask_of_theirs() -> None:
    class Mean(nn.Module):
        """Causal attention, and beside it the mean of all positions."""

        def __init__(self, leaks: bool) -> None:
            super().__init__()
            self.attention, self.leaks = lowtri.nn.MaskedSelfAttention(8), leaks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.attention(x)
            return x + x.mean(1, keepdim=True) if self.leaks else x

    x = torch.randn(2, 6, 8)
    found = lowtri.infer_mask(Mean(leaks=True), x)
    assert (found.text, found.layers) == ("full", ("causal",))
    assert found.line == "full; each layer: causal, but outputs depend on more"
    assert lowtri.infer_mask(Mean(leaks=False), x).line == "causal"


def test_a_constant_model_has_no_mask() -> None:
    explained("causal", "-", "causal", 6)


def test_no_formula_is_a_table_with_the_pairs_that_differ() -> None:
    table = np.array(lowtri.causal().dense(9))
    table[2, 7] = table[5, 8] = table[6, 1] = False
    table[2, 7] = table[1, 5] = True
    found = lowtri.infer_mask(mean_over(table), vectors(9, 3))
    np.testing.assert_array_equal(np.array(found.mask.dense(9)), table)
    assert found.text == "no formula of three parts" and found.nearest == "causal"
    assert set(found.differs) == {(2, 7), (6, 1), (1, 5)}
    assert "nearest formula: causal, which differs at 3 pairs: (1, 5), (2, 7), (6, 1)" in found.message


def test_documents_that_differ_from_row_to_row() -> None:
    labels = np.array([[0] * 4 + [1] * 5, [0] * 6 + [1] * 3])
    table = np.tril(np.ones((9, 9), bool)) & (labels[:, :, None] == labels[:, None, :])
    for given_labels in (labels, None):
        found = lowtri.infer_mask(mean_over(table), vectors(2, 9, 3), labels=given_labels)
        assert found.text == "row 0: causal & documents(lengths=[4, 5]); row 1: causal & documents(lengths=[6, 3])"
        np.testing.assert_array_equal(np.array(found.mask.dense(9)).reshape(table.shape), table)


@pytest.mark.parametrize(
    ("name", "more", "layers", "described"),
    [
        ("Mistral", {"sliding_window": 4}, ["causal & window(4)"] * 2, "causal & window(4)"),
        (
            "Gemma3Text",
            {"sliding_window": 4, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
            ["causal & window(4)", "causal"] * 2,
            "causal\nlayer 0 of each 2: causal & window(4), else causal",
        ),
        ("Llama", {}, ["causal"] * 2, "causal"),
        (
            "Gemma3Text",
            {"head_dim": 8, "use_bidirectional_attention": True, "sliding_window": 64},
            ["full"] * 2,
            "full",
        ),
        (
            "Llama4Text",
            {"attention_chunk_size": 4, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2},
            ["causal & chunks(4)"] * 3 + ["causal"],
            "causal\nlayers 0-2: causal & chunks(4), else causal",
        ),
    ],
)
def test_layers_of_transformers(name: str, more: dict[str, Any], layers: list[str], described: str) -> None:
    sizes = {"intermediate_size": 48, "num_hidden_layers": len(layers), "num_key_value_heads": 1}
    model = tiny(name, **sizes, **more)
    ids = torch.randint(2, 60, (2, 14), generator=torch.Generator().manual_seed(0))
    found = lowtri.infer_mask(model, ids, redraw=True)
    assert list(found.layers) == layers and found.message == described


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("given_labels", [False, True])
def test_packed_rows_of_transformers(attention: str, given_labels: bool) -> None:
    """Documents that begin anew at position 0; with a cache transformers reads them as one, and the answer says so."""
    model, places = tiny("Llama", intermediate_size=48), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0, 1, 2]
    model.set_attn_implementation(attention)
    ids = torch.randint(2, 60, (2, 14), generator=torch.Generator().manual_seed(0))
    example = {"input_ids": ids, "position_ids": torch.tensor([places, places]), "use_cache": False}
    labels = [0] * 5 + [1] * 6 + [2] * 3 if given_labels else None
    found = lowtri.infer_mask(model, example, labels=labels)
    assert found.text == "causal & documents(lengths=[5, 6, 3])" and found.layers == (found.text,) * 2
    assert lowtri.infer_mask(model, {**example, "use_cache": True}).text == "causal"


def test_a_prefix_decoder_and_one_that_no_formula_describes() -> None:
    prefix = "causal | first(4)"
    ours = decoder(vocab_size=40, mask=prefix)
    ids = torch.randint(2, 40, (2, 11), generator=torch.Generator().manual_seed(0))
    assert lowtri.infer_mask(ours, ids, redraw=True).text == prefix
    theirs, table = tiny("Llama", intermediate_size=48), torch.tensor(np.array(lowtri.mask(prefix).dense(11)))
    example = {"input_ids": ids, "attention_mask": table.expand(2, 1, 11, 11)}
    assert lowtri.infer_mask(theirs, example).layers == (prefix,) * 2
    torn = table.clone()
    torn[7, 5] = torn[9, 2] = False
    found = lowtri.infer_mask(theirs, {**example, "attention_mask": torn.expand(2, 1, 11, 11)})
    assert found.text == "no formula of three parts" and found.nearest != prefix and found.differs
    np.testing.assert_array_equal(np.array(found.mask.dense(11)).reshape(11, 11), torn.numpy())


def test_modules_of_torch() -> None:
    torch.manual_seed(0)
    hidden = ~torch.from_numpy(np.array(lowtri.mask("causal & window(3)").dense(9)))
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 9, 8)
    assert lowtri.infer_mask(lambda x: attention(x, x, x, attn_mask=hidden)[0], x).layers == ("causal & window(3)",)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    assert lowtri.infer_mask(lambda x: layer(x, src_mask=hidden), x).text == "causal & window(3)"
    assert lowtri.infer_mask(nn.GRU(8, 8, batch_first=True), x).text == "causal"  # no attention at all
    assert lowtri.infer_mask(nn.Linear(8, 8), x).text == "causal & window(1)"


def test_bad_input() -> None:
    calls: list[int] = []

    def counting(x: np.ndarray) -> np.ndarray:
        calls.append(1)
        return x * len(calls)

    with pytest.raises(CallError, match=r"infer_mask: the same input gives different outputs(.|\n)*Fix: "):
        lowtri.infer_mask(counting, vectors(6, 3))
    with pytest.raises(CallError, match=r"labels= has the shape \(4,\), expected \(6,\) or \(1, 6\)"):
        lowtri.infer_mask(lambda x: x, vectors(6, 3), labels=[0, 0, 1, 1])


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from lowtri.cli.checks import audit as command

    file = tmp_path / "m.py"
    file.write_text(
        "import torch\ndef make():\n    return torch.nn.GRU(4, 4, batch_first=True), torch.randn(2, 8, 4)\n"
    )
    command(f"{file}:make", infer=True, vocab=None, redraw=False, threads=None, length=None, seed=0, json=False)
    assert capsys.readouterr().out.strip() == "causal"
    command(f"{file}:make", infer=True, vocab=None, redraw=False, threads=None, length=None, seed=0, json=True)
    assert json.loads(capsys.readouterr().out) == {"mask": "causal", "layers": [], "nearest": "causal", "differs": []}
