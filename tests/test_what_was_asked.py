"""What was asked of lowtri, row by row, through public names only.

Five documents teach masked self-attention. A: the plain module and its worked numbers. B: the NumPy form, batched over heads.
C: the concept. D: decoders of several model families. E: what becomes of a model that was trained without its mask.
The figures stand in examples/demo/asked.py, and the demo shows them; the statements of E stand in examples/why_mask/checks.py.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments import experiment
from torch import Tensor

import lowtri
from demo.asked import (
    ENCODINGS,
    FIGURES,
    FOUR_DIGITS,
    HIDDEN,
    KIN,
    LAST_DIGIT,
    OUTPUT,
    SCORES,
    TIMES,
    UNMASKED,
    VALUES,
    WEIGHTS,
    causal_forms,
    token_table,
)
from demo.named_models import BOTH_SIDES, NAMES, TARGET, on_lowtri
from lowtri import plain
from lowtri.cli.main import main
from lowtri.integrations.transformers import register
from why_mask.checks import statements
from why_mask.experiment import SHORT, Experiment

SENTENCE = ["Write", "a", "poem"]


def seeded(kind: type[Any], *sizes: Any, **options: Any) -> Any:
    torch.manual_seed(42)
    return kind(*sizes, **options)


def near(actual: Any, expected: Any, tolerance: float = FOUR_DIGITS) -> None:
    arrays = [x.detach().numpy() if isinstance(x, Tensor) else np.asarray(x) for x in (actual, expected)]
    np.testing.assert_allclose(*arrays, rtol=0, atol=tolerance)


# A. The plain module and its worked numbers.


@pytest.fixture
def encodings() -> Tensor:
    return torch.tensor(ENCODINGS)


def test_a_the_causal_mask_is_the_worked_table() -> None:
    assert lowtri.hidden(HIDDEN).dense(3).tolist() == lowtri.causal().dense(3).tolist()
    assert lowtri.causal().dense(3).tolist() == np.tri(3, dtype=bool).tolist()


@pytest.mark.parametrize("kind", [plain.MaskedSelfAttention, lowtri.nn.MaskedSelfAttention], ids=["plain", "nn"])
def test_a_projections_have_no_bias_and_follow_the_seed(kind: type[Any]) -> None:
    module = seeded(kind, 2)
    assert [name for name, _ in module.named_parameters()] == ["W_q.weight", "W_k.weight", "W_v.weight"]
    for name in ("W_q", "W_k", "W_v"):
        near(getattr(module, name).weight.T, FIGURES[f"{name}^T"])


def test_a_output_of_the_plain_module(encodings: Tensor) -> None:
    module = seeded(plain.MaskedSelfAttention, d_model=2, row_dim=0, col_dim=1)
    near(module(encodings, mask=torch.tensor(HIDDEN)), FIGURES["output"])
    near(module(encodings, mask=None), UNMASKED["output"])
    near(module(encodings), UNMASKED["output"])


def test_a_output_and_weights_of_lowtris_module(encodings: Tensor) -> None:
    module = seeded(lowtri.nn.MaskedSelfAttention, 2)
    for mask, figures in ((None, FIGURES), (lowtri.hidden(HIDDEN), FIGURES), ("full", UNMASKED)):
        output, weights = module(encodings, mask, return_weights=True)
        near(output, figures["output"])
        near(weights, figures["weights"])
        assert mask == "full" or (weights.triu(1) == 0).all()  # exactly


def test_a_the_last_row_is_the_same_without_a_mask(encodings: Tensor) -> None:
    module = seeded(plain.MaskedSelfAttention, 2)
    torch.testing.assert_close(module(encodings)[2], module(encodings, torch.tensor(HIDDEN))[2], atol=0, rtol=0)


def test_a_other_names_and_the_batched_dimensions(encodings: Tensor) -> None:
    single = seeded(plain.MaskedSelfAttention, embed_dim=2)(encodings, torch.tensor(HIDDEN))
    batched = seeded(plain.MaskedSelfAttention, embed_dim=2, row_dim=1, col_dim=2)
    both = batched(torch.stack([encodings, encodings * 2]), torch.tensor(HIDDEN))
    torch.testing.assert_close(both[0], single)


@pytest.mark.parametrize("name", FIGURES)
def test_a_explain_gives_every_step(name: str, encodings: Tensor) -> None:
    module = seeded(lowtri.nn.MaskedSelfAttention, 2)
    steps = lowtri.explain(module, encodings, tokens=SENTENCE, hidden=-1e9)
    near(steps[name].value, FIGURES[name])
    if name in UNMASKED:
        near(steps[name].unmasked, UNMASKED[name])


def test_a_the_command_prints_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "Write a poem"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for name, rows in FIGURES.items():
        for i, row in enumerate(rows):
            cells = [f"{x:.4f}" for x in row]
            if name in ("masked", "weights"):
                cells[i + 1 :] = ["▒ -1e9" if name == "masked" else "▒ 0" for _ in row[i + 1 :]]
            assert " ".join(cells) in printed, (name, cells)
    for token, row in zip(SENTENCE, ENCODINGS, strict=True):
        assert " ".join([token, *(f"{x:.4f}" for x in row)]) in printed


@pytest.mark.parametrize("very_small", [-1e9, -1e20, -9e15, -math.inf])
def test_a_all_large_numbers_act_as_minus_infinity_in_float32(very_small: float) -> None:
    scaled = torch.tensor(FIGURES["scaled"])
    weights = torch.softmax(scaled + lowtri.causal().additive(3, hidden=very_small, like=scaled), dim=1)
    assert torch.equal(weights, torch.softmax(scaled.masked_fill(torch.tensor(HIDDEN), -math.inf), dim=1))


def test_a_minus_1e9_is_out_of_range_in_float16() -> None:
    with pytest.raises(lowtri.MaskError, match=re.escape("float16 has no -1e+09: it would become -inf")):
        lowtri.causal().additive(3, hidden=-1e9, dtype=np.float16)


def test_a_a_row_that_sees_nothing_is_a_mean_with_minus_1e9_and_0_in_lowtri(encodings: Tensor) -> None:
    module = seeded(plain.MaskedSelfAttention, 2)
    near(module(encodings, torch.ones(3, 3, dtype=torch.bool)), module.W_v(encodings).mean(0).detach().expand(3, 2))
    ours = seeded(lowtri.nn.MaskedSelfAttention, 2)
    assert ours(encodings, lowtri.hidden(np.ones((3, 3), bool))).abs().max() == 0


def test_a_encodings_are_embedding_plus_position() -> None:
    embedding, position = torch.randn(3, 4), lowtri.nn.sinusoidal(3, 4)
    steps = lowtri.explain(lowtri.nn.MaskedSelfAttention(4), embedding, position=position)
    near(steps["encoding"].value, embedding + position, 1e-6)


def test_a_eight_heads_of_64_columns_are_512() -> None:
    steps = lowtri.explain(lowtri.nn.MultiHeadAttention(512, num_heads=8), torch.randn(3, 512))
    assert {name: steps[name].value.shape for name in ("q", "k", "v")} == dict.fromkeys("qkv", (8, 3, 64))
    assert steps["joined"].value.shape == (3, 512)


# B. The NumPy form, batched over heads.


def test_b_the_mask_is_0_on_and_below_the_diagonal() -> None:
    mask = plain.make_causal_mask(4)
    assert mask.tolist() == [[0.0 if column <= row else -1e9 for column in range(4)] for row in range(4)]
    assert lowtri.causal().additive(4, hidden=-1e9, dtype=np.float64).tolist() == mask.tolist()
    assert plain.make_causal_mask(2, neg_large=-5.0).tolist() == [[0, -5], [0, 0]]
    assert ["".join(map(str, row)) for row in lowtri.causal().dense(4).astype(int)] == ["1000", "1100", "1110", "1111"]


@pytest.mark.parametrize("how", ["plain", "lowtri"])
def test_b_worked_numbers_of_one_head(how: str) -> None:
    if how == "plain":
        weights = plain.softmax(SCORES + plain.make_causal_mask(4))
        output = weights @ VALUES
    else:  # with k the identity, q k^T is q
        output, weights = lowtri.attention(SCORES, np.eye(4), VALUES, "causal", scale=1.0, return_weights=True)
    near(weights, WEIGHTS, LAST_DIGIT)
    near(output, OUTPUT, LAST_DIGIT)
    assert (np.asarray(weights)[np.triu_indices(4, 1)] == 0).all()  # exactly


def test_b_many_heads() -> None:
    rows, heads, n, d = 2, 3, 4, 6
    q, k, v = np.random.default_rng(0).normal(size=(3, rows, n, heads, d // heads)).swapaxes(2, 3)
    assert q.shape == (2, 3, 4, 2) and k.swapaxes(-1, -2).shape == (2, 3, 2, 4)
    mask = plain.make_causal_mask(n)[None, None]  # (1, 1, T, T)
    output, weights = plain.masked_self_attention(q, k, v, mask)
    assert output.shape == (2, 3, 4, 2) and weights.shape == (2, 3, 4, 4)
    near(lowtri.attention(q, k, v, "causal", return_weights=True)[0], output, 1e-12)
    near(lowtri.attention(q, k, v, "causal", return_weights=True)[1], weights, 1e-12)
    one = plain.masked_self_attention(q[1, 2], k[1, 2], v[1, 2], plain.make_causal_mask(n))
    near(one[0], output[1, 2], 1e-12)
    near(weights, plain.softmax(q @ k.swapaxes(-1, -2) / np.sqrt(d // heads) + mask), 1e-12)


def test_b_explain_takes_a_row_of_a_batch() -> None:
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 3, 4, 2))  # B 2, H 3, T 4, d_h 2
    output, weights = plain.masked_self_attention(q, k, v, plain.make_causal_mask(4)[None, None])
    for row in (0, 1):
        steps = lowtri.explain((q, k, v), mask="causal", batch=row)
        near(steps["weights"].value, weights[row], 1e-12)
        near(steps["output"].value, output[row], 1e-12)


def test_b_the_command_takes_given_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "scores.txt").write_text(str(SCORES))  # as NumPy prints them
    (tmp_path / "values.json").write_text(str(VALUES.tolist()))
    run = ["explain", "--scores", str(tmp_path / "scores.txt"), "--values", str(tmp_path / "values.json")]
    assert main([*run, "--json"]) == 0
    steps = {step["name"]: step["value"] for step in json.loads(capsys.readouterr().out)["steps"]}
    near(steps["weights"], WEIGHTS, LAST_DIGIT)
    near(steps["output"], OUTPUT, LAST_DIGIT)


def test_b_the_mask_as_text_and_latex() -> None:
    assert [line.split() for line in lowtri.causal().draw(2, numbers=True).splitlines()] == [["0", "-inf"], ["0", "0"]]
    assert r"0 & -\infty \\" in lowtri.causal().draw(2, latex=True)


def test_b_softmax_subtracts_the_maximum() -> None:
    near(plain.softmax(np.array([[1e4, 1e4], [0.0, -1e4]])), [[0.5, 0.5], [1, 0]], 0)
    near(plain.softmax(np.arange(6.0).reshape(2, 3), axis=0).sum(axis=0), np.ones(3), 1e-15)


# C. The concept.


def words(sentence: str) -> tuple[list[str], dict[str, int]]:
    tokens = sentence.split()
    return tokens, {token: i for i, token in enumerate(dict.fromkeys(tokens))}


def small_decoder(layers: int, vocab: int = 30) -> lowtri.nn.Decoder:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = lowtri.nn.Decoder(lowtri.nn.DecoderConfig(vocab_size=vocab, num_hidden_layers=layers, **sizes)).eval()
    with torch.no_grad():  # fresh weights are so small that attention is nearly uniform
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(8)
    return model


@pytest.mark.parametrize("layers", [1, 3])
def test_c_a_later_token_changes_no_earlier_output(layers: int) -> None:
    model = small_decoder(layers)
    lowtri.assert_causal(model, torch.arange(12)[None])
    with pytest.raises(lowtri.LeakError):
        lowtri.assert_causal(lambda ids: model(ids, mask="full"), torch.arange(12)[None])


def test_c_all_forms_agree() -> None:
    """Those of notebooks, torch and lowtri; `benchmarks/claims.py` measures whether `is_causal` is the faster one."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 8, 10, 64)
    expected = lowtri.attention(q, k, v, "causal")
    for name, form in causal_forms(q, k, v).items():
        output = torch.as_tensor(form())
        torch.testing.assert_close(
            output, expected, atol=2e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}", check_dtype=False
        )
    additive, attend = plain.create_causal_mask(10, device="cpu"), plain.create_causal_mask_bool(10, device="cpu")
    assert additive.device == attend.device == torch.device("cpu")
    assert torch.equal(additive, lowtri.causal().additive(10, like=q))
    assert attend.tolist() == lowtri.causal().dense(10).tolist()


@pytest.mark.parametrize("how", ["plain", "lowtri"])
def test_c_output_and_weights_of_eight_heads(how: str) -> None:
    q, k, v = torch.randn(3, 2, 8, 10, 64)
    if how == "plain":
        output, weights = plain.masked_self_attention(q, k, v, plain.create_causal_mask(10))
    else:
        output, weights = lowtri.attention(q, k, v, "causal", return_weights=True)
    assert output.shape == (2, 8, 10, 64) and weights.shape == (2, 8, 10, 10)
    assert not weights.triu(1).any()
    torch.testing.assert_close(weights[..., 0, 0], torch.ones(2, 8), rtol=0, atol=8 * torch.finfo(torch.float32).eps)


def test_c_pictures_of_both_masks() -> None:
    lines = lowtri.full().draw(4, beside=lowtri.causal()).splitlines()
    assert [line.split() for line in lines[1:]] == [["████", row] for row in ("█···", "██··", "███·", "████")]
    assert token_table("causal", "The black cat <end>") == [
        ["The", "black", "cat", "<end>"],
        ["The", "✓", "✗", "✗", "✗"],
        ["black", "✓", "✓", "✗", "✗"],
        ["cat", "✓", "✓", "✓", "✗"],
        ["<end>", "✓", "✓", "✓", "✓"],
    ]


@pytest.mark.parametrize("sentence", ["<start> The black cat", "[START] I love NLP"])  # the second is section D's
def test_c_generation_goes_step_by_step(sentence: str) -> None:
    tokens, ids = words(sentence)

    def follower(token_ids: np.ndarray) -> np.ndarray:
        """After each word of the sentence, its next word."""
        return np.eye(len(tokens))[(token_ids + 1) % len(tokens)]

    shown = [tokens[0]]
    for token in lowtri.generate(follower, [ids[tokens[0]]], max_new_tokens=len(tokens) - 1):
        shown.append(tokens[token])
    assert shown == tokens


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("sentence", ["The cat sat on", "The black cat <end>"])
def test_c_training_and_inference_have_the_same_information(sentence: str, layers: int) -> None:
    model, (tokens, ids) = small_decoder(layers), words(sentence)
    row = torch.tensor([[ids[token] for token in tokens]])
    n = row.shape[1]
    with torch.no_grad():
        training = model(row)
        cache = model.make_cache(1, mask="full", allow_missing=True)  # no mask: later tokens do not exist yet
        cached = torch.cat([model(row[:, t : t + 1], cache=cache) for t in range(n)], dim=1)
        masked = torch.cat([model(row[:, : t + 1])[:, -1:] for t in range(n)], dim=1)
        bare = torch.cat([model(row[:, : t + 1], mask="full")[:, -1:] for t in range(n)], dim=1)
    assert (cached - training).abs().max() < 1e-5
    assert (masked - training).abs().max() < 1e-5
    # Without the mask old positions see newer ones, and the next layer reads the result.
    difference = float((bare - training).abs().max())
    assert difference < 1e-5 if layers == 1 else difference > 0.1


# D. Decoders of several model families.


def test_d_the_batched_module() -> None:
    output, weights = lowtri.nn.MaskedSelfAttention(4)(torch.randn(1, 5, 4), return_weights=True)
    assert output.shape == (1, 5, 4) and weights.shape == (1, 5, 5)
    assert (weights[0].triu(1) == 0).all()


def test_d_the_batched_module_with_the_notebooks_arguments() -> None:
    out, weights = plain.MaskedSelfAttention(embed_dim=4)(torch.randn(1, 5, 4))
    assert out.shape == (1, 5, 4) and weights.shape == (1, 5, 5)
    assert (weights[0].triu(1) == 0).all()


def test_d_the_function_without_projections() -> None:
    x = torch.randn(1, 5, 4)
    output, weights = plain.self_attention(x)
    torch.testing.assert_close(weights, torch.softmax(x @ x.mT / 2, dim=-1))
    ours = lowtri.attention(x, x, x, "full", return_weights=True)
    torch.testing.assert_close((output, weights), ours)


def test_d_the_next_word() -> None:
    model, hidden = plain.AutoRegressiveModel(embed_dim=4, vocab_size=10_000), torch.randn(1, 1, 4)
    assert model.probabilities(hidden).shape == (1, 1, 10_000)
    near(model.probabilities(hidden).sum(-1), [[1.0]], 1e-5)
    assert model(hidden).shape == (1, 1)
    assert model(hidden) == model.linear(hidden).argmax(-1)


@pytest.mark.parametrize("sentence", ["I love Machine Learning", "I love NLP"])
def test_d_token_tables(sentence: str) -> None:
    tokens = sentence.split()
    n = len(tokens)
    assert token_table("full", sentence) == [tokens] + [[token, *"✓" * n] for token in tokens]
    triangle = [[tokens[q], *"✓" * (q + 1), *"✗" * (n - q - 1)] for q in range(n)]
    assert token_table("causal", sentence) == [tokens, *triangle]


def test_d_the_two_tables_of_what_is_confused() -> None:
    """Training and inference, masked self-attention and autoregressive model: the demo prints them, docs/claims.md shows them."""
    page = (Path(__file__).parents[1] / "docs" / "claims.md").read_text(encoding="utf-8")
    assert [len(rows) for _, _, rows in (TIMES, KIN)] == [3, 6]
    for title, columns, rows in (TIMES, KIN):
        table = [("", *columns), ("---", "---", "---"), *rows]
        lines = ["| " + " | ".join(cells) + " |" for cells in table]
        shown = "\n".join(lines).replace("|  |", "| |").replace("| --- | --- | --- |", "|---|---|---|")
        assert f"### {title}\n\n{shown}" in page


@pytest.mark.parametrize("name", ["GPT-2", *(pytest.param(name, marks=pytest.mark.sweep) for name in BOTH_SIDES)])
def test_d_each_of_the_four_families_runs_on_lowtri_and_passes_the_audit(name: str) -> None:
    switched, away = on_lowtri(name)
    assert switched.model.config._attn_implementation == "lowtri"
    assert away < 1e-4  # of logits up to some tens
    report = switched.audit()
    assert report.ok, report.message
    clean = ["change", "gradient", "prefix", "batch", "cache", "code_paths", "sensitivity"]
    found = {name: report.finding(name).status for name in [*clean, "padding"]}
    assert {probe: found[probe] for probe in clean} == dict.fromkeys(clean, "clean"), report.findings
    # BART's own affair: its places are counted from the first pad.
    assert found["padding"] == ("warning" if name == "BART" else "clean")


@pytest.mark.parametrize("name", NAMES)
def test_d_without_its_mask_each_decoder_leaks(name: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    def peeking(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        bias, scale = options.get("position_bias"), options.get("scaling")
        return lowtri.attention(q, k, v, "full", scale=scale, bias=bias).transpose(1, 2), None

    AttentionInterface.register("peeking", peeking)
    AttentionMaskInterface.register("peeking", lambda *_, **__: None)
    named, _ = on_lowtri(name)
    peeks = named.on("peeking")
    with torch.no_grad():
        assert (peeks.logits() - named.logits()).abs().max() > 1e-3
    report = peeks.audit(probes=["change"])
    assert not report.ok and report.first is not None and (report.first.query, report.first.key) == (0, 1)


@pytest.mark.parametrize("engine", ["lowtri", "lowtri-formula"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_d_only_the_decoder_is_masked(name: str, engine: str) -> None:
    """The weights of the three attentions: a triangle in the decoder, everything in the encoder and in cross-attention."""
    register("lowtri-formula", engine="formula")
    named = on_lowtri(name)[0].on(engine)
    out = named.model(**named.given, output_attentions=True)
    alone = not named.model.config.is_encoder_decoder
    past = torch.ones(TARGET, TARGET).tril().bool().expand(2, 4, TARGET, TARGET)
    for kind in ["attentions"] if alone else ["decoder_attentions", "cross_attentions", "encoder_attentions"]:
        assert len(getattr(out, kind)) == 2
        for weights in getattr(out, kind):
            visible = past if kind in ("attentions", "decoder_attentions") else torch.ones_like(weights).bool()
            assert torch.equal(weights > 0, visible)
            assert (weights[~visible] == 0).all()  # exactly


@pytest.mark.parametrize("name", BOTH_SIDES)
@torch.no_grad()
def test_d_the_end_of_the_source_is_seen_from_everywhere(name: str) -> None:
    whole = on_lowtri(name)[0].on("lowtri", torch.float64)
    (key, source), encoder = next(iter(whole.source.items())), whole.model.get_encoder()
    other = source.clone()
    other[..., -1] = source[..., -1] + 1 if source.is_floating_point() else 3 + (source[..., -1] + 1) % 30
    for before, after in (
        (encoder(source).last_hidden_state, encoder(other).last_hidden_state),
        (whole.logits(), whole.logits(**{key: other})),
    ):
        assert ((before - after).abs().amax(-1) > 1e-7).all()  # the first position as well as the last
    ids = whole.given["decoder_input_ids"].clone()
    ids[:, -1] = 3 + (ids[:, -1] + 1) % 30
    before, after = whole.logits(), whole.logits(decoder_input_ids=ids)
    assert torch.equal(before[:, :-1], after[:, :-1]) and not torch.equal(before[:, -1], after[:, -1])


@pytest.mark.parametrize("cell", ["rnn", "lstm"])
def test_d_recurrent_models_use_the_same_loop_and_audit(cell: str) -> None:
    torch.manual_seed(0)
    model = lowtri.nn.RecurrentLM(20, 16, cell=cell).eval()
    lowtri.assert_causal(model, torch.arange(10)[None])
    row = [3, 7]
    for _ in range(4):
        row.append(int(torch.softmax(model(torch.tensor([row]))[0, -1], dim=-1).argmax()))
    assert list(lowtri.generate(model, [3, 7], max_new_tokens=4)) == row[2:]


def test_d_each_input_is_the_previous_output() -> None:
    model = small_decoder(2)
    row = [4, 8]
    with torch.no_grad():
        for _ in range(5):
            row.append(int(torch.softmax(model(torch.tensor([row]))[0, -1], dim=-1).argmax()))
    assert list(lowtri.generate(model, [4, 8], max_new_tokens=5)) == row[2:]


# E. What becomes of a model that peeks: measured on trained weights.


@pytest.fixture(scope="module", params=[pytest.param(size, marks=pytest.mark.sweep) for size in ("small", "full")])
def found(request: pytest.FixtureRequest) -> Experiment:
    return experiment(request.param)


def all_hold(found: Experiment, topic: str, number: int) -> None:
    about = [statement for statement in statements(found) if statement.topic == topic]
    assert len(about) == number
    assert [statement.text for statement in about if not statement.holds] == []


def test_e_1_cheating(found: Experiment) -> None:
    all_hold(found, "cheating", 3)


def test_e_2_overfitting_shows_step_by_step_and_not_as_a_gap(found: Experiment) -> None:
    all_hold(found, "overfitting", 1)


def test_e_3_wrong_order(found: Experiment) -> None:
    all_hold(found, "order", 3)


def test_e_4_no_generation(found: Experiment) -> None:
    all_hold(found, "generation", 2)
    assert found.uniform == math.log(258)
    if found.setting is SHORT:
        assert found.unmasked.stepwise > found.unigram  # worse than letters by their frequency


def test_c_training_is_inference_with_a_cache_or_the_prefix_and_its_mask(found: Experiment) -> None:
    all_hold(found, "modes", 2)
