"""Common code and its lowtri equivalent: the groups of docs/from-a-notebook.md, and those that are too long for the page.

A group is a comment, statements, and two expressions: common code first, then lowtri's, which must give the same value.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lowtri

PAGE = Path(__file__).parents[2] / "docs" / "from-a-notebook.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)

MORE = """
# -9e15 instead of -1e9: in float32 both have the effect of -inf
torch.softmax(scores + torch.ones(T, T).triu(diagonal=1) * -9e15, dim=-1) @ v
lowtri.attention(q, k, v, lowtri.causal())

# the batched class with dimensions as arguments
plain.MaskedSelfAttention(embed_dim=D, row_dim=1, col_dim=2)(torch.stack([x, 2 * x]), hidden)
lowtri.nn.MaskedSelfAttention(D)(torch.stack([x, 2 * x]))

# mask and softmax of given scores
plain.softmax(scores[0, 0].numpy() + plain.make_causal_mask(T))
lowtri.explain(scores=scores[0, 0].numpy(), mask="causal")["weights"].value

# the additive mask as text
[["0" if x == 0 else "-inf" for x in row] for row in plain.create_causal_mask(4).tolist()]
[line.split() for line in lowtri.causal().draw(4, numbers=True).splitlines()]

# the additive mask as LaTeX
"\\\\left[\\\\begin{array}{rr}\\n  0 & -\\\\infty \\\\\\\\\\n  0 & 0\\n\\\\end{array}\\\\right]"
lowtri.causal().draw(2, latex=True)

# tokens in scripts without spaces: characters, with their combining marks
"我 爱 你 ฉั น รั ก".split()
lowtri.causal().draw(7, tokens="我爱你 ฉันรัก", ticks=True).splitlines()[0].split()

# SDPA's signature, unchanged
F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
lowtri.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)

# SDPA, a boolean band
F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(T, T).tril().bool().triu(-1))
lowtri.attention(q, k, v, lowtri.table(torch.ones(T, T).tril().bool().triu(-1)))

# decoding: the queries are the last tokens
from torch.nn.attention.bias import causal_lower_right
F.scaled_dot_product_attention(q[:, :, -2:], k, v, attn_mask=causal_lower_right(2, T))
lowtri.attention(q[:, :, -2:], k, v, "causal")

# nn.MultiheadAttention with the weights of each head
theirs = nn.MultiheadAttention(6, 3, batch_first=True)
theirs(y, y, y, attn_mask=hidden, average_attn_weights=False)
parts = F.linear(y, theirs.in_proj_weight, theirs.in_proj_bias).chunk(3, dim=-1)
heads = [part.unflatten(-1, (3, 2)).transpose(1, 2) for part in parts]
out, weights = lowtri.attention(*heads, "causal", return_weights=True)
theirs.out_proj(out.transpose(1, 2).flatten(2)), weights

# generate_square_subsequent_mask
nn.Transformer.generate_square_subsequent_mask(T)
lowtri.causal().additive(T, like=q)
"""

FLEX = """
# FlexAttention: a mask_mod
flex(q, k, v, mask_mod=causal)
lowtri.attention(q, k, v, "causal")

# FlexAttention: a mask_mod as a formula
flex(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (q_idx - kv_idx < 3))
lowtri.attention(q, k, v, lowtri.where(lambda q, k: (k <= q) & (q - k < 3)))

# FlexAttention under its own names: create_block_mask and flex_attention
flex(q, k, v, mask_mod=causal)
from lowtri.integrations.flex import create_block_mask, flex_attention
block_mask = create_block_mask(causal, None, None, T, T, device="cpu")
flex_attention(q, k, v, block_mask=block_mask)

# FlexAttention with fewer queries than keys: query 0 is aligned with key 0
flex(q[:, :, :2], k, v, mask_mod=causal)
lowtri.attention(q[:, :, :2], k, v, "causal", q_positions=range(2))

# FlexAttention, packed documents: a captured tensor of document numbers
document = torch.tensor([0, 0, 1, 1, 1])
flex(q, k, v, mask_mod=lambda b, h, i, j: causal(b, h, i, j) & (document[i] == document[j]))
lowtri.attention(q, k, v, lowtri.causal() & lowtri.documents(document))

# FlexAttention, a sliding window with q_idx - kv_idx <= 2
flex(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: causal(b, h, q_idx, kv_idx) & (q_idx - kv_idx <= 2))
lowtri.attention(q, k, v, "causal & window(3)")

# FlexAttention, a score_mod that caps the scores
flex(q, k, v, lambda score, b, h, i, j: 0.5 * torch.tanh(score / 0.5), causal)
lowtri.attention(q, k, v, "causal", softcap=0.5)

# FlexAttention, a score_mod for ALiBi
slopes = torch.tensor([0.5, 0.25, 0.125])
flex(q, k, v, lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx), causal)
lowtri.attention(q, k, v, "causal", bias=lowtri.alibi(slopes))
"""

FLASH = """
# FlashAttention: causal=True, and the layout
flash(fq, fk, fv, causal=True)
lowtri.attention(q, k, v, "causal").transpose(1, 2)

# FlashAttention with two queries, aligned with the last keys
flash(fq[:, -2:], fk, fv, causal=True)
lowtri.attention(q[:, :, -2:], k, v, "causal").transpose(1, 2)

# FlashAttention with more queries than keys: the first queries see nothing and give 0
flash(fq, fk[:, :3], fv[:, :3], causal=True)
lowtri.attention(q, k[:, :, :3], v[:, :, :3], "causal", q_positions=range(-2, 3)).transpose(1, 2)

# FlashAttention: window_size=(2, 0)
flash(fq, fk, fv, causal=True, window_size=(2, 0))
lowtri.attention(q, k, v, "causal & window(3)").transpose(1, 2)

# FlashAttention: window_size=(1, 2)
flash(fq, fk, fv, window_size=(1, 2))
lowtri.attention(q, k, v, "band(1, 2)").transpose(1, 2)

# FlashAttention under its own name
flash(fq[:, -2:], fk, fv, causal=True, window_size=(2, 0))
from lowtri.integrations.flash_attn import flash_attn_func
flash_attn_func(fq[:, -2:], fk, fv, causal=True, window_size=(2, 0))

# flash_attn_varlen_func: packed sequences by cu_seqlens
torch.cat([flash(fq[:1, a:b], fk[:1, a:b], fv[:1, a:b], causal=True) for a, b in ((0, 2), (2, 5))], dim=1)
lowtri.attention(q[:1], k[:1], v[:1], lowtri.causal() & lowtri.documents(cu_seqlens=[0, 2, 5])).transpose(1, 2)

# unpad_input, packed attention, pad_input: padding gives 0
real = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
short = torch.cat([flash(fq[:1, :3], fk[:1, :3], fv[:1, :3], causal=True), torch.zeros(1, 2, H, D)], dim=1)
torch.cat([short, flash(fq[1:], fk[1:], fv[1:], causal=True)])
from lowtri.integrations.flash_attn import bert_padding, flash_attn_varlen_func
tokens = [bert_padding.unpad_input(t, real) for t in (fq, fk, fv)]
packed, (_, indices, edges, longest, _) = [each[0] for each in tokens], tokens[0]
out = flash_attn_varlen_func(*packed, edges, edges, longest, longest, causal=True)
bert_padding.pad_input(out, indices, B, T)

# FlashAttention: softcap
flash(fq, fk, fv, causal=True, softcap=0.5)
lowtri.attention(q, k, v, "causal", softcap=0.5).transpose(1, 2)

# FlashAttention: alibi_slopes
flash(fq, fk, fv, causal=True, alibi_slopes=torch.tensor([0.5, 0.25, 0.125]))
lowtri.attention(q, k, v, "causal", bias=lowtri.alibi(torch.tensor([0.5, 0.25, 0.125]))).transpose(1, 2)

# flash_attn_with_kvcache: a cache of 5 slots, of which cache_seqlens are filled
cache_seqlens = torch.tensor([3, 5])
torch.cat([flash(fq[b : b + 1, -1:], fk[b : b + 1, :n], fv[b : b + 1, :n], causal=True) for b, n in enumerate(cache_seqlens)])
lowtri.attention(q[:, :, -1:], k, v, "causal", q_positions=cache_seqlens[:, None] - 1).transpose(1, 2)
"""

TRANSFORMERS = """
# transformers: a causal model
theirs(ids).logits
ours(ids)

# transformers: attention_mask, 1 = token, here left padding
theirs(ids, attention_mask=real).logits[real.bool()]
ours(ids, mask=lowtri.causal() & lowtri.keys(real.bool()))[real.bool()]

# transformers: the same with positions, -1 = no token
theirs(ids, attention_mask=real).logits[real.bool()]
ours(ids, positions=torch.tensor([[-1, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]))[real.bool()]

# transformers: sliding_window=3
windowed = MistralForCausalLM(MistralConfig(**sizes, sliding_window=3)).eval()
_ = windowed.load_state_dict(theirs.state_dict())
windowed(ids).logits
ours(ids, mask="causal & window(3)")

# transformers, packed documents: position_ids that restart at 0
position_ids = torch.tensor([[0, 1, 2, 3, 0, 1]])
theirs(ids[:1], position_ids=position_ids, use_cache=False).logits
ours(ids[:1], mask=lowtri.causal() & lowtri.documents((position_ids == 0).cumsum(dim=1)))

# transformers, a prefix that every query sees: or_mask_function
from transformers.masking_utils import create_causal_mask
prefix = lambda batch, head, q_idx, kv_idx: kv_idx < 3
create_causal_mask(theirs.config, torch.zeros(1, 6, 16), None, None, or_mask_function=prefix)[0, 0]
torch.from_numpy((lowtri.causal() | lowtri.first(3)).dense(6))

# transformers: past_key_values, one token at a time
past, out = None, []
for t in range(6):
    step = theirs(ids[:, t : t + 1], past_key_values=past, use_cache=True)
    past = step.past_key_values
    out.append(step.logits)
torch.cat(out, dim=1)
cache = ours.make_cache(2)
torch.cat([ours(ids[:, t : t + 1], cache=cache) for t in range(6)], dim=1)

# transformers: generate, greedy
theirs.generate(ids[:1], attention_mask=torch.ones(1, 6), max_new_tokens=5, do_sample=False)[0, 6:].tolist()
list(lowtri.generate(ours, ids[0].tolist(), max_new_tokens=5))
"""


def groups(text: str) -> list[tuple[str, str]]:
    """The groups of a text, each with its comment; a group without one has that of the group before."""
    result: list[tuple[str, str]] = []
    for code in re.split(r"\n\n+", text.strip()):
        comment = re.match(r"# (.+)", code)
        result.append((comment[1] if comment else f"{result[-1][0]}, again", code))
    return result


GROUPS = [(title, code) for text in (*BLOCKS[1:], MORE, FLEX, FLASH, TRANSFORMERS) for title, code in groups(text)]


def flex(q: Any, k: Any, v: Any, score_mod: Any = None, mask_mod: Any = None) -> torch.Tensor:
    """flex_attention by its definition: score_mod and mask_mod of every pair (torch's own has to be compiled)."""
    sizes = (*q.shape[:3], k.shape[2])
    b, h, q_idx, kv_idx = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if score_mod is not None:
        scores = score_mod(scores, b, h, q_idx, kv_idx)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(b, h, q_idx, kv_idx), -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


def flash(q: Any, k: Any, v: Any, causal: bool = False, window_size: Any = (-1, -1), **options: Any) -> torch.Tensor:
    """flash_attn_func pair by pair, (B, Nq, H, D) and (B, Nk, H, D): both ends of the window count, -1 has no limit."""
    nq, nk, out = q.shape[1], k.shape[1], torch.zeros_like(q)
    softcap, slopes = options.get("softcap", 0.0), options.get("alibi_slopes")
    left, right = window_size[0], 0 if causal else window_size[1]
    for b, i, h in np.ndindex(q.shape[:3]):
        position = i + nk - nq  # queries are the last tokens
        seen = [j for j in range(nk) if (left < 0 or j >= position - left) and (right < 0 or j <= position + right)]
        if not seen:
            continue
        scores = k[b, seen, h] @ q[b, i, h] / q.shape[-1] ** 0.5
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if slopes is not None:
            scores = scores - slopes[h] * (position - torch.tensor(seen)).abs()
        out[b, i, h] = torch.softmax(scores, dim=0) @ v[b, seen, h]
    return out


@cache
def names() -> dict[str, Any]:
    """What every group can use: the first block of the page, the definitions above, and two models with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    made: dict[str, Any] = {"flex": flex, "flash": flash, "causal": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx}
    exec(BLOCKS[0], made)
    made |= {f"f{name}": made[name].transpose(1, 2) for name in "qkv"}  # (B, N, H, D)
    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    sizes |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    theirs = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    ours = lowtri.nn.Decoder(lowtri.nn.DecoderConfig(**sizes)).eval()
    ours.load_state_dict(theirs.state_dict())
    made |= {"theirs": theirs, "ours": ours, "ids": torch.arange(12).view(2, 6), "sizes": sizes}
    made |= {"MistralConfig": MistralConfig, "MistralForCausalLM": MistralForCausalLM}
    return made | {"real": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])}


def values(code: str) -> tuple[Any, Any]:
    """Run a group, each statement from seed 0, and return the values of its two expressions."""
    scope, found = dict(names()), []
    with torch.no_grad():
        for statement in ast.parse(code).body:
            torch.manual_seed(0)
            if isinstance(statement, ast.Expr):
                found.append(eval(compile(ast.Expression(statement.value), "group", "eval"), scope))
            else:
                exec(compile(ast.Module([statement], []), "group", "exec"), scope)
    left, right = found
    return left, right


def same(left: Any, right: Any) -> None:
    assert type(left) is type(right), f"{type(left)} and {type(right)}"
    if isinstance(left, tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            same(one, other)
    elif isinstance(left, torch.Tensor | np.ndarray):
        assert left.shape == right.shape and (left.dtype == bool) == (right.dtype == bool)
        if left.dtype in (bool, torch.bool):
            assert bool((left == right).all())
        else:
            torch.testing.assert_close(
                torch.as_tensor(left), torch.as_tensor(right), atol=2e-6, rtol=1e-5, check_dtype=False
            )
    else:
        assert left == right


@pytest.mark.parametrize(("title", "code"), GROUPS, ids=[title for title, _ in GROUPS])
def test_both_expressions_give_the_same(title: str, code: str) -> None:
    lines = ast.parse(code).body
    first = next(i for i, line in enumerate(lines) if isinstance(line, ast.Expr))
    left, right = ("\n".join(map(ast.unparse, part)) for part in (lines[: first + 1], lines[first + 1 :]))
    assert "lowtri" not in left, "common code must not use lowtri"
    assert "lowtri" in right or "ours" in right
    same(*values(code))


def test_the_page_is_short_and_no_case_is_lost() -> None:
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 200
    assert len(GROUPS) >= 60 and len({title for title, _ in GROUPS}) == len(GROUPS)


def test_the_comparison_can_fail() -> None:
    causal, window = values("lowtri.attention(q, k, v, 'causal')\nlowtri.attention(q, k, v, 'causal & window(2)')")
    with pytest.raises(AssertionError):
        same(causal, window)
