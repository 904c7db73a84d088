"""The Attend of x-transformers, switched over: the outputs and gradients that it gives."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtri.errors import CallError, EngineError
from lowtri.integrations.torch import switch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it uses torch.jit.script, which torch deprecates
    from x_transformers import Decoder, Encoder, TransformerWrapper
    from x_transformers.attend import Attend

B, H, N = 2, 6, 9
OPTIONS: dict[str, dict[str, Any]] = {  # tests/verifying/test_matrix.py has each option alone
    "flash": {"causal": True, "flash": True},
    "clamped, with sinks": {
        **{"causal": True, "softclamp_logits": True, "logit_softclamp_value": 1.5},
        **{"head_learned_sink": True, "heads": H},
    },
    "zeros as key": {"add_zero_kv": True, "scale": 0.7, "qk_norm": True},
}
PADS = torch.ones(B, N, dtype=torch.bool)
PADS[0, 6:] = False
EACH = torch.rand(B, H, N, N, generator=torch.Generator().manual_seed(1)) < 0.6
EACH[..., 0] = True
MASKS = {"none": None, "padding": PADS, "padding in four": PADS[:, None, None], "each head": EACH}


def qkv(kv_heads: int, queries: int = N) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((B, H, queries, 8), (B, kv_heads, N, 8), (B, kv_heads, N, 4))
    return [torch.randn(shape, generator=draw, requires_grad=True) for shape in shapes]


def answers(attend: Attend, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    output, _ = attend(*inputs, **options)
    leaves = [*inputs, *attend.parameters()]
    return [output, *torch.autograd.grad(output.square().sum(), leaves)]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_outputs_and_gradients_are_theirs(name: str, kv_heads: int) -> None:
    for mask, biased, queries in itertools.product(MASKS, (False, True), (N, 4, 1)):
        attend = Attend(**OPTIONS[name])
        options: dict[str, Any] = {"mask": MASKS[mask]}
        if mask == "each head":
            options["mask"] = EACH[:, :, N - queries :]
        if biased and "clamped" not in name:
            options["attn_bias"] = torch.randn(H, queries, N, generator=torch.Generator().manual_seed(2))
        inputs = qkv(kv_heads, queries)
        for p in attend.parameters():
            torch.nn.init.normal_(p)
        expected = answers(attend, inputs, **options)
        close(answers(switch(attend), inputs, **options), expected)


def test_a_whole_decoder_trains_the_same() -> None:
    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=2, heads=4, attn_kv_heads=2, attn_dim_head=8, rotary_pos_emb=True, attn_dropout=0.0)
    model = TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers)
    ids, real = torch.randint(50, (2, 12)), torch.ones(2, 12, dtype=torch.bool)
    real[0, 9:] = False
    found = []
    for _ in range(2):
        logits = model(ids, mask=real)[real]
        found.append(
            [logits, *torch.autograd.grad(logits.square().mean(), list(model.parameters()), allow_unused=True)]
        )
        switch(model)
    used = [pair for pair in zip(*found, strict=True) if pair[0] is not None]
    close([one for _, one in used], [one for one, _ in used])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sigmoid": True}, "a function other than softmax"),
        ({"sparse_topk": 2}, "a function other than softmax"),
        ({"heads": H, "pre_talking_heads": True}, "pre_softmax_talking_heads"),
        ({"causal": True, "selective": True}, "selective"),
        ({"l2_distance": True}, "l2_distance"),
    ],
)
def test_other_formulas_are_declined(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(EngineError, match=rf"switch: Attend has {reason}, which lowtri's attention does not compute"):
        switch(Attend(**options))


def test_what_depends_on_scores_is_declined() -> None:
    model = Encoder(dim=16, depth=2, heads=2, attn_dim_head=8, residual_attn=True)
    with pytest.raises(EngineError, match="switch: residual_attn=True adds the scores of an earlier layer"):
        switch(model)
    attend, (q, k, v) = switch(Attend(softclamp_logits=True)), qkv(H)
    with pytest.raises(CallError, match=r"got attn_bias with softclamp_logits.*\nFix: switch\(model, back=True\)"):
        attend(q, k, v, attn_bias=torch.zeros(H, N, N))
    with pytest.raises(CallError, match="got prev_attn"):
        attend(q, k, v, prev_attn=torch.zeros(B, H, N, N))
