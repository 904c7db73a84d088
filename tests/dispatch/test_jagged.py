"""Jagged nested tensors: each sequence gives what it gives alone, with gradients, and the values are not copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lowtri
from lowtri.dispatch.jagged import attend_jagged
from lowtri.errors import CallError, MaskError
from lowtri.ops.call import CallOptions

LENGTHS = [3, 70, 1, 9]
MASKS = [
    "causal",
    "full",
    "causal & (window(5) | first(2))",
    "chunks(4)",
    'documents(lengths=[2, 4], open_end=True, inner="causal")',
    lowtri.heads(["causal", "causal & window(3)", "full", "chunks(2)"]),
    lowtri.keys(lengths=[3, 50, 1, 4]),  # a mask of each sequence's own
    lowtri.heads([lowtri.keys(lengths=[3, 50, 1, 4]), "causal", "full", "causal & window(2)"]),
]


def jagged(heads: int, lengths: list[int] = LENGTHS, seed: int = 0, size: int = 8, grad: bool = False) -> Any:
    """(B, H, j, D), made as users do: sequences (N, H, D), transposed."""
    torch.manual_seed(seed)
    made = torch.nested.nested_tensor(
        [torch.randn(n, heads, size, dtype=torch.float64) for n in lengths], layout=torch.jagged, requires_grad=grad
    )
    return made.transpose(1, 2) if not grad else made


def alone(mask: Any, b: int, heads: int) -> Any:
    mask = lowtri.mask(mask)
    if len(mask.batch) < 2:
        return mask.for_row(b)
    return lowtri.heads([mask.for_row(b, h) for h in range(heads)])


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_each_sequence_gives_what_it_gives_alone(mask: Any) -> None:
    q, k, v = jagged(4), jagged(2, seed=1), jagged(2, seed=2, size=5)
    out, lse = lowtri.attention(q, k, v, mask, scale=0.5, return_lse=True)
    assert out.layout is torch.jagged and tuple(out.shape)[:2] == (4, 4) and out.shape[3] == 5
    for b, (qb, kb, vb, ob, lb) in enumerate(zip(*(x.unbind() for x in (q, k, v, out, lse)), strict=True)):
        expected = lowtri.attention(qb, kb, vb, alone(mask, b, 4), scale=0.5, return_lse=True)
        torch.testing.assert_close((ob, lb), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS[:3])
def test_gradients_are_those_of_the_sequences(mask: str) -> None:
    made = [jagged(2, seed=seed, grad=True) for seed in range(3)]
    out = lowtri.attention(*(x.transpose(1, 2) for x in made), mask)
    (out + made[0].transpose(1, 2)).values().square().sum().backward()  # of the same ragged size
    for b in range(len(LENGTHS)):
        parts = [x.detach().unbind()[b].transpose(0, 1).requires_grad_() for x in made]
        (lowtri.attention(*parts, mask) + parts[0]).square().sum().backward()
        for x, part in zip(made, parts, strict=True):
            torch.testing.assert_close(x.grad.unbind()[b].transpose(0, 1), part.grad, rtol=1e-9, atol=1e-11)


def test_the_values_are_not_copied() -> None:
    given = []

    def spy(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
        given.extend([q, k, v])
        return lowtri.attention(q, k, v, *rest, **options)

    made = [jagged(2, seed=seed) for seed in range(3)]
    attend_jagged(spy, *made, "causal", CallOptions())
    assert [x.data_ptr() for x in given] == [x.values().data_ptr() for x in made]
    assert all(x.shape == (2, sum(LENGTHS), 8) for x in given)


def test_one_head_other_lengths_of_queries_and_empty_sequences() -> None:
    lengths, queries = [4, 0, 6], [2, 0, 6]
    make = lambda sizes, seed: jagged(1, sizes, seed).transpose(1, 2).flatten(2)  # noqa: E731 (B, j, D)
    q, k = make(queries, 0), make(lengths, 1)
    v = torch.nested.nested_tensor_from_jagged(k.values() * 2, offsets=k.offsets())
    out = lowtri.attention(q, k, v, "causal")
    for qb, kb, vb, ob in zip(*(x.unbind() for x in (q, k, v, out)), strict=True):
        assert ob.shape == qb.shape
        if len(qb):
            torch.testing.assert_close(ob, lowtri.attention(qb, kb, vb, "causal"), rtol=1e-10, atol=1e-12)


CALLS = [*(((4, LENGTHS), (heads, LENGTHS)) for heads in (4, 2)), ((2, [5, 2]), (2, [3, 4]))]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("of_q", "of_kv"), CALLS, ids=["heads", "grouped heads", "aligned to the first keys"])
def test_the_function_of_torch(of_q: Any, of_kv: Any, is_causal: bool) -> None:
    q, k, v = jagged(*of_q), jagged(*of_kv, 1), jagged(*of_kv, 2)
    options = {"is_causal": is_causal, "enable_gqa": of_q[0] != of_kv[0]}
    out = lowtri.scaled_dot_product_attention(q, k, v, **options)
    for qb, kb, vb, ob in zip(*(x.unbind() for x in (q, k, v, out)), strict=True):
        expected = torch.nn.functional.scaled_dot_product_attention(qb[None], kb[None], vb[None], **options)
        torch.testing.assert_close(ob[None], expected, rtol=1e-10, atol=1e-12)


Q = jagged(2)
attend = lowtri.attention
torchs = lowtri.scaled_dot_product_attention
ERRORS = [
    (lambda: attend(Q, torch.zeros(4, 2, 70, 8), Q, "causal"), "k is no jagged tensor, but another argument is"),
    (lambda: attend(Q.transpose(1, 2), Q, Q, "causal"), r"q is jagged .*\nFix: q.transpose\(1, 2\) where heads"),
    (lambda: attend(Q, Q, Q, "causal", return_weights=True), "return_weights is not taken with jagged tensors"),
    (lambda: attend(Q, Q, Q, "causal", q_positions=[0]), r"q_positions is not taken with jagged.*\nFix: torch"),
    (lambda: attend(Q, jagged(2, [1, 2]), Q, "causal"), "the sequences of q, k and v have the lengths"),
    (lambda: attend(Q, *[jagged(2, [3, 60, 1, 9])] * 2, "causal"), "a sequence has 70 queries and 60 keys"),
    (lambda: attend(Q, Q, Q, lowtri.keys(lengths=[1, 2])), "has 2 rows, but the jagged tensors have 4 sequences"),
    (lambda: attend(Q, Q, Q, "documents(lengths=[2, 2])"), "the documents in inner, .* end after 4 tokens"),
    (
        lambda: torchs(Q, Q, Q, attn_mask=torch.ones(1)),
        "attn_mask is not taken with nested tensors. Fix: lowtri.attention",
    ),
    (lambda: torchs(Q, jagged(1), jagged(1)), "query has 2 heads, and key 1. Fix: enable_gqa=True"),
]


@pytest.mark.parametrize(("act", "words"), ERRORS, ids=[words[:40] for _, words in ERRORS])
def test_errors(act: Any, words: str) -> None:
    with pytest.raises((CallError, MaskError), match=words) as caught:
        act()
    assert len(str(caught.value).splitlines()) <= 3
