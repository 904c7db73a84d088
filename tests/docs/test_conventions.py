"""Rows of docs/conventions.md that no other test proves: what an argument means in another library, and in lowtri."""

from __future__ import annotations

import copy
import math
import re
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, T5Config
from transformers.masking_utils import (
    eager_mask,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
from transformers.models.llama.modeling_llama import repeat_kv
from transformers.models.t5.modeling_t5 import T5Attention

import lowtri
from lowtri.integrations import flex as lowtri_flex
from lowtri.integrations import torch as lowtri_torch
from lowtri.integrations import transformers as lowtri_transformers
from lowtri.masks import band, causal, heads, keys, table, window

N = 6
TRIANGLE = torch.ones(N, N, dtype=torch.bool).tril()


def qkv(heads: int = 2, n: int = N, size: int = 8, kv_heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Random float64 inputs, (2, heads, n, size)."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, h, n, size) for h in (heads, kv_heads or heads, kv_heads or heads)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v


def same(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


def torchs_flex(*arguments, **options):
    """torch's FlexAttention without its compiler, which takes seconds for each call."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # return_lse will be removed
        patch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        return flex_attention(*arguments, **options)


def flex(q: Tensor, k: Tensor, v: Tensor, mask_mod=None, score_mod=None, **options) -> Tensor:
    """torch's FlexAttention as its plain formula, on CPU; lowtri's function of the same name gives the same."""
    made_for = (None, q.shape[1], q.shape[2], k.shape[2])
    blocks = None if mask_mod is None else create_block_mask(mask_mod, *made_for, device="cpu")
    theirs = torchs_flex(q, k, v, block_mask=blocks, score_mod=score_mod, **options)
    same(theirs, lowtri_flex.flex_attention(q, k, v, score_mod, blocks, **options))
    return theirs


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options) -> tuple[Tensor, Tensor]:
    """The eager attention of transformers; the output as (B, H, N, D)."""
    module = types.SimpleNamespace(num_key_value_groups=1, head_dim=q.shape[-1], training=False)
    output, weights = eager_attention_forward(module, q, k, v, mask, **options)
    return output.transpose(1, 2), weights


SMALL = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "pad_token_id": None}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL)).eval()


# What True means.


def test_true_in_transformers() -> None:
    """The table of transformers for a row that ends with two pads."""
    real = torch.tensor([[1, 1, 1, 1, 0, 0]])
    ours = causal() & keys(real.numpy() == 1)
    theirs = sdpa_mask(1, N, N, attention_mask=real.bool(), allow_is_causal_skip=False)
    np.testing.assert_array_equal(theirs[:, 0].numpy(), ours.dense(N))


# Window sizes.


def test_window_in_lowtri() -> None:
    assert window(3).dense(9)[8].sum() == 3
    assert band(3, 2).dense(9)[4].sum() == 3 + 1 + 2


def test_window_as_a_torch_table() -> None:
    np.testing.assert_array_equal(torch.ones(9, 9).tril().triu(-3 + 1).numpy() == 1, window(3).dense(9))


def test_window_in_flex_attention() -> None:
    q, k, v = qkv()
    theirs = flex(q, k, v, lambda b, h, i, j: (i >= j) & (i - j <= 3))
    same(theirs, lowtri.attention(q, k, v, window(3 + 1)))


def test_window_in_transformers() -> None:
    theirs = sdpa_mask(1, 9, 9, mask_function=sliding_window_causal_mask_function(3), allow_is_causal_skip=False)
    np.testing.assert_array_equal(theirs[0, 0].numpy(), window(3).dense(9))


def test_window_in_bidirectional_transformers() -> None:
    reach = sliding_window_bidirectional_mask_function(3)
    theirs = sdpa_mask(1, 9, 9, mask_function=reach, allow_is_causal_skip=False)
    np.testing.assert_array_equal(theirs[0, 0].numpy(), band(3, 3).dense(9))


# Alignment with fewer queries than keys.


def test_alignment_in_torch_bias() -> None:
    q, k, v = qkv()
    new = q[:, :, -2:]
    upper, lower = causal_upper_left(2, N), causal_lower_right(2, N)
    same(F.scaled_dot_product_attention(new, k, v, upper), lowtri.attention(new, k, v, "causal", q_positions=range(2)))
    same(F.scaled_dot_product_attention(new, k, v, lower), lowtri.attention(new, k, v, "causal"))


def test_alignment_in_transformers() -> None:
    theirs = sdpa_mask(1, 2, N, q_offset=N - 2, allow_is_causal_skip=False)
    np.testing.assert_array_equal(theirs[0, 0].numpy(), causal().dense(2, N))


# A query that sees nothing.

BLIND = TRIANGLE.clone()
BLIND[0, 0] = False  # query 0 sees nothing


def test_empty_rows_in_softmax() -> None:
    assert torch.softmax(torch.full((4,), -math.inf), 0).isnan().all()
    assert torch.equal(torch.softmax(torch.full((4,), -1e9), 0), torch.full((4,), 0.25))


def test_empty_rows_in_multihead_attention() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True, bias=False)
    x = torch.randn(1, N, 8)
    assert module(x, x, x, attn_mask=~BLIND, need_weights=True)[0][0, 0].isnan().all()
    assert not module(x, x, x, attn_mask=~BLIND, need_weights=False)[0][0, 0].any()


def test_empty_rows_in_transformers() -> None:
    q, k, v = (x.float() for x in qkv())
    blind = eager_mask(2, N, N, mask_function=lambda b, h, i, j: (j <= i) & (i > 0), use_vmap=True)
    output, weights = eager(q, k, v, blind)
    torch.testing.assert_close(weights[:, :, 0], torch.full((2, 2, N), 1 / N))
    torch.testing.assert_close(output[:, :, 0], v.mean(2))


# What is added to hidden scores.


def test_additive_in_lowtri() -> None:
    q, k, v = qkv()
    weights = lowtri.attention(q, k, v, "causal", return_weights=True)[1]
    assert not weights[..., ~TRIANGLE].any()
    assert np.isneginf(causal().additive(N)[0, 1:]).all()
    assert (causal().additive(N, hidden=-1e9)[0, 1:] == -1e9).all()


def test_additive_in_transformers() -> None:
    least = torch.finfo(torch.float32).min
    theirs = eager_mask(1, N, N)
    assert (theirs[0, 0, 0, 1:] == least).all()
    assert torch.isneginf((theirs + theirs)[0, 0, 0, 1:]).all()
    np.testing.assert_array_equal(theirs[0, 0].numpy(), causal().additive(N, hidden=least))
    q, k, v = (x.float() for x in qkv())
    torch.testing.assert_close(eager(q, k, v, theirs)[0], lowtri.attention(q, k, v, "causal"))


# Scale.


def test_scale_in_transformers() -> None:
    q, k, v = (x.float() for x in qkv())
    torch.testing.assert_close(eager(q, k, v, None)[0], lowtri.attention(q, k, v, "full"))
    torch.testing.assert_close(eager(q, k, v, None, scaling=1.0)[0], lowtri.attention(q, k, v, "full", scale=1.0))
    config = T5Config(d_model=8, d_kv=4, num_heads=2, d_ff=8, num_layers=1, vocab_size=10)
    assert T5Attention(config).scaling == 1.0


# Softcap.


def test_softcap_in_transformers() -> None:
    q, k, v = (x.float() for x in qkv())
    output, weights = eager(q, k, v, eager_mask(1, N, N), softcap=1.5)
    ours, our_weights = lowtri.attention(q, k, v, "causal", softcap=1.5, return_weights=True)
    torch.testing.assert_close(output, ours)
    torch.testing.assert_close(weights, our_weights)


def test_empty_rows_in_flex_attention() -> None:
    """Queries 0 and 1 see nothing."""
    q, k, v = (x.requires_grad_() for x in qkv())
    blocks = create_block_mask(lambda b, h, i, j: i > j + 1, None, None, N, N, device="cpu")
    theirs, their_lse = torchs_flex(*(x.detach() for x in (q, k, v)), block_mask=blocks, return_lse=True)
    output, lse = lowtri_flex.flex_attention(q, k, v, block_mask=blocks, return_lse=True)
    for out, of_row in ((theirs, their_lse), (output, lse)):
        assert not out[:, :, :2].any() and (of_row[:, :, :2] == -math.inf).all()
    same(output, theirs)
    assert not torch.autograd.grad(output.sum(), q)[0][:, :, :2].any()


def test_grouped_heads_in_flex_attention() -> None:
    q, k, v = qkv(heads=4, kv_heads=2)
    reach = torch.tensor([1, 2, 3, 4])
    theirs = flex(q, k, v, lambda b, h, i, j: (j <= i) & (i - j < reach[h]), enable_gqa=True)
    same(theirs, lowtri.attention(q, k, v, heads([window(n) for n in (1, 2, 3, 4)])))


# Positions.


def test_positions_in_transformers() -> None:
    model = llama()
    ids, real = torch.arange(N)[None], torch.ones(1, N, dtype=torch.long)
    positions = torch.arange(N)[None] * 3 + 5  # not consecutive
    with torch.no_grad():
        spread = model(ids, attention_mask=real, position_ids=positions).logits
        changed = model(
            ids.index_fill(1, torch.tensor([N - 1]), 19), attention_mask=real, position_ids=positions
        ).logits
        consecutive = model(ids, attention_mask=real).logits
    assert torch.equal(spread[:, :-1], changed[:, :-1])  # the mask still compares indices in the tensor
    assert not torch.allclose(spread[:, 1:], consecutive[:, 1:])  # the rotary embedding has changed


# Grouped heads.


def test_grouped_heads_in_transformers() -> None:
    q, k, v = qkv(heads=6, kv_heads=2)
    same(lowtri.attention(q, k, v, "full"), lowtri.attention(q, repeat_kv(k, 3), repeat_kv(v, 3), "full"))


# Layout.


def test_layout_of_multihead_attention() -> None:
    torch.manual_seed(0)
    first = nn.MultiheadAttention(8, 2, batch_first=True)
    plain = nn.MultiheadAttention(8, 2)
    plain.load_state_dict(first.state_dict())
    x = torch.randn(3, N, 8)
    torch.testing.assert_close(first(x, x, x)[0], plain(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1))


# JAX, and what was switched: the same questions.


def in_jax(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """jax.nn's attention, which takes and returns (B, N, H, D), in float32."""
    arrays = [jnp.asarray(x.transpose(1, 2).float().numpy()) for x in (q, k, v)]
    output = jax.jit(lambda *arrays: jax.nn.dot_product_attention(*arrays, **options))(*arrays)
    return torch.from_numpy(np.array(output)).transpose(1, 2).double()


def near(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left.double(), right.double(), rtol=0, atol=1e-5)


def logits(model, ids: Tensor, mask) -> Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask).logits


def multihead(**options) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention, Tensor]:
    """A module of torch, the same switched, and its input."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64, **options)
    return module, lowtri_torch.switch(copy.deepcopy(module)), torch.randn(2, N, 8, dtype=torch.float64)


def test_true_in_jax() -> None:
    q, k, v = qkv()
    near(in_jax(q, k, v, mask=jnp.asarray(TRIANGLE.numpy())[None, None]), lowtri.attention(q, k, v, table(TRIANGLE)))


def test_window_in_jax() -> None:
    q, k, v = qkv()
    near(in_jax(q, k, v, local_window_size=(2, 1)), lowtri.attention(q, k, v, band(2, 1)))
    near(in_jax(q, k, v, local_window_size=2), lowtri.attention(q, k, v, band(2, 2)))
    near(in_jax(q, k, v, local_window_size=2, is_causal=True), lowtri.attention(q, k, v, "causal & window(3)"))


def test_window_in_a_switched_model() -> None:
    theirs, other = (
        MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=n)).eval() for n in (3, 5)
    )
    other.load_state_dict(theirs.state_dict())
    ids = torch.arange(N)[None]
    found = lowtri_transformers.use(lowtri_transformers.switch(other), mask="causal & window(3)")
    near(logits(found, ids, None), logits(theirs, ids, None))


def test_bias_keys_in_multihead_attention() -> None:
    module, switched, x = multihead(add_bias_kv=True)

    def saw(attend: nn.MultiheadAttention, **options: bool) -> set[bool]:
        """Whether each query sees the learned key, whose value is changed."""
        before = attend(x, x, x, attn_mask=~TRIANGLE, **options)[0]
        assert attend.bias_v is not None
        attend.bias_v.data += 1
        moved = attend(x, x, x, attn_mask=~TRIANGLE, **options)[0] - before
        attend.bias_v.data -= 1
        return set((moved.abs().amax(-1) > 1e-3).flatten().tolist())

    for weights in (True, False):
        for is_causal in (True, False):
            options = {"need_weights": weights, "is_causal": is_causal}
            assert saw(switched, **options) == {True}
            assert saw(module, **options) == ({False} if is_causal and not weights else {True})


def test_alignment_in_jax() -> None:
    q, k, v = qkv()
    theirs = in_jax(q[:, :, -2:], k, v, is_causal=True)
    near(theirs[:, :, 0], v[:, :, 0])
    near(theirs, lowtri.attention(q[:, :, -2:], k, v, "causal", q_positions=range(2)))


def test_empty_rows_in_jax() -> None:
    q, k, v = qkv()
    near(in_jax(q, k, v, mask=jnp.asarray(BLIND.numpy())[None, None])[:, :, 0], v.mean(2))


def test_empty_rows_in_a_switched_model() -> None:
    model, found = lowtri_transformers.switch(llama()), []
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    logits(model, torch.arange(N)[None], table(BLIND))
    assert not found[0][:, 0].any() and found[0][:, 1:].any()


def test_grouped_heads_in_jax() -> None:
    q, k, v = qkv(heads=6, kv_heads=2)
    near(in_jax(q, k, v), lowtri.attention(q, k, v, "full"))


def test_layout_of_jax() -> None:
    q, k, v = qkv(heads=N)  # (2, N, N, 8) fits either way
    arrays = [jnp.asarray(x.float().numpy()) for x in (q, k, v)]
    theirs = jax.nn.dot_product_attention(*arrays)  # heads in dimension 2
    near(
        torch.from_numpy(np.array(theirs)),
        lowtri.attention(*(x.transpose(1, 2) for x in (q, k, v)), "full").transpose(1, 2),
    )


# The page itself.


def test_every_row_of_the_page_is_tested() -> None:
    """A row names tests of this file, or those of a backend or an integration that prove it."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "conventions.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|") and not line.startswith(("| library", "|---"))]
    assert len(rows) > 40
    for row in rows:
        last = row.rstrip("| ").split("|")[-1].strip()
        assert re.fullmatch(r"`test_\w+`(, `test_\w+`)*", last), row
    named = set(re.findall(r"`(test_\w+)`", page))
    texts = {path: path.read_text(encoding="utf-8") for path in (root / "tests").rglob("test_*.py")}
    known = {name for text in texts.values() for name in re.findall(r"^def (test_\w+)", text, re.M)}
    own = set(re.findall(r"^def (test_\w+)", texts[Path(__file__)], re.M))
    assert named <= known and own <= named | {"test_every_row_of_the_page_is_tested"}
