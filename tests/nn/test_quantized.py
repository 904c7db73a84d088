"""Weights stored for generating: errors within the bounds that rounding gives, tokens independent of one another, clear refusals."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtri
from lowtri.cli.main import main
from lowtri.compat import torch_private as torch_quantized
from lowtri.errors import CallError, DataError
from lowtri.nn import Decoder, DecoderConfig, GPT2Config, RecurrentConfig, RecurrentLM
from lowtri.nn.attention import MultiHeadAttention
from lowtri.nn.checkpoint import load_named, save
from lowtri.nn.quantized import MEASURED, WEIGHTS, Choices, QuantizedLinear, quantize

pytestmark = pytest.mark.filterwarnings("error")

# Relative errors of a weight and of an input by rounding: half a unit over the number. int8 and its inputs have absolute units.
FLOATS = {"float32": (2.0**-22, 0.0), "bf16": (2.0**-8, 2.0**-8), "float16": (2.0**-11, 0.0)}


def bound(linear: nn.Linear, x: torch.Tensor, weights: str) -> torch.Tensor:
    """The greatest error of each output that rounding the weights and the inputs can cause, in float64."""
    w, x = linear.weight.double().abs(), x.double().abs()
    if weights == "int8":
        of_w = (w.amax(1, keepdim=True) / 127 / 2).expand_as(w)
        of_x = (x.amax(-1, keepdim=True) / 63 / 128 / 2).expand_as(x)
    else:
        of_w, of_x = w * FLOATS[weights][0], x * FLOATS[weights][1]
    sums = (x.shape[-1] + 4) * 2.0**-24 * (x @ w.T)  # in float32, one number after the other at worst
    # torch's bf16 product rounds its output, which the rounded weight and input have made greater.
    output = 2.0**-8 * (1 + 2.0**-8) ** 2 * (x @ w.T) if weights == "bf16" else 0
    denormal = 2.0**-24 * x.sum(-1, keepdim=True) if weights == "float16" else 0
    return x @ of_w.T + of_x @ w.T + of_x @ of_w.T + sums + output + denormal


def preferring(way: str) -> Choices:
    """This way, as if it had been the fastest; the first one of a kind of weights is "torch" where there are two."""
    return Choices(lambda ways: [[float((i == 0) != (way == "torch"))] * len(runs) for i, runs in enumerate(ways)])


FORMS = [(weights, way.name) for weights, form in WEIGHTS.items() for way in form.usable()]
WITHOUT_FBGEMM = [(weights, way.name) for weights, form in WEIGHTS.items() for way in form.ways if way.fbgemm is False]


@pytest.fixture
def no_fbgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch as on ARM, and nothing measured with another torch."""
    monkeypatch.setattr(torch_quantized, "why_no_fbgemm", lambda: "this build of torch has no FBGEMM")
    monkeypatch.setattr(MEASURED, "_known", {})


@pytest.mark.parametrize(("weights", "way"), WITHOUT_FBGEMM)
@pytest.mark.parametrize(("rows", "size", "width", "bias"), [(1, 24, 40, True), (37, 577, 333, False), (5, 1, 1, True)])
def test_without_fbgemm_errors_are_within_the_bound_of_rounding(no_fbgemm, weights, way, rows, size, width, bias):
    test_errors_are_within_the_bound_of_rounding(weights, way, rows, size, width, bias, 1e3)


def test_a_torch_without_its_8_bit_product_widens_blocks(no_fbgemm, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_quantized, "int8_product", lambda: None)
    test_errors_are_within_the_bound_of_rounding("int8", "torch", 3, 100, 20, True, 1.0)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_without_fbgemm_a_decoder_generates_with_every_kind_of_weights(no_fbgemm, weights):
    test_a_quantized_decoder_is_close_to_the_original("llama", weights)
    test_cached_decoding_is_the_full_forward_and_later_tokens_change_nothing(weights)
    test_a_row_does_not_change_another(weights)


@pytest.mark.parametrize(("weights", "way"), FORMS)
@pytest.mark.parametrize(("rows", "size", "width", "bias"), [(1, 24, 40, True), (37, 577, 33, False), (5, 1, 1, True)])
@pytest.mark.parametrize("largest", [1.0, 1e3])
def test_errors_are_within_the_bound_of_rounding(weights, way, rows, size, width, bias, largest):
    generator = torch.Generator().manual_seed(rows)
    linear = nn.Linear(size, width, bias=bias)
    x = torch.randn(2, rows, size, generator=generator)
    x[..., 0] *= largest  # language models have a few large inputs
    with torch.no_grad():
        expected = nn.functional.linear(x.double(), linear.weight.double(), None if not bias else linear.bias.double())
        output = QuantizedLinear(linear, weights, preferring(way))(x)
    assert output.shape == (2, rows, width)
    assert output.dtype == x.dtype
    error = (output.double() - expected).abs()
    assert (error <= bound(linear, x, weights) + 2.0**-22 * expected.abs()).all()
    # The bound holds for every case; at random the error is far below it, and weights of zero error would not be rounded.
    assert size == 1 or 0 < error.mean() < 0.5 * bound(linear, x, weights).mean()


@pytest.mark.parametrize("largest", [0.0, 1e-42, 3e-20, 1.0, 3e38])
def test_two_float16_numbers_hold_a_float32_weight(largest):
    linear = nn.Linear(64, 40, bias=False)
    with torch.no_grad():
        linear.weight.copy_(
            torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * 2.0 ** -torch.arange(64.0)
        )
        linear.weight.mul_(largest / linear.weight.abs().max())
        unit = torch.eye(64)  # the outputs are the weights themselves
        layer = QuantizedLinear(linear, "float32", preferring("two_float16"))
        output = torch.cat([layer(row[None]) for row in unit]).T
    error, weight = (output.double() - linear.weight.double()).abs(), linear.weight.double().abs()
    assert (error <= 2.0**-22 * weight + 2.0**-48 * largest + 2.0**-149).all()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_row_does_not_change_another(weights):
    torch.manual_seed(0)
    layer = QuantizedLinear(nn.Linear(64, 48), weights)
    x = torch.randn(6, 64)
    with torch.no_grad():
        alone = layer(x[:4])
        x[4], x[5] = 1e6, torch.nan
        output = layer(x)
        assert torch.equal(output[:4], alone) or (output[:4] - alone).abs().max() <= 2.0**-7 * alone.abs().max()
        if weights == "int8" and "fbgemm" in layer.products:
            assert torch.equal(output[:4], alone)
        assert output[5].isnan().all()
        assert torch.equal(layer(torch.zeros(1, 64))[0], layer.bias)
        assert layer(x[:0]).shape == (0, 48)


SIZES = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
KINDS = {
    "llama": DecoderConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen": DecoderConfig(**SIZES, qkv_bias=True, qk_norm=True, mlp_bias=True),
    "gpt2": GPT2Config(**SIZES, max_position_embeddings=64),
}


def decoder(kind: str) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(KINDS[kind]).eval()
    with torch.no_grad():  # larger weights than at the start of training, so that layers matter
        for name, weight in model.named_parameters():
            weight.mul_(4) if weight.ndim == 2 and "embed" not in name else weight.add_(0.1 * torch.randn_like(weight))
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_quantized_decoder_is_close_to_the_original(kind, weights):
    model, ids = decoder(kind), torch.from_numpy(np.random.default_rng(0).integers(0, 61, (2, 20)))
    with torch.no_grad():
        expected = model(ids)
    embedding = model.model.embed_tokens.weight
    assert model.quantize(weights) is model
    assert model.weights == weights
    assert model.model.embed_tokens.weight is embedding
    assert not [module for module in model.modules() if isinstance(module, nn.Linear)]
    output = model(ids)
    relative = float((output - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    # Each layer adds its rounding: 2^-9 for bf16, 2^-12 for float16, and 1/127 of about three standard deviations for int8.
    assert relative < {"float32": 1e-6, "bf16": 0.02, "float16": 2e-3, "int8": 0.04}[weights]
    assert relative > 1e-6 or weights == "float32"


@pytest.mark.parametrize("weights", WEIGHTS)
def test_cached_decoding_is_the_full_forward_and_later_tokens_change_nothing(weights):
    model, ids = decoder("llama").quantize(weights), torch.from_numpy(np.random.default_rng(1).integers(0, 61, (2, 20)))
    cache = model.make_cache(2)
    whole = model(ids)
    steps = torch.cat([model(ids[:, t : t + 1], cache=cache) for t in range(20)], 1)
    # The other order of sums can turn a rounding: by 2^-8 of an output in bf16, by 1/63/128 of a token's largest input in int8.
    allowed = {"bf16": 0.05, "int8": 2e-3, "float16": 1e-5, "float32": 1e-5}[weights]
    assert (steps - whole).abs().max() <= allowed * whole.abs().max()
    changed = ids.clone()
    changed[:, 12:] = (ids[:, 12:] + 7) % 61
    assert torch.equal(model(changed)[:, :12], whole[:, :12])
    if weights in ("float16", "float32"):  # the audit takes turned roundings for a difference
        assert lowtri.audit(model, ids).ok


def test_generate_runs_on_it_and_a_copy_is_independent():
    model = decoder("llama").quantize("float16")
    twin = copy.deepcopy(model)
    assert list(lowtri.generate(model, [3, 1, 4], 8)) == list(lowtri.generate(twin, [3, 1, 4], 8))


def test_every_dtype_of_the_rest():
    for dtype in (torch.bfloat16, torch.float64):
        model = decoder("qwen").to(dtype).quantize("int8")
        assert model(torch.tensor([[1, 2, 3]])).dtype is dtype


def test_it_refuses_training_and_saving(tmp_path: Path):
    model = decoder("llama").quantize("int8")
    for call in (model.state_dict, lambda: save(model, tmp_path), lambda: model.load_state_dict({})):
        with pytest.raises(CallError, match=r"cannot be saved or loaded\.\nFix: save the original"):
            call()
    assert not list(tmp_path.rglob("*.safetensors"))
    with pytest.raises(CallError, match=r"int8 weights cannot be trained. Fix: train the original"):
        model.train()
    assert not model.training
    x = torch.randn(2, 64, requires_grad=True)
    with pytest.raises(CallError, match=r"x requires gradients.*\nFix: train the original"):
        model.lm_head(x)
    with pytest.raises(CallError, match=r"int8 already\. Fix: load the original"):
        model.quantize("bf16")
    with pytest.raises(CallError, match=r"x is on meta.*Fix:"):
        model.lm_head(torch.randn(2, 64, device="meta"))


def test_arguments_that_do_not_fit():
    with pytest.raises(CallError, match="weights is 'int3'; expected one of float32, bf16, float16, int8"):
        decoder("llama").quantize("int3")
    for value, words in (
        (1e5, r"beyond float16's range\. Fix: weights='bf16'"),
        (torch.nan, r"NaN or infinity\. Fix:"),
    ):
        model = decoder("llama")
        with torch.no_grad():
            model.lm_head.weight[3, 5] = value
        with pytest.raises(CallError, match=words):
            model.quantize("float16")
    joined = MultiHeadAttention(16, 2)
    joined.fuse_projections()
    joined.fuse_projections()  # once is enough
    with pytest.raises(CallError, match=r"got a context, but its projections are joined.*\nFix: "):
        joined(torch.randn(2, 16), torch.randn(3, 16))


def test_the_engine_of_torch_is_left_as_it_was():
    before = torch.backends.quantized.engine
    decoder("llama").quantize("int8")
    assert torch.backends.quantized.engine == before


def test_the_command_line(tmp_path: Path, capsys: Any):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    save(decoder("llama"), tmp_path / "model", tokenizer)
    (tmp_path / "text.txt").write_text("a b c a b c", encoding="utf-8")
    model = str(tmp_path / "model")
    for weights in WEIGHTS:
        assert main(["generate", model, "a b", "--max-new-tokens", "3", "--weights", weights]) == 0
    capsys.readouterr()
    assert main(["eval", model, str(tmp_path / "text.txt"), "--weights", "int8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["at_once"]["perplexity"] > 1
    assert main(["generate", model, "a b", "--weights", "int3"]) == 2
    assert "Fix: float32, bf16, float16, int8" in capsys.readouterr().err
    save(RecurrentLM.from_config(RecurrentConfig(vocab_size=3)), tmp_path / "lstm", tokenizer)
    with pytest.raises(DataError, match=r"RecurrentLM, which cannot be quantized. Fix:"):
        load_named(tmp_path / "lstm", weights="int8")


def test_a_model_that_cannot_be_quantized_is_not_changed():
    model = decoder("qwen")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = 1e5
    before, state = str(model), {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(CallError, match=r"beyond float16's range\. Fix: weights='bf16'"):
        model.quantize("float16")
    assert str(model) == before
    assert model.weights is None
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())
    model.quantize("bf16")
    assert {layer.weights for layer in model.modules() if isinstance(layer, QuantizedLinear)} == {"bf16"}
    with pytest.raises(CallError, match=r"a weight is on meta\. Fix:"):
        decoder("llama").to("meta").quantize("int8")


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class DoubledNorm(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_layers_with_a_forward_or_hooks_of_their_own():
    ids, seen = torch.tensor([[3, 1, 4]]), []
    model = decoder("llama")
    model.lm_head = Doubled(64, 61, bias=False)
    with pytest.raises(CallError, match=r"lm_head is a Doubled with a forward or hooks of its own.*\nFix: .*merge"):
        model.quantize("float32")
    model = decoder("llama")
    handle = model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: seen.append(0))
    with pytest.raises(CallError, match=r"layers\.0\.self_attn\.q_proj is a Linear with a forward or hooks"):
        model.quantize("float32")
    handle.remove()
    norm = DoubledNorm(64, 1e-5)
    model.model.norm = norm
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        expected = model(ids)
        torch.testing.assert_close(model.quantize("float32")(ids), expected, rtol=1e-4, atol=1e-4)
    assert model.model.norm is norm
    assert seen == [1, 1]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_layer_owns_its_weight_and_refuses_what_it_cannot_compute(weights: str):
    linear, x = nn.Linear(8, 4), torch.randn(9, 8)
    layer = QuantizedLinear(linear, weights)
    with torch.no_grad():
        one, many = layer(x[:1]), layer(x)
        linear.weight.mul_(3)
        assert torch.equal(layer(x[:1]), one)
        assert torch.equal(layer(x), many)
    for wrong in (x[:, :7], x[0, 0], x.to(torch.complex64), torch.arange(8)):
        with pytest.raises(CallError, match=r"QuantizedLinear: x is .*; expected \(\.\.\., 8\) of floats"):
            layer(wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit
        with pytest.raises(CallError, match=r"forward mode.* Fix: the original model"):
            torch.func.jvp(layer, (x,), (x,))


# Which way runs is measured.


def test_the_fastest_way_runs_for_each_number_of_rows_and_each_shape():
    """Times of three models with two shapes: the second way has to save a tenth of the sum over the matrices of a shape."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(4, 8), nn.Linear(8, 16))
    asked: list[int] = []

    def measure(ways: Any) -> list[list[float]]:
        torch_runs, other_runs = ways
        assert len(torch_runs) == len(other_runs) == 4
        for run in (*torch_runs, *other_runs):  # equal products
            asked.append(run().shape[0])
        assert all((a() - b()).abs().max() < 1e-4 for a, b in zip(torch_runs, other_runs, strict=True))
        return [[1.0, 1.0, 1.0, 1.0], [0.5, 0.95, 0.89, 0.5]]

    choices = Choices(measure)
    quantize(model, "float32", choices)
    plain, packed = ("torch",) * 4, ("two_float16", "two_float16", "torch", "torch")
    assert [layer.products for layer in model] == [packed, plain, packed, packed]
    assert set(asked) == {1, 4}, "two products for each weight are no candidate for many rows"
    x, calls = torch.randn(64, 8), len(asked)
    with torch.no_grad():
        for rows in (0, 1, 3, 4, 5, 64):  # whatever runs, a row gives the same numbers up to rounding
            torch.testing.assert_close(model[0](x[:rows]), model[0](x)[:rows], rtol=1e-5, atol=1e-5)
        assert model[0](x[0]).shape == (16,)
    quantize(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), "float32", choices)
    assert len(asked) == calls, "known shapes are not measured again, so equal models get equal products"


def test_the_rows_of_a_product_choose_the_way():
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            ran.append(self.name)
            return x

    ran: list[str] = []
    layer = QuantizedLinear(nn.Linear(8, 8, bias=False), "int8")
    layer._products = tuple(map(Named, "abcd"))  # type: ignore[assignment]
    for rows in (0, 1, 2, 4, 5, 16, 17, 64, 1000):
        layer(torch.zeros(rows, 8))
    assert "".join(ran) == "aabbccddd"
    layer(torch.zeros(3, 5, 8))
    assert ran[-1] == "c"


def test_bf16_prompts_run_on_torchs_product_where_it_is_faster():
    for way, many in (("torch", "torch"), ("widened", "widened")):
        layer = QuantizedLinear(nn.Linear(8, 4), "bf16", preferring(way))
        assert layer.products == ("torch", "torch", many, many)
        assert f"weights=bf16, torch/torch/{many}/{many}" in repr(layer)


def test_a_large_matrix_is_timed_in_part():
    shapes: list[Any] = []
    large = torch.zeros(2**12, 2**10)
    choices = Choices(lambda ways: [[shapes.append(run().shape) or 1.0 for run in runs] for runs in ways])
    choices.learn("bf16", [large] * 9 + [torch.zeros(3, 5)])
    assert set(shapes) == {(16, 2**11), (64, 2**11), (16, 3), (64, 3)}
    assert len(shapes) == 2 * 2 * 4, "32 MB of the model are timed, and one matrix of each shape"


def test_the_default_dtype_of_a_program_changes_nothing():
    linear, x = nn.Linear(8, 4), torch.ones(2, 8)
    torch.set_default_dtype(torch.float64)
    try:
        layer = QuantizedLinear(linear, "bf16", Choices())
        assert layer(x).dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_without_fbgemm_float32_is_as_loaded(no_fbgemm):
    layer = QuantizedLinear(nn.Linear(8, 4), "float32", preferring("two_float16"))
    assert layer.products == ("torch",) * 4
