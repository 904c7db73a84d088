"""The forms in which masked self-attention is taught, with their worked numbers, computed through public names only.

A: the plain module and its worked numbers. B: the NumPy form. C: the concept. D: decoders of several model families.
E, the consequences of training without the mask, is in tests/examples/test_why_mask.py.
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
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import lowtri
from lowtri import plain
from lowtri.cli.main import main

T, F = True, False
FOUR_DIGITS = 6e-5  # how section A is printed

# A. The plain module and its worked numbers.

SENTENCE = ["Write", "a", "poem"]
ENCODINGS = [[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]]
HIDDEN = [[F, T, T], [F, F, T], [F, F, F]]
FIGURES: dict[str, list[list[float]]] = {
    "W_q^T": [[0.5406, -0.1657], [0.5869, 0.6496]],
    "W_k^T": [[-0.1549, -0.3443], [0.1427, 0.4153]],
    "W_v^T": [[0.6233, 0.6146], [-0.5188, 0.1323]],
    "q": [[0.7621, -0.0428], [1.1063, 0.7890], [1.1164, -2.1336]],
    "k": [[-0.1469, -0.3038], [0.1057, 0.3685], [-0.9914, -2.4152]],
    "v": [[0.6038, 0.7434], [-0.3502, 0.5303], [3.8695, 2.4246]],
    "scores": [[-0.0990, 0.0648, -0.6523], [-0.4022, 0.4078, -3.0024], [0.4842, -0.6683, 4.0461]],
    "scaled": [[-0.0700, 0.0458, -0.4612], [-0.2844, 0.2883, -2.1230], [0.3424, -0.4725, 2.8610]],
    "masked": [[-0.0700, -1e9, -1e9], [-0.2844, 0.2883, -1e9], [0.3424, -0.4725, 2.8610]],
    "weights": [[1, 0, 0], [0.3606, 0.6394, 0], [0.0722, 0.0320, 0.8959]],
    "output": [[0.6038, 0.7434], [-0.0062, 0.6072], [3.4989, 2.2427]],
}
UNMASKED = {
    "weights": [[0.3573, 0.4011, 0.2416], [0.3410, 0.6047, 0.0542], [0.0722, 0.0320, 0.8959]],
    "output": [[1.0100, 1.0641], [0.2040, 0.7057], [3.4989, 2.2427]],
}


@pytest.fixture
def encodings() -> Tensor:
    return torch.tensor(ENCODINGS)


def seeded(kind: type[Any], *sizes: Any, **options: Any) -> Any:
    torch.manual_seed(42)
    return kind(*sizes, **options)


def near(actual: Any, expected: Any, tolerance: float = FOUR_DIGITS) -> None:
    arrays = [x.detach().numpy() if isinstance(x, Tensor) else np.asarray(x) for x in (actual, expected)]
    np.testing.assert_allclose(*arrays, rtol=0, atol=tolerance)


def test_a_the_causal_mask_is_the_worked_table() -> None:
    assert (
        lowtri.hidden(HIDDEN).dense(3).tolist() == lowtri.causal().dense(3).tolist() == np.tri(3, dtype=bool).tolist()
    )


@pytest.mark.parametrize("how", ["plain", "nn"])
def test_a_projections_have_no_bias_and_follow_the_seed(how: str) -> None:
    module = seeded(plain.MaskedSelfAttention if how == "plain" else lowtri.nn.MaskedSelfAttention, 2)
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
            hidden = [name in ("masked", "weights") and j > i for j in range(len(row))]
            cells = [
                ("▒ -1e9" if name == "masked" else "▒ 0") if hid else f"{x:.4f}"
                for x, hid in zip(row, hidden, strict=True)
            ]
            assert " ".join(cells) in printed, (name, cells)
    for token, row in zip(SENTENCE, ENCODINGS, strict=True):
        assert " ".join([token, *(f"{x:.4f}" for x in row)]) in printed


@pytest.mark.parametrize("very_small", [-1e9, -1e20, -9e15, -math.inf])
def test_a_all_large_numbers_act_as_minus_infinity_in_float32(very_small: float, encodings: Tensor) -> None:
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

LAST_DIGIT = 2e-8
SCORES = np.array(
    [
        [0.50390039, 0.5365974, 0.41871129, 0.81252469],
        [0.84036985, 0.86761153, 0.80269944, 0.87209218],
        [0.69733857, 0.93032391, 0.81018176, 0.74386275],
        [0.41280469, 0.59346427, 0.12186543, 0.97038267],
    ]
)
VALUES = np.array(
    [
        [0.74636963, 0.87301979, 0.14951819, 0.45018703],
        [0.64471524, 0.95888822, 0.22731667, 0.93179853],
        [0.54371212, 0.97139524, 0.2648877, 0.74728867],
        [0.76782001, 0.01404621, 0.1735202, 0.56182687],
    ]
)
WEIGHTS = [
    [1, 0, 0, 0],
    [0.49319, 0.50681, 0, 0],
    [0.29569882, 0.37327924, 0.33102193, 0],
    [0.21312847, 0.25532945, 0.15932655, 0.37221554],
]
OUTPUT = [
    [0.74636963, 0.87301979, 0.14951819, 0.45018703],
    [0.69485017, 0.91653877, 0.18894724, 0.69427255],
    [0.64134007, 0.93763712, 0.21674859, 0.72830976],
    [0.69610971, 0.59089504, 0.19669778, 0.66204689],
]


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
    ours, own_weights = lowtri.attention(q, k, v, "causal", return_weights=True)
    near(ours, output, 1e-12)
    near(own_weights, weights, 1e-12)
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
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 8, 10, 64)
    expected = lowtri.attention(q, k, v, "causal")
    scores = q @ k.mT / math.sqrt(64)
    additive, attend = plain.create_causal_mask(10, device="cpu"), plain.create_causal_mask_bool(10, device="cpu")
    for name, output in {
        "additive": torch.softmax(scores + additive, dim=-1) @ v,
        "boolean": plain.masked_attention_bool(scores, attend) @ v,
        "masked_fill": torch.softmax(scores.masked_fill(~attend, -math.inf), dim=-1) @ v,
        "function": plain.masked_self_attention(q, k, v, additive)[0],
        "fused": sdpa(q, k, v, is_causal=True),
        "lowtri with torch's signature": lowtri.scaled_dot_product_attention(q, k, v, is_causal=True),
    }.items():
        torch.testing.assert_close(
            output, expected, atol=2e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
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
    assert (weights[..., 0, :] == torch.eye(10)[0]).all()


def test_c_pictures_of_both_masks() -> None:
    lines = lowtri.full().draw(4, beside=lowtri.causal()).splitlines()
    assert [line.split() for line in lines[1:]] == [["████", row] for row in ("█···", "██··", "███·", "████")]
    table = lowtri.causal().draw(4, tokens="The black cat <end>", ticks=True).splitlines()
    assert [line.split() for line in table] == [
        ["The", "black", "cat", "<end>"],
        ["The", "✓", "✗", "✗", "✗"],
        ["black", "✓", "✓", "✗", "✗"],
        ["cat", "✓", "✓", "✓", "✗"],
        ["<end>", "✓", "✓", "✓", "✓"],
    ]


def follower(sentence: str) -> tuple[Any, list[str], dict[str, int]]:
    """A model that predicts, after each word of a sentence, the next word."""
    tokens, ids = words(sentence)

    def model(token_ids: np.ndarray) -> np.ndarray:
        return np.eye(len(tokens))[(token_ids + 1) % len(tokens)]

    return model, tokens, ids


@pytest.mark.parametrize("sentence", ["<start> The black cat", "[START] I love NLP"])  # the second is section D's
def test_c_generation_goes_step_by_step(sentence: str) -> None:
    model, tokens, ids = follower(sentence)
    shown = [tokens[0]]
    for token in lowtri.generate(model, [ids[tokens[0]]], max_new_tokens=len(tokens) - 1):
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
    difference = float(
        (bare - training).abs().max()
    )  # old positions see newer ones, and the next layer reads the result
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
    for mask, seen in ((lowtri.full(), lambda q: n), (lowtri.causal(), lambda q: q + 1)):
        lines = [line.split() for line in mask.draw(n, tokens=sentence, ticks=True).splitlines()]
        assert lines == [tokens] + [[tokens[q], *"✓" * seen(q), *"✗" * (n - seen(q))] for q in range(n)]


def family() -> dict[str, Any]:
    """Small models of four families with random weights, and for each a function from decoder ids to logits."""
    import transformers as hf

    ends: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    both: dict[str, Any] = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "vocab_size": 40} | ends
    both |= {
        f"{side}_{what}": 2 if what == "attention_heads" else 16 for side in ("encoder", "decoder") for what in _SIZES
    }
    torch.manual_seed(0)
    source, sound = torch.randint(3, 40, (1, 6)), torch.randn(1, 4, 16)
    gpt = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32))
    whisper = hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(**both, num_mel_bins=4, max_source_positions=8, max_target_positions=32)
    )
    t5 = hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_decoder_layers=2, num_heads=2, **ends)
    )
    bart = hf.BartForConditionalGeneration(hf.BartConfig(**both, max_position_embeddings=32))
    return {
        "GPT": (gpt, lambda ids: gpt(ids).logits),
        "Whisper": (whisper, lambda ids: _logits(whisper, ids, input_features=sound)),
        "T5": (t5, lambda ids: _logits(t5, ids, input_ids=source)),
        "BART": (bart, lambda ids: _logits(bart, ids, input_ids=source)),
    }


_SIZES = ("attention_heads", "ffn_dim")


def _logits(model: Any, ids: Tensor, **source: Tensor) -> Tensor:
    """Logits of a decoder with the same source for every row."""
    rows = {name: part.expand(len(ids), *part.shape[1:]) for name, part in source.items()}
    return model(decoder_input_ids=ids, **rows).logits


class OnLowtri:
    """An attention implementation of transformers that calls lowtri with a fixed mask for the decoder."""

    def __init__(self, decoder: str) -> None:
        self.decoder, self.calls = decoder, 0

    def __call__(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, **options: Any) -> tuple[Tensor, None]:
        assert mask is None
        self.calls += 1
        output = lowtri.attention(
            *(q, k, v, self.decoder if module.is_causal else "full"),
            scale=options.get("scaling"),
            bias=options.get("position_bias"),
        )
        return output.transpose(1, 2), None


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["GPT", "Whisper", "T5", "BART"])
def test_d_each_of_the_four_families_runs_on_lowtri_and_passes_the_audit(name: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    model, read = family()[name]
    model.eval()
    ids = torch.tensor([[1, 5, 9, 7, 3, 11, 4, 8]])
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = read(ids)
        for mask in ("causal", "full"):
            attention = OnLowtri(mask)
            AttentionInterface.register("on_lowtri", attention)
            AttentionMaskInterface.register("on_lowtri", lambda *_, **__: None)
            model.set_attn_implementation("on_lowtri")
            logits = read(ids)
            assert attention.calls >= 2
            if mask == "causal":
                torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
                lowtri.assert_causal(read, ids)
            else:
                assert (logits - expected).abs().max() > 1e-3


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
