"""`infer_mask`: the formula that agrees with what is measured, on tables with every atom, on layers, and on models that have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowtri
from lowtri.errors import CallError

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


PARTS = st.sampled_from(["causal", "window(2)", "window(5)", "first(2)", "chunks(3)", "strided(2)", "band(1, 1)"])


@settings(deadline=None, max_examples=25)
@given(PARTS, st.sampled_from(["&", "|", "-"]), PARTS, st.sampled_from([8, 11]))
def test_any_two_atoms_are_explained(left: str, sign: str, right: str, n: int) -> None:
    table = np.array(lowtri.mask(f"{left} {sign} {right}").dense(n))
    found = lowtri.infer_mask(mean_over(table), vectors(n, 3))
    np.testing.assert_array_equal(np.array(found.mask.dense(n)), table)


def test_no_formula_is_a_table_with_the_pairs_that_differ() -> None:
    table = np.array(lowtri.causal().dense(9))
    table[2, 7] = table[5, 8] = table[6, 1] = False
    table[2, 7] = table[1, 5] = True
    found = lowtri.infer_mask(mean_over(table), vectors(9, 3))
    np.testing.assert_array_equal(np.array(found.mask.dense(9)), table)
    assert found.text.startswith("table(") and found.nearest == "causal"
    assert set(found.differs) == {(2, 7), (6, 1), (1, 5)}
    assert "nearest formula: causal, which differs at 3 pairs: (1, 5), (2, 7), (6, 1)" in found.message


def test_documents_that_differ_from_row_to_row() -> None:
    labels = np.array([[0] * 4 + [1] * 5, [0] * 6 + [1] * 3])
    table = np.tril(np.ones((9, 9), bool)) & (labels[:, :, None] == labels[:, None, :])
    for given_labels in (labels, None):
        found = lowtri.infer_mask(mean_over(table), vectors(2, 9, 3), labels=given_labels)
        assert found.text.startswith("causal & documents(")
        np.testing.assert_array_equal(np.array(found.mask.dense(9)).reshape(table.shape), table)


@pytest.mark.parametrize(
    ("name", "more", "layers", "described"),
    [
        ("Mistral", {"sliding_window": 4}, ["causal & window(4)"] * 2, "causal & window(4)"),
        (
            "Gemma3",
            {"sliding_window": 4, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
            ["causal & window(4)", "causal"] * 2,
            "causal\nlayer 0 of each 2: causal & window(4), else causal",
        ),
        ("Llama", {}, ["causal"] * 2, "causal"),
    ],
)
def test_layers_of_transformers(name: str, more: dict[str, Any], layers: list[str], described: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}{'Text' if name == 'Gemma3' else ''}Config")(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=len(layers), num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, **more,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    ids = torch.randint(2, 60, (2, 14), generator=torch.Generator().manual_seed(0))
    found = lowtri.infer_mask(model, ids)
    assert list(found.layers) == layers and found.message == described


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
    from lowtri.cli.audit import command

    file = tmp_path / "m.py"
    file.write_text(
        "import torch\ndef make():\n    return torch.nn.GRU(4, 4, batch_first=True), torch.randn(2, 8, 4)\n"
    )
    command(f"{file}:make", infer=True, vocab=None, redraw=False, threads=None, length=None, seed=0, json=False)
    assert capsys.readouterr().out.strip() == "causal"
    command(f"{file}:make", infer=True, vocab=None, redraw=False, threads=None, length=None, seed=0, json=True)
    assert json.loads(capsys.readouterr().out) == {"mask": "causal", "layers": [], "nearest": "causal", "differs": []}
