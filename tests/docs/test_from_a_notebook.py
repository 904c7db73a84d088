"""Common code and its lowtri equivalent: the groups of docs/from-a-notebook.md, and those that are too long for the page.

A group is a comment, statements, and two expressions: common code first, then lowtri's, which must give the same value.
What other libraries mean by the same words is in test_conventions.py.
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
# mask and softmax of given scores
plain.softmax(scores[0, 0].numpy() + plain.make_causal_mask(T))
lowtri.explain(scores=scores[0, 0].numpy(), mask="causal")["weights"].value

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

# transformers: attention_mask, 1 = token, here left padding
theirs(ids, attention_mask=real).logits[real.bool()]
ours(ids, mask=lowtri.causal() & lowtri.keys(real.bool()))[real.bool()]

# transformers, packed documents: position_ids that restart at 0
position_ids = torch.tensor([[0, 1, 2, 3, 0, 1]])
theirs(ids[:1], position_ids=position_ids, use_cache=False).logits
ours(ids[:1], mask=lowtri.causal() & lowtri.documents((position_ids == 0).cumsum(dim=1)))

# transformers, a prefix that every query sees: or_mask_function
from transformers.masking_utils import create_causal_mask
prefix = lambda batch, head, q_idx, kv_idx: kv_idx < 3
create_causal_mask(theirs.config, torch.zeros(1, 6, 16), None, None, or_mask_function=prefix)[0, 0]
torch.from_numpy((lowtri.causal() | lowtri.first(3)).dense(6))

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


GROUPS = [(title, code) for text in (*BLOCKS[1:], MORE) for title, code in groups(text)]


@cache
def names() -> dict[str, Any]:
    """What every group can use: the first block of the page, and two models with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made: dict[str, Any] = {}
    exec(BLOCKS[0], made)
    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    sizes |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    theirs = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    ours = lowtri.nn.Decoder(lowtri.nn.DecoderConfig(**sizes)).eval()
    ours.load_state_dict(theirs.state_dict())
    made |= {"theirs": theirs, "ours": ours, "ids": torch.arange(12).view(2, 6)}
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
    assert any(name in right for name in ("lowtri", "ours", "switch"))
    same(*values(code))


def test_the_page_is_short_and_no_case_is_lost() -> None:
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 200
    assert len(GROUPS) >= 30 and len({title for title, _ in GROUPS}) == len(GROUPS)


def test_the_comparison_can_fail() -> None:
    causal, window = values("lowtri.attention(q, k, v, 'causal')\nlowtri.attention(q, k, v, 'causal & window(2)')")
    with pytest.raises(AssertionError):
        same(causal, window)
