"""Modules of torch.nn, switched over: the outputs, weights and gradients that torch gives, in training and in evaluation."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtri.errors import CallError, EngineError
from lowtri.integrations import torch as door
from lowtri.integrations.torch import switch

B, L, S, E, H = 3, 5, 7, 16, 4
FUTURE = torch.ones(L, S, dtype=torch.bool).triu(2)  # True hides; every query sees a key
EACH = torch.rand(B * H, L, S, generator=torch.Generator().manual_seed(1)) < 0.5
EACH[..., 0] = False
PADS = torch.tensor([[False] * S, [False] * 4 + [True] * 3, [False] * 6 + [True]])
NUMBERS = torch.randn(L, S, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def infinite(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -math.inf)


ATTN_MASKS: dict[str, Tensor | None] = {
    "none": None,
    "bools": FUTURE,
    "bools of each head": EACH,
    "-inf": infinite(FUTURE),
    "numbers": NUMBERS,
    "numbers and -inf": NUMBERS.masked_fill(FUTURE, -math.inf),
    "numbers of each head": infinite(EACH) + NUMBERS,
}
PADDING: dict[str, Tensor | None] = {
    "none": None,
    "bools": PADS,
    "-inf": infinite(PADS),
    "numbers": torch.randn(B, S, generator=torch.Generator().manual_seed(3)).double().masked_fill(PADS, -math.inf),
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without biases": {"bias": False},
    "other sizes": {"kdim": 6, "vdim": 10},
    "a bias as key": {"add_bias_kv": True},
    "zeros as key": {"add_zero_attn": True, "add_bias_kv": True},
}


def module_of(kind: str, batch_first: bool = True, **options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(E, H, batch_first=batch_first, dtype=torch.float64, **KINDS[kind], **options)


def inputs_of(module: nn.MultiheadAttention) -> list[Tensor]:
    draw = torch.Generator().manual_seed(4)
    sizes = ((B, L, E), (B, S, module.kdim), (B, S, module.vdim))
    return [torch.randn(size, generator=draw, dtype=torch.float64, requires_grad=True) for size in sizes]


def answers(module: Any, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """Output, weights, and the gradients of inputs and parameters."""
    given = inputs if module.batch_first else [x.transpose(0, 1) for x in inputs]
    output, weights = module(*given, **options)
    output = output if module.batch_first else output.transpose(0, 1)
    leaves = [*inputs, *(p for _, p in sorted(module.named_parameters()))]
    size = output * torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=output.dtype)
    grads = torch.autograd.grad(size.sum() + (0 if weights is None else weights.square().sum()), leaves)
    return [output, *([] if weights is None else [weights]), *grads]


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Support for mismatched")  # torch converts one of the two masks
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_weights_and_gradients_are_torchs(kind: str) -> None:
    pairs = list(itertools.product(ATTN_MASKS, PADDING))
    for number, (attn, padding) in enumerate(pairs if kind == "plain" else pairs[::3]):
        module = module_of(kind, batch_first=number % 2 == 0)
        module.train(number % 3 > 0)
        options = {
            "attn_mask": ATTN_MASKS[attn],
            "key_padding_mask": PADDING[padding],
            "need_weights": number % 5 > 0,
            "average_attn_weights": number % 7 > 2,
        }
        expected = answers(module, inputs_of(module), **options)
        found = answers(switch(module, engine="formula" if number % 4 == 0 else "auto"), inputs_of(module), **options)
        same(found, expected)


@pytest.mark.filterwarnings("ignore:Support for mismatched")  # torch converts one of the two masks
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float64).min])
def test_numbers_that_hide_are_torchs(hidden: float, padded: bool) -> None:
    """The lowest number hides; two masks decide together whether a query sees any key."""
    attn = torch.zeros(L, S, dtype=torch.float64).masked_fill(torch.ones(L, S, dtype=torch.bool).triu(1), hidden)
    padding = torch.zeros(B, S, dtype=torch.float64)
    padding[0, :2] = hidden if hidden > -torch.inf or not padded else 0  # then the first queries see nothing
    for options in (
        {"attn_mask": attn},
        {"key_padding_mask": padding},
        {"attn_mask": attn, "key_padding_mask": padding},
    ):
        module = module_of("plain").eval()
        found, weights = switch(copy.deepcopy(module))(*inputs_of(module), **options)
        expected, expected_weights = module(*inputs_of(module), **options)
        if expected.isfinite().all():  # torch has no answer for a query that sees nothing
            same([found, weights], [expected, expected_weights])


@pytest.mark.parametrize("attn", [None, FUTURE, EACH[:H], NUMBERS])
def test_without_a_batch(attn: Tensor | None) -> None:
    module = module_of("plain")
    q, k, v = (x[1].detach() for x in inputs_of(module))
    for options in ({}, {"average_attn_weights": False}, {"need_weights": False}):
        every: dict[str, Any] = {"attn_mask": attn, "key_padding_mask": PADS[1], **options}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch converts one of the two masks
            expected = module(q, k, v, **every)
        found = switch(module)(q, k, v, **every)
        switch(module, back=True)
        same([x for x in found if x is not None], [x for x in expected if x is not None])


@pytest.mark.parametrize("length", [3, S, 9])  # the promise is_causal is about the top left corner
@pytest.mark.parametrize("need_weights", [False, True])
def test_the_hint_is_causal_replaces_the_mask(length: int, need_weights: bool) -> None:
    module = module_of("plain").eval()
    _, k, v = (x.detach() for x in inputs_of(module))
    q = torch.randn(B, length, E, dtype=torch.float64)
    future = torch.ones(length, S, dtype=torch.bool).triu(1)
    expected = module(q, k, v, attn_mask=future, need_weights=need_weights)
    masks: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(door, "read_pairs", lambda *args: masks.append(args))
        found = switch(module)(q, k, v, attn_mask=future, is_causal=True, need_weights=need_weights)
    assert masks == []  # O(L * S) were never read
    same([x for x in found if x is not None], [x for x in expected if x is not None])


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    size: dict[str, Any] = {"d_model": E, "nhead": H, "dim_feedforward": 32, "dropout": 0.0, "dtype": torch.float64}
    first: dict[str, Any] = {**size, "batch_first": True}
    return {
        "encoder layer": nn.TransformerEncoderLayer(**first),
        "encoder layer, norm first": nn.TransformerEncoderLayer(**first, norm_first=True),
        "encoder": nn.TransformerEncoder(nn.TransformerEncoderLayer(**first), 2),
        "decoder layer": nn.TransformerDecoderLayer(**first),
        "decoder": nn.TransformerDecoder(nn.TransformerDecoderLayer(**first, norm_first=True), 2),
        "transformer": nn.Transformer(**first, num_encoder_layers=1, num_decoder_layers=1),
    }


def run(name: str, layer: nn.Module, gradients: bool) -> list[Tensor]:
    draw = torch.Generator().manual_seed(6)
    x, memory = (torch.randn(B, n, E, generator=draw, dtype=torch.float64) for n in (L, S))
    future = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    with torch.set_grad_enabled(gradients), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        if name.startswith("encoder"):
            real = ~PADS
            found = [layer(memory, src_key_padding_mask=PADS)[real], layer(x, future, is_causal=True), layer(x, future)]
        elif name == "transformer":
            found = [layer(memory, x, tgt_mask=future, src_key_padding_mask=PADS, memory_key_padding_mask=PADS)]
        else:
            found = [layer(x, memory, tgt_mask=future, memory_key_padding_mask=PADS)]
        if gradients:
            found += torch.autograd.grad(sum(one.square().sum() for one in found), list(layer.parameters()))
    return found


@pytest.mark.parametrize("name", layers())
@pytest.mark.parametrize("mode", ["training", "evaluation", "inference"])
def test_layers_give_what_torch_gives(name: str, mode: str) -> None:
    layer = layers()[name].train(mode == "training")
    expected = run(name, layer, mode != "inference")
    calls: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        attention = door.attention
        patch.setattr(door, "attention", lambda *args, **options: calls.append(args) or attention(*args, **options))
        for fused in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
            patch.setattr(torch, fused, lambda *args: pytest.fail("torch's fused kernel ran"))
        same(run(name, switch(layer), mode != "inference"), expected)
    attentions = sum(isinstance(part, nn.MultiheadAttention) for part in layer.modules())
    assert len(calls) == attentions * (3 if name.startswith("encoder") else 1)
    switch(layer, back=True)
    parts = [part for part in layer.modules() if isinstance(part, nn.MultiheadAttention)]
    assert {type(part) for part in parts} == {nn.MultiheadAttention}
    same(run(name, layer, mode != "inference"), expected)


def test_torchs_fused_kernel_runs_before_the_switch() -> None:
    """Else the test above would pass without looking."""
    layer = layers()["encoder layer"].eval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: "fused")
        with torch.no_grad():
            assert layer(torch.randn(B, L, E, dtype=torch.float64)) == "fused"
            assert isinstance(switch(layer)(torch.randn(B, L, E, dtype=torch.float64)), Tensor)


def test_a_query_that_sees_nothing_gives_the_bias_of_the_projection() -> None:
    module = module_of("plain")
    nn.init.normal_(module.out_proj.bias)
    hidden = FUTURE.clone()
    hidden[0] = True
    inputs = inputs_of(module)
    assert module(*inputs, attn_mask=hidden)[0][:, 0].isnan().all()
    output, weights = switch(module)(*inputs, attn_mask=hidden)
    torch.testing.assert_close(output[:, 0], module.out_proj.bias.expand(B, E))
    assert not weights[:, 0].any()
    grads = torch.autograd.grad(output.sum(), [*inputs, *module.parameters()])
    assert all(grad.isfinite().all() for grad in grads) and not grads[0][:, 0].any()


def test_dropout_with_weights_draws_torchs_numbers() -> None:
    module = module_of("plain", dropout=0.4)
    torch.manual_seed(7)
    expected = answers(module, inputs_of(module), attn_mask=FUTURE)
    torch.manual_seed(7)
    found = answers(switch(module), inputs_of(module), attn_mask=FUTURE)
    same(found, expected)


def test_dropout_without_weights_has_torchs_mean_and_spread() -> None:
    module = module_of("plain", dropout=0.4)
    inputs = [x.detach()[:1].expand(3000, -1, -1) for x in inputs_of(module)]
    with torch.no_grad():
        exact = module.eval()(*inputs, need_weights=False)[0][0]
        module.train()
        torch.manual_seed(8)
        theirs = module(*inputs, need_weights=False)[0]
        ours = switch(module)(*inputs, need_weights=False)[0]
    error = theirs.std(0) / 3000**0.5  # of the mean
    assert ((ours.mean(0) - exact).abs() < 6 * error).all()
    assert (ours.std(0) / theirs.std(0) > 0.9).all() and (ours.std(0) / theirs.std(0) < 1.1).all()


def test_copies_and_pickles_are_switched_too() -> None:
    model = switch(layers()["transformer"].eval())
    expected = run("transformer", model, False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.load_state_dict(model.state_dict())
        assert all(torch.equal(*pair) for pair in zip(run("transformer", other, False), expected, strict=True))
        attention = other.encoder.layers[0].self_attn
        assert isinstance(attention, nn.MultiheadAttention) and attention.lowtri_engine == "auto"
        assert type(switch(other, back=True).encoder.layers[0].self_attn) is nn.MultiheadAttention
    assert model.encoder.layers[0].self_attn.lowtri_engine == "auto"


def test_a_second_switch_changes_the_engine() -> None:
    module = switch(switch(module_of("plain")), engine="sdpa")
    with pytest.raises(EngineError, match=r'engine "sdpa" cannot run this call(.|\n)*it does not return weights'):
        module(*inputs_of(module))
    assert type(switch(module, back=True)) is nn.MultiheadAttention


def test_masks_that_are_passed_again_are_read_once() -> None:
    encoder, x = switch(layers()["encoder"]), torch.randn(B, L, E, dtype=torch.float64)
    future = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    read, seen = door.read_pairs, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(door, "read_pairs", lambda *args: seen.append(read(*args)) or seen[-1])
        encoder(x, future, is_causal=False)
    masks = [mask for mask, _bias, _positions in seen]
    assert len(masks) == 2 and masks[0] is masks[1] and repr(masks[0]) == "causal"


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("name", ["encoder layer", "decoder layer"])
def test_compiled_layers_give_the_same(name: str) -> None:
    layer = switch(layers()[name].eval())
    expected = run(name, layer, True)
    same(run(name, torch.compile(layer, backend="aot_eager", fullgraph=True), True), expected)


# What is refused.


class Own(nn.MultiheadAttention):
    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options)


class Named(nn.MultiheadAttention):
    """A subclass without a forward of its own."""


def test_what_cannot_be_switched_is_named_and_nothing_is_switched() -> None:
    model = nn.ModuleList([module_of("plain"), Own(E, H)])
    with pytest.raises(EngineError, match=r"switch: Own has a forward of its own.*\nFix: leave this model to torch"):
        switch(model)
    assert type(model[0]) is nn.MultiheadAttention
    with pytest.raises(EngineError, match=r"switch: Linear contains no nn\.MultiheadAttention"):
        switch(nn.Linear(2, 2))
    assert isinstance(pickle.loads(pickle.dumps(switch(Named(E, H)))), Named)


def test_nested_tensors_are_declined() -> None:
    module = switch(module_of("plain"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        nested = torch.nested.nested_tensor([torch.randn(3, E), torch.randn(5, E)], dtype=torch.float64)
    with pytest.raises(
        CallError, match=r"query is a nested tensor.*\nFix: query\.to_padded_tensor\(0\.0\), and key_padding"
    ):
        module(nested, nested, nested)


X, BOOLS = torch.zeros(L, B, E), torch.bool
SHAPES = "all have 3 dimensions, or 2 without a batch"
ROWS = "Fix: as many rows, and a value for each key"
LAST = "Fix: a last dimension of 16, the module's size"
KINDS_OF_MASKS = "Fix: bools, True = hidden, or floats to add to the scores"
REJECTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "four dimensions": ((X[None], X[None], X[None]), r"query \(1, 5, 3, 16\), key .*" + SHAPES),
    "one dimension": ((X[0, 0], X[0, 0], X[0, 0]), SHAPES),
    "a key without a batch": ((X, X[:, 0], X[:, 0]), r"query \(5, 3, 16\), key \(5, 16\).*" + SHAPES),
    "size": ((X[..., 1:], X[..., 1:], X[..., 1:]), r"query is \(5, 3, 15\)\. " + LAST),
    "size of the key": ((X, X[..., 1:], X), "key is .*" + LAST),
    "size of the value": ((X, X, X[..., 1:]), "value is .*" + LAST),
    "fewer values than keys": ((X, X, X[1:]), r"value \(4, 3, 16\)\. " + ROWS),
    "fewer rows of values": ((X, X, X[:, 1:]), ROWS),
    "fewer rows of keys": ((X, X[:, 1:], X[:, 1:]), ROWS),
    "shape of attn_mask": (
        (X, X, X, None, True, torch.zeros(L, L + 1)),
        r"attn_mask is \(5, 6\); expected \(5, 5\) or \(12, 5, 5\)",
    ),
    "heads of attn_mask": ((X, X, X, None, True, torch.zeros(B, L, L)), r"attn_mask is \(3, 5, 5\); expected"),
    "dimensions of attn_mask": ((X, X, X, None, True, torch.zeros(1, 1, L, L)), "attn_mask is .*; expected"),
    "integers as attn_mask": (
        (X, X, X, None, True, torch.zeros(L, L, dtype=torch.long)),
        r"attn_mask is torch\.int64\. " + KINDS_OF_MASKS,
    ),
    "shape of the padding": (
        (X, X, X, torch.zeros(B, L + 1, dtype=BOOLS)),
        r"key_padding_mask is \(3, 6\); expected \(3, 5\)",
    ),
    "padding without a batch": ((X, X, X, torch.zeros(L, dtype=BOOLS)), r"key_padding_mask is \(5,\); expected"),
    "integers as padding": ((X, X, X, torch.zeros(B, L, dtype=torch.long)), "key_padding_mask is .*" + KINDS_OF_MASKS),
    "a batch of padding": (
        (X[:, 0], X[:, 0], X[:, 0], torch.zeros(1, L, dtype=BOOLS)),
        r"key_padding_mask is \(1, 5\); expected \(5,\)",
    ),
    "is_causal alone": (
        (X, X, X, None, True, None, True, True),
        r"is_causal=True without attn_mask, .*Fix: attn_mask=",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_torch_rejects_raises_its_class_too(name: str) -> None:
    module = nn.MultiheadAttention(E, H)
    arguments, words = REJECTED[name]
    with pytest.raises((AssertionError, RuntimeError)) as torchs:
        module(*arguments)
    with pytest.raises(CallError, match=rf"^nn\.MultiheadAttention: .*{words}") as ours:
        switch(module)(*arguments)
    assert isinstance(ours.value, torchs.type)


def test_what_torch_would_take_or_misread_is_named() -> None:
    module, x = switch(nn.MultiheadAttention(E, H, kdim=4)), X
    odd = nn.Parameter(NUMBERS).as_subclass(type("Odd", (Tensor,), {}))
    wrong: list[tuple[tuple[Any, ...], Any, str]] = [
        ((x.numpy(), x, x), None, r"query is ndarray\. Fix: a torch tensor"),
        ((x, x, x), None, r"key is \(5, 3, 16\)\. Fix: a last dimension of 4"),
        ((x, x[..., :4], x), "causal", r"attn_mask is str\. Fix: a torch tensor, True = hidden"),
        ((x, x[..., :4], x), odd, "attn_mask is a"),
    ]
    for inputs, mask, words in wrong:
        with pytest.raises(CallError, match=words):
            module(*inputs, attn_mask=mask)


@pytest.mark.parametrize("model", [None, "model", nn.MultiheadAttention])
def test_only_models_are_switched(model: Any) -> None:
    with pytest.raises(EngineError, match="Fix: an instance"):
        switch(model)


def test_an_unknown_engine_is_named_before_anything_is_switched() -> None:
    module = nn.MultiheadAttention(8, 2)
    with pytest.raises(EngineError, match="there is no engine 'fast'"):
        switch(module, engine="fast")
    assert type(module) is nn.MultiheadAttention
