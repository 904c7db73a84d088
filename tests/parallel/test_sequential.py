"""SequentialShards: losses and gradients of the whole row at once, in the memory of one shard."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mesh_on_ranks import sequential_gradients
from random_masks import HEADS, ROWS
from ranks import Ranks
from rounding import assert_same
from shard_cases import shard_masks

import lowtri
from lowtri import masks as lt
from lowtri.errors import CallError
from lowtri.nn import Decoder, DecoderConfig
from lowtri.parallel import SequentialShards, plan_shards


def two_layers(x: torch.Tensor, weights: list[torch.Tensor], attention: Callable[..., Any]) -> torch.Tensor:
    """Two layers of attention, the second with the keys of the first's output, and a number for each token."""
    for weight in weights:
        q, k, v = (x @ weight).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (B, H, N, D)
        output, lse = attention(q, k, v)
        x = torch.tanh(x + output.transpose(1, 2).flatten(2) + lse.clamp(-1, 1).transpose(1, 2).repeat(1, 1, 4))
    return x.square().sum(-1)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(shard_masks, st.integers(1, 300), st.integers(1, 6), st.data())
def test_gradients_of_random_causal_masks(mask: lt.Mask, n: int, shards: int, data: st.DataObject) -> None:
    mask = lt.causal() & mask
    weigh = data.draw(st.booleans(), "bias")
    source = torch.Generator().manual_seed(data.draw(st.integers(0, 9), "seed"))
    x = torch.randn(ROWS, n, 4 * HEADS, generator=source, dtype=torch.float64)
    weights = [torch.randn(4 * HEADS, 12 * HEADS, generator=source, dtype=torch.float64) / 3 for _ in range(2)]
    table, sinks = torch.randn(64, generator=source).double(), torch.randn(HEADS, generator=source).double()
    leaves = [*weights, x, sinks, table]
    for leaf in leaves:
        leaf.requires_grad_()

    def bias(q: Any, k: Any) -> torch.Tensor:
        return table[(q - k).abs().clamp(max=63)]

    positions = torch.arange(n)

    def whole() -> list[torch.Tensor]:
        loss = two_layers(
            x,
            weights,
            lambda q, k, v: lowtri.attention(
                q, k, v, mask, return_lse=True, engine="formula", sinks=sinks, q_positions=positions,
                k_positions=positions, bias=bias(positions[:, None], positions[None, :]) if weigh else None,
            ),
        ).sum()  # fmt: skip
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        return [loss.detach(), *gradients]

    view = SequentialShards(plan_shards(mask, n, shards, block=64, way="contiguous"))

    def loss() -> torch.Tensor:
        def attention(q: Any, k: Any, v: Any) -> Any:
            options = {"bias": bias if weigh else None, "sinks": sinks, "engine": "formula"}
            return view.attention(q, k, v, return_lse=True, **options)

        return two_layers(view.shard(x), weights, attention).sum()

    value = view.evaluate(loss)
    assert all(leaf.grad is None for leaf in leaves)
    total = view.backward(loss)
    torch.testing.assert_close(value, total, rtol=ROWS * n * torch.finfo(torch.float64).eps, atol=0)
    results = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    # A number of the table is added in all pairs at its distance, any other number at most once for each token.
    assert_same([total, *results], whole, leaves, terms=ROWS * n * (HEADS * n if weigh else 1))


def decoder(mask: str, **options: Any) -> Decoder:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = DecoderConfig(vocab_size=40, num_key_value_heads=2, mask=mask, **sizes, **options)
    return Decoder(config).double()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return named


@pytest.mark.parametrize("mask", ["causal & window(100)", "causal", "causal & (window(70) | first(10))"])
def test_a_training_step_of_a_decoder(mask: str) -> None:
    model, ids = decoder(mask), torch.randint(40, (2, 901), generator=torch.Generator().manual_seed(1))
    targets = ids[:, 1:].clone()
    targets[:, :300] = -100
    names, weights = zip(*model.named_parameters(), strict=True)

    def whole() -> list[torch.Tensor]:
        value = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), targets.flatten())
        return [value.detach(), *torch.autograd.grad(value, weights)]

    shards = SequentialShards(plan_shards(mask, 900, 5, block=64, way="contiguous"))
    count = (targets >= 0).sum()

    def loss() -> torch.Tensor:
        keep = 0 if torch.is_grad_enabled() else 1  # the first pass needs no logits
        logits = model(shards.shard(ids[:, :-1]), positions=shards.positions, attend=shards.attend, logits_to_keep=keep)
        if not torch.is_grad_enabled():
            return logits
        return F.cross_entropy(logits.flatten(0, 1), shards.shard(targets).flatten(), reduction="sum") / count

    value, found = shards.backward(loss), gradients(model)
    assert_same([value, *(found[name] for name in names)], whole, weights, terms=2 * 900)


def test_dropout_draws_the_same_numbers_in_both_passes() -> None:
    """A finite difference along the gradient: the loss with the same seed."""
    model = decoder("causal & window(30)")
    for layer in model.model.layers:
        layer.input_layernorm = torch.nn.Sequential(layer.input_layernorm, torch.nn.Dropout(0.3))
    ids = torch.randint(40, (1, 257), generator=torch.Generator().manual_seed(1))
    shards = SequentialShards(plan_shards(model.mask, 256, 4, block=64, way="contiguous"))

    def loss() -> torch.Tensor:
        logits = model(shards.shard(ids[:, :-1]), positions=shards.positions, attend=shards.attend)
        return F.cross_entropy(logits.flatten(0, 1), shards.shard(ids[:, 1:]).flatten(), reduction="sum")

    def value() -> float:
        torch.manual_seed(3)
        return float(shards.backward(loss))

    value()
    after = torch.rand(1)
    grads = gradients(model)
    slope = sum(float(gradient.square().sum()) for gradient in grads.values())
    step, values = 1e-5 / slope, []
    for sign in (1, -2):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += sign * step * grads[name]
        values.append(value())
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=1e-5)
    torch.manual_seed(3)
    assert torch.rand(1) != after, "random numbers go on after the step"


def test_layers_with_different_masks() -> None:
    near, far = lt.causal() & lt.window(40), lt.causal()
    weights = [torch.randn(6, 6, dtype=torch.float64).requires_grad_() for _ in range(2)]
    x = torch.randn(1, 300, 6, dtype=torch.float64)

    def layers(x: torch.Tensor, attention: Callable[..., Any]) -> torch.Tensor:
        for weight, mask in zip(weights, (near, far), strict=True):
            y = (x @ weight)[:, None]
            x = x + attention(y, y, y, mask)[:, 0]
        return x.square().sum()

    def whole() -> list[torch.Tensor]:
        return list(torch.autograd.grad(layers(x, lowtri.attention), weights))

    shards = SequentialShards(plan_shards([near, far], 300, 3, block=64, way="contiguous"))
    shards.backward(lambda: layers(shards.shard(x), shards.attention))
    assert_same([weight.grad for weight in weights], whole, [x, *weights], terms=300)


def test_a_row_keeps_the_window_of_each_shard() -> None:
    """What a layer keeps for later shards: the tokens that the plan sends, not the row."""
    plan = plan_shards("causal & window(65)", 1024, 4, block=64, way="contiguous")
    shards, sizes = SequentialShards(plan), []

    def loss() -> torch.Tensor:
        x = shards.shard(torch.ones(1, 1, 1024, 8), 2).requires_grad_()
        output = shards.attention(x, x, x)
        layer = shards._step.layers[0]
        sizes.append(sum(tensor.shape[2] for pair in layer.kept.values() for tensor in pair))
        return output.sum()

    shards.backward(loss)
    assert sizes == [2 * 64, 4 * 64, 6 * 64, 6 * 64, 4 * 64, 2 * 64, 0]


def test_half_types_add_gradients_in_float32() -> None:
    plan = plan_shards("causal", 256, 4, block=64, way="contiguous")
    shards = SequentialShards(plan)
    x = torch.randn(1, 1, 256, 8, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    y = x.detach().double().requires_grad_()
    lowtri.attention(y, y, y, "causal", engine="formula").sum().backward()

    def loss() -> torch.Tensor:
        mine = shards.shard(x, 2)
        return shards.attention(mine, mine, mine).sum()

    shards.backward(loss)
    assert x.grad.dtype == torch.bfloat16
    error = (x.grad.double() - y.grad).abs().max() / y.grad.abs().max()
    assert error < 3 * torch.finfo(torch.bfloat16).eps


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at every tensor it meets
def test_a_compiled_layer_is_not_compiled_again_for_each_shard() -> None:
    shards = SequentialShards(plan_shards("causal", 512, 8, block=64, way="contiguous"))
    x, graphs = torch.randn(1, 1, 512, 8, generator=torch.Generator().manual_seed(0)), []

    def layer(x: torch.Tensor) -> torch.Tensor:
        return shards.attention(x, x, x).square().sum()

    def counting(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    gradients = []
    for run in (layer, torch.compile(layer, backend=counting)):
        leaf = x.clone().requires_grad_()
        shards.backward(lambda run=run, leaf=leaf: run(shards.shard(leaf, 2)))
        gradients.append(leaf.grad)
    assert torch.equal(*gradients) and 0 < len(graphs) <= 4


# Errors.


def test_shards_that_need_each_other() -> None:
    for plan in (plan_shards("causal", 1024, 4), plan_shards("full", 1024, 2, way="contiguous")):
        with pytest.raises(CallError, match=r"(?s)shards 0, 1.*need each other's keys.*way=\"contiguous\""):
            SequentialShards(plan)
    alone = lt.documents(lengths=[128, 128, 256])
    assert SequentialShards(plan_shards(alone, 512, 2, block=64, way="contiguous"))._order == [0, 1]
    pairs = lt.causal() & lt.documents(lengths=[256, 256])  # 2 needs nothing, and still comes after 1
    assert SequentialShards(plan_shards(pairs, 512, 4, block=128, way="contiguous"))._order == [0, 1, 2, 3]
    backwards = np.array([2, 2, 1, 1, 0, 0])  # owners in any order, if one can be first
    plan = plan_shards("causal", 384, 3, block=64, owner=backwards)
    assert SequentialShards(plan)._order == [2, 1, 0]


def _checkpointed(shards: SequentialShards, x: torch.Tensor) -> torch.Tensor:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return shards.attention(x, x, x).sum()

    return torch.utils.checkpoint.checkpoint(layer, shards.shard(x, 2), use_reentrant=False)


def _calls_by_shard(shards: SequentialShards, x: torch.Tensor, first: int, later: int) -> torch.Tensor:
    x = shards.shard(x, 2)
    for _ in range(first if shards.positions[0] == 0 else later):
        x = x + shards.attention(x, x, x)
    return x.sum()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda s, x: s.shard(x, 2), r"loss\(\) returned \(1, 1, 128, 8\), requires_grad=True.*a sum over tokens"),
        (lambda s, x: x.detach().sum(), "requires_grad=False"),
        (lambda s, x: 0.0, "float"),
        (lambda s, x: s.attention(x, x, x).sum(), r"q is \(1, 1, 256, 8\).*128 tokens.*shards.shard"),
        (lambda s, x: s.attention(x, x, x, "full").sum(), "q is"),
        (
            lambda s, x: s.attention(*[s.shard(x, 2)] * 3, "full").sum(),
            "mask is full, but the plan was made for causal",
        ),
        (lambda s, x: s.attend(*[s.shard(x, 2)] * 3, "causal").sum(), "q_positions are not.*attend=shards.attend"),
        (_checkpointed, "not in gradient checkpointing.*more shards"),
        (lambda s, x: _calls_by_shard(s, x, 1, 2), "shard 1 are more than 1.*same calls"),
        (lambda s, x: _calls_by_shard(s, x, 2, 1), "shard 1 are 1, but an earlier one 2"),
    ],
)
def test_errors(loss: Any, words: str) -> None:
    shards = SequentialShards(plan_shards("causal", 256, 2, block=64, way="contiguous"))
    x = torch.randn(1, 1, 256, 8).requires_grad_()
    with pytest.raises(CallError) as raised:
        shards.backward(lambda: loss(shards, x))
    assert re.search(words, str(raised.value), re.S), raised.value
    # The next step begins anew.
    shards.backward(lambda: _calls_by_shard(shards, x, 1, 1))
    with pytest.raises(CallError, match="only in the function that backward"):
        shards.attention(x, x, x)


def test_an_evaluation_needs_a_number_of_each_shard() -> None:
    shards, x = SequentialShards(plan_shards("causal", 256, 2, block=64, way="contiguous")), torch.ones(1, 1, 256, 8)
    with pytest.raises(CallError, match=r"loss\(\) returned <class 'NoneType'>.*one number"):
        shards.evaluate(lambda: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(CallError, match="shard 1 are more than 1"):
        shards.evaluate(lambda: _calls_by_shard(shards, x, 1, 2))
    assert shards.evaluate(lambda: _calls_by_shard(shards, x, 1, 1)) == 2 * 256 * 8


def test_the_gradients_of_processes_are_averaged_once(ranks: Ranks) -> None:
    """By DDP, with and without no_sync; and by FSDP."""
    for found in ranks.run(sequential_gradients):
        assert found["every"][0] < 1e-5 and found["every"][1] == 4 * found["once"][1]
        assert found["once"][0] < 1e-5 and found["fsdp"][0] < 1e-5


def test_losses_that_the_caller_keeps_stay_as_they_are() -> None:
    model = decoder("causal & window(100)")
    ids = torch.randint(40, (1, 257), generator=torch.Generator().manual_seed(0))
    shards, kept = SequentialShards(plan_shards(model.mask, 256, 4, way="contiguous")), []

    def loss() -> torch.Tensor:
        logits = model(shards.shard(ids[:, :-1]), positions=shards.positions, attend=shards.attend)
        value = F.cross_entropy(logits.flatten(0, 1), shards.shard(ids[:, 1:]).flatten(), reduction="sum")
        if torch.is_grad_enabled():
            kept.append(value.detach())
        return value

    torch.testing.assert_close(shards.backward(loss), sum(kept))
