"""docs/from-a-notebook.md: both columns of every row run and give the same value."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "from-a-notebook.md"
CODE = re.compile(r"```python\n(.*?)\n```", re.S)
ROW = re.compile(
    r'<tr><td colspan="2">\n\n(.+?)\n\n</td></tr>\n<tr><td>\n\n(.*?)\n\n</td><td>\n\n(.*?)\n\n</td></tr>', re.S
)

# Common idioms; each must occur in a left column.
IDIOMS = (
    *("masked_fill", "-1e9", "-9e15", "triu", "tril", "is_causal", "attn_mask=mask", "attn_mask=bias"),
    *(
        "make_causal_mask",
        "create_causal_mask(",
        "create_causal_mask_bool",
        "masked_attention_bool",
        "self_attention(x)",
    ),
    *(
        "masked_self_attention",
        "MaskedSelfAttention(d_model",
        "MaskedSelfAttention(embed_dim",
        "row_dim=1",
        "mask=None",
    ),
    *("plain.softmax", "nn.MultiheadAttention", "key_padding_mask", "generate_square_subsequent_mask", "enable_gqa"),
    *("mask_mod", "window_size", "cu_seqlens", "softcap", "alibi_slopes", "cache_seqlens", "causal=True"),
    *("out, weights = attend", "weights[1, 2]", "softmax(scores +", "-inf", "\\begin{array}", "我 爱 你"),
    *("tanh_cap", "mask_mod=causal", "average_attn_weights", "TransformerEncoderLayer", "src_mask=future"),
    *("sdpa(jq, jk, jv, is_causal=True)", "local_window_size", "key_value_seq_lengths", "jax.grad"),
    *("sliding_window", "attention_mask", "position_ids", "or_mask_function", "past_key_values", "generate("),
)


def sections() -> list[tuple[str, list[tuple[str, str, str]]]]:
    """For each section of the page its first code block, and its rows (title, left, right)."""
    result = []
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        before, rows = section.split("<table>")
        code = "\n".join(CODE.findall(before))
        result.append((code, [(title, *map(_only, sides)) for title, *sides in ROW.findall(rows)]))
        assert rows.count("<tr>") == 1 + 2 * len(result[-1][1]), f"a row of {section[:20]!r} has another form"
    return result


def _only(cell: str) -> str:
    (code,) = CODE.findall(cell)
    return code


ROWS = [(number, title, left, right) for number, (_, rows) in enumerate(sections()) for title, left, right in rows]


@cache
def prepared(number: int) -> dict[str, Any]:
    """The names that a row of this section can use: from its own first block and those of the sections above."""
    names: dict[str, Any] = {}
    for code, _ in sections()[: number + 1]:
        exec(code, names)
    return names


def value_of(code: str, names: dict[str, Any]) -> Any:
    """Run the code and return the value of its last line."""
    torch.manual_seed(0)
    *lines, last = ast.parse(code).body
    assert isinstance(last, ast.Expr), "the last line of a cell must be an expression"
    names = dict(names)
    exec(compile(ast.Module(lines, []), "cell", "exec"), names)
    with torch.no_grad():
        return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


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


@pytest.mark.parametrize(("number", "title", "left", "right"), ROWS, ids=[row[1] for row in ROWS])
def test_both_columns_give_the_same(number: int, title: str, left: str, right: str) -> None:
    assert "lowtri" not in left, "the left column must not use lowtri"
    assert "lowtri" in right or "ours" in right
    names = prepared(number)
    same(value_of(left, names), value_of(right, names))


def test_every_idiom_has_its_row() -> None:
    lefts = "\n".join(left for _, _, left, _ in ROWS)
    assert [idiom for idiom in IDIOMS if idiom not in lefts] == []


def test_the_comparison_can_fail() -> None:
    names = prepared(0)
    causal, window = (value_of(f"lowtri.attention(q, k, v, '{m}')", names) for m in ("causal", "causal & window(2)"))
    with pytest.raises(AssertionError):
        same(causal, window)
