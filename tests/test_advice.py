"""What follows "Fix:" in an error is followed: each case makes a mistake, does what its error says, and gets what was asked for."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as sdpa

import lowtri
from lowtri import LowtriError

ROOT = Path(__file__).parents[1]
RNG = np.random.default_rng(0)
Q, K, V = RNG.standard_normal((3, 2, 2, 6, 8)).astype(np.float32)
TQ, TK, TV = (torch.from_numpy(x) for x in (Q, K, V))
EXPECTED = lowtri.attention(Q, K, V, "causal", engine="reference")
ROWS = RNG.integers(0, 2, (2, 6)).cumsum(1)  # documents, another in each row
TABLE = np.tri(6, dtype=bool)
UPPER = torch.ones(6, 6, dtype=torch.bool).triu(1)


def nested(layout: torch.layout) -> tuple[Any, Any]:
    """Queries, keys and values of 6 and 4 tokens as nested tensors (B, H, N, D), and attention of each row alone."""
    lengths = (6, 4)
    alone = [lowtri.attention(*(x[b : b + 1, :, :n] for x in (TQ, TK, TV)), "causal") for b, n in enumerate(lengths)]
    if layout is torch.strided:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
            return [
                torch.nested.nested_tensor([x[b, :, :n] for b, n in enumerate(lengths)]) for x in (TQ, TK, TV)
            ], alone
    parts = [[x[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)] for x in (TQ, TK, TV)]
    return [torch.nested.nested_tensor(x, layout=layout).transpose(1, 2) for x in parts], alone


def padded_attention(tensors: Any) -> list[Any]:
    """What the advice for nested tensors says, and the real tokens of its result."""
    dense = []
    for x in tensors:
        plain = torch.nested.to_padded_tensor(x if x.layout is torch.strided else x.transpose(1, 2).contiguous(), 0.0)
        dense.append(plain if x.layout is torch.strided else plain.transpose(1, 2))
    output = lowtri.attention(*dense, lowtri.causal() & lowtri.keys(lengths=[6, 4]))
    return [output[:1, :, :6], output[1:, :, :4]]


def same(got: Any, expected: Any) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-5, atol=2e-5)


class Advice:
    """A mistake, the words of its error that are followed, what they say in code, and what was asked for."""

    def __init__(self, mistake: Callable[[], Any], words: str, follow: Callable[[], Any], expected: Any) -> None:
        self.mistake, self.words, self.follow, self.expected = mistake, words, follow, expected


NESTED, ALONE = nested(torch.strided)
JAGGED, _ = nested(torch.jagged)
WEIGHTS = lowtri.attention(Q, K, V, "causal", return_weights=True)[1]
FLEX = "lowtri.integrations.flex"


def flex(score_mod: Callable[..., Any]) -> Any:
    from lowtri.integrations.flex import flex_attention

    return flex_attention(TQ, TK, TV, score_mod)


def flex_block(mask_mod: Callable[..., Any]) -> Any:
    from lowtri.integrations.flex import create_block_mask, flex_attention

    return flex_attention(TQ, TK, TV, block_mask=create_block_mask(mask_mod, None, None, 6, 6, device="cpu"))


class SubArray(np.ndarray):
    """A plain subclass."""


class Subclass(torch.Tensor):
    """A plain subclass."""


CASES = {
    "nested": Advice(
        lambda: lowtri.attention(*NESTED, "causal"),
        "torch.nested.to_padded_tensor(q, 0.0), and keys(lengths=[...]) in the mask",
        lambda: padded_attention(NESTED),
        ALONE,
    ),
    "jagged": Advice(
        lambda: lowtri.attention(*JAGGED, "causal", return_weights=True),
        "torch.nested.to_padded_tensor, and keys(lengths=[...]) in the mask",
        lambda: padded_attention(JAGGED),
        ALONE,
    ),
    "subclass": Advice(
        lambda: lowtri.attention(TQ.as_subclass(Subclass), TK, TV, "causal"),
        "q.as_subclass(torch.Tensor)",
        lambda: lowtri.attention(TQ.as_subclass(Subclass).as_subclass(torch.Tensor), TK, TV, "causal"),
        EXPECTED,
    ),
    "sparse": Advice(
        lambda: lowtri.attention(TQ.to_sparse(), TK, TV, "causal"),
        "q.to_dense()",
        lambda: lowtri.attention(TQ.to_sparse().to_dense(), TK, TV, "causal"),
        EXPECTED,
    ),
    "a subclass of arrays": Advice(
        lambda: lowtri.attention(Q[0, 0].view(SubArray), K[0, 0], V[0, 0], "causal"),
        "np.asarray(q)",
        lambda: lowtri.attention(np.asarray(Q[0, 0].view(SubArray)), K[0, 0], V[0, 0], "causal"),
        EXPECTED[0, 0],
    ),
    "list": Advice(
        lambda: lowtri.attention(Q[0, 0].tolist(), K[0, 0], V[0, 0], "causal"),
        "np.asarray(q)",
        lambda: lowtri.attention(
            np.asarray(Q[0, 0].tolist()), K[0, 0].astype(np.float64), V[0, 0].astype(np.float64), "causal"
        ),
        EXPECTED[0, 0],
    ),
    "a hidden table": Advice(
        lambda: lowtri.attention(TQ, TK, TV, UPPER),
        "lowtri.hidden(m)",
        lambda: lowtri.attention(TQ, TK, TV, lowtri.hidden(UPPER)),
        EXPECTED,
    ),
    "a visible table": Advice(
        lambda: lowtri.attention(TQ, TK, TV, ~UPPER),
        "lowtri.table(m)",
        lambda: lowtri.attention(TQ, TK, TV, lowtri.table(~UPPER)),
        EXPECTED,
    ),
    "zeros and ones": Advice(
        lambda: lowtri.attention(TQ, TK, TV, torch.tril(torch.ones(6, 6))),
        "lowtri.table(m != 0) if 1 = may see",
        lambda: lowtri.attention(TQ, TK, TV, lowtri.table(torch.tril(torch.ones(6, 6)) != 0)),
        EXPECTED,
    ),
    "an additive mask": Advice(
        lambda: lowtri.attention(TQ, TK, TV, torch.where(UPPER, -1e9, 0.0)),
        "lowtri.table(m == 0) as the mask",
        lambda: lowtri.attention(TQ, TK, TV, lowtri.table(torch.where(UPPER, -1e9, 0.0) == 0)),
        EXPECTED,
    ),
    "an additive mask as a bias": Advice(
        lambda: lowtri.attention(TQ, TK, TV, torch.where(UPPER, -1e9, 0.0)),
        'bias=m with the mask "full"',
        lambda: lowtri.attention(TQ, TK, TV, "full", bias=torch.where(UPPER, -1e9, 0.0)),
        EXPECTED,
    ),
    "a table as a bias": Advice(
        lambda: lowtri.attention(TQ, TK, TV, "full", bias=~UPPER),
        "lowtri.table(m) or lowtri.hidden(m)",
        lambda: lowtri.attention(TQ, TK, TV, lowtri.table(~UPPER)),
        EXPECTED,
    ),
    "CausalBias": Advice(
        lambda: lowtri.attention(TQ, TK, TV, causal_upper_left(6, 6)),
        'the mask "causal"',
        lambda: lowtri.attention(TQ, TK, TV, "causal"),
        EXPECTED,
    ),
    "a function": Advice(
        lambda: lowtri.attention(Q, K, V, lambda q, k: k <= q),
        "lowtri.where(f)",
        lambda: lowtri.attention(Q, K, V, lowtri.where(lambda q, k: k <= q)),
        EXPECTED,
    ),
    "no parentheses": Advice(
        lambda: lowtri.attention(Q, K, V, lowtri.causal),
        "Fix: causal().",
        lambda: lowtri.attention(Q, K, V, lowtri.causal()),
        EXPECTED,
    ),
    "no mask": Advice(
        lambda: lowtri.attention(Q, K, V, None),
        "lowtri.full()",
        lambda: lowtri.attention(Q, K, V, lowtri.full()),
        sdpa(TQ, TK, TV),
    ),
    "a number": Advice(
        lambda: lowtri.attention(Q, K, V, 3),
        "'window(3)'",
        lambda: lowtri.mask("window(3)").dense(6),
        lowtri.window(3).dense(6),
    ),
    "integers": Advice(
        lambda: lowtri.attention(np.ones((6, 8), int), np.ones((6, 8), int), np.ones((6, 8), int), "causal"),
        "q.astype(np.float32)",
        lambda: lowtri.attention(*(np.ones((6, 8), int).astype(np.float32) for _ in "qkv"), "causal"),
        np.ones((6, 8)),
    ),
    "devices of one kind": Advice(
        lambda: lowtri.attention(TQ, K, V, "causal"),
        "pass all of one kind",
        lambda: lowtri.attention(TQ, torch.from_numpy(K), torch.from_numpy(V), "causal"),
        EXPECTED,
    ),
    "a huge scale": Advice(
        lambda: lowtri.attention(Q * 1e-38, K, V, "causal", scale=1e38 / 8**0.5),
        "q, k and v in float64",
        lambda: lowtri.attention(
            *(x.astype(np.float64) for x in (Q * np.float64(1e-38), K, V)), "causal", scale=1e38 / 8**0.5
        ),
        EXPECTED,
    ),
    "a tensor as a scale": Advice(
        lambda: lowtri.attention(TQ, TK, TV, "causal", scale=torch.tensor(8**-0.5)),
        "float(scale)",
        lambda: lowtri.attention(TQ, TK, TV, "causal", scale=float(torch.tensor(8**-0.5))),
        EXPECTED,
    ),
    "a batch of masks": Advice(
        lambda: lowtri.attention(Q[1], K[1], V[1], lowtri.documents(ROWS)),
        "mask.for_row(row)",
        lambda: lowtri.attention(Q[1], K[1], V[1], lowtri.documents(ROWS).for_row(1)),
        lowtri.attention(Q, K, V, lowtri.documents(ROWS))[1],
    ),
    "more queries than keys": Advice(
        lambda: lowtri.attention(Q, K[:, :, :4], V[:, :, :4], "causal"),
        "q_positions=range(nq) in attention",
        lambda: lowtri.attention(Q, K[:, :, :4], V[:, :, :4], "causal", q_positions=range(6)),
        sdpa(TQ, TK[:, :, :4], TV[:, :, :4], is_causal=True),
    ),
    "a table of more queries than keys": Advice(
        lambda: lowtri.causal().dense(6, 4),
        "mask(q, k) answers for any positions",
        lambda: lowtri.causal()(np.arange(6)[:, None], np.arange(4)),
        TABLE[:, :4],
    ),
    "lengths that do not add up": Advice(
        lambda: lowtri.attention(Q, K, V, "documents(lengths=[2, 3])"),
        "open_end=True",
        lambda: lowtri.attention(Q, K, V, "documents(lengths=[2, 3], open_end=True)"),
        lowtri.attention(Q, K, V, "documents(lengths=[2, 4])"),
    ),
    "and": Advice(
        lambda: lowtri.causal() and lowtri.window(2),
        "m & n",
        lambda: (lowtri.causal() & lowtri.window(2)).dense(6),
        lowtri.mask("causal & window(2)").dense(6),
    ),
    "and in a text": Advice(
        lambda: lowtri.mask("causal and window(256)"),
        "'causal & window(256)'",
        lambda: lowtri.mask("causal & window(256)").dense(6),
        TABLE,
    ),
    "an open bracket": Advice(
        lambda: lowtri.mask("causal & window(3"),
        "Fix: 'causal & window(3)'",
        lambda: lowtri.mask("causal & window(3)").dense(6),
        (lowtri.causal() & lowtri.window(3)).dense(6),
    ),
    "no brackets": Advice(
        lambda: lowtri.mask("window 3"),
        "Fix: window(3)",
        lambda: lowtri.mask("window(3)").dense(6),
        lowtri.window(3).dense(6),
    ),
    "float16 has no -1e9": Advice(
        lambda: lowtri.causal().additive(6, dtype=np.float16, hidden=-1e9),
        "hidden=-inf, or -1e4",
        lambda: lowtri.causal().additive(6, dtype=np.float16, hidden=-1e4) == 0,
        TABLE,
    ),
    "a dtype of torch": Advice(
        lambda: lowtri.causal().additive(6, dtype=torch.float16),
        "like=tensor",
        lambda: lowtri.causal().additive(6, like=TQ) == 0,
        TABLE,
    ),
    "a condition in where": Advice(
        lambda: lowtri.where(lambda q, k: k <= q and q - k < 3).dense(6),
        "write & | ~ instead of and, or, not",
        lambda: lowtri.where(lambda q, k: (k <= q) & (q - k < 3)).dense(6),
        lowtri.mask("causal & window(3)").dense(6),
    ),
    "weights with a batch": Advice(
        lambda: lowtri.show(WEIGHTS),
        "show(weights[0])",
        lambda: [lowtri.show(WEIGHTS[0]).shape, lowtri.show(WEIGHTS[0]).greatest],
        [WEIGHTS[0].shape, WEIGHTS[0].max()],
    ),
    "score_mod that gives bools": Advice(
        lambda: flex(lambda score, b, h, q, k: k <= q),
        'torch.where(condition, score, float("-inf"))',
        lambda: flex(lambda score, b, h, q, k: torch.where(k <= q, score, float("-inf"))),
        EXPECTED,
    ),
    "score_mod that gives -inf, in the words of the error": Advice(
        lambda: flex(lambda score, b, h, q, k: k <= q),
        'torch.where(condition, score, float("-inf"))',
        lambda: flex(lambda score, b, h, q, k: eval('torch.where(k <= q, score, float("-inf"))')),
        EXPECTED,
    ),
    "mask_mod that gives integers": Advice(
        lambda: flex_block(lambda b, h, q, k: (k <= q).int()),
        "!= 0",
        lambda: flex_block(lambda b, h, q, k: (k <= q).int() != 0),
        EXPECTED,
    ),
    "an integer attn_mask": Advice(
        lambda: lowtri.scaled_dot_product_attention(TQ, TK, TV, torch.ones(6, 6, dtype=torch.int64).tril()),
        "attn_mask != 0",
        lambda: lowtri.scaled_dot_product_attention(TQ, TK, TV, torch.ones(6, 6, dtype=torch.int64).tril() != 0),
        EXPECTED,
    ),
    "shared heads": Advice(
        lambda: lowtri.scaled_dot_product_attention(torch.cat([TQ, TQ], 1), TK, TV, is_causal=True),
        "enable_gqa=True",
        lambda: lowtri.scaled_dot_product_attention(torch.cat([TQ, TQ], 1), TK, TV, is_causal=True, enable_gqa=True),
        sdpa(torch.cat([TQ, TQ], 1), TK, TV, is_causal=True, enable_gqa=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_advice_gives_what_was_asked_for(name: str) -> None:
    case = CASES[name]
    with pytest.raises((LowtriError, TypeError)) as error:
        case.mistake()
    assert case.words in str(error.value)
    same([case.follow()], [case.expected]) if not isinstance(case.expected, list) else same(
        case.follow(), case.expected
    )


def test_weights_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer queries than keys: a part of them stands where the error says."""
    q = Q[:, :, 2:]
    monkeypatch.setattr("lowtri.ops.arguments._memory_bytes", lambda: 1)
    with pytest.raises(LowtriError, match=r"q_positions=p\[a:b\]") as error:
        lowtri.attention(q, K, V, "causal", return_weights=True)
    found = re.search(r"by default range\((\d+), (\d+)\)", str(error.value))
    assert found is not None
    monkeypatch.undo()
    positions = range(int(found[1]), int(found[2]))
    parts = [
        lowtri.attention(q[..., a:b, :], K, V, "causal", q_positions=positions[a:b], return_weights=True)[1]
        for a, b in ((0, 1), (1, 4))
    ]
    same([np.concatenate(parts, axis=2)], [WEIGHTS[:, :, 2:]])


@pytest.mark.parametrize("kind", ["Decoder", "RecurrentLM"])
def test_ids_of_a_model(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "Decoder":
        model = lowtri.nn.Decoder(
            lowtri.nn.DecoderConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
        )
    else:
        model = lowtri.nn.RecurrentLM(vocab_size=9, hidden_size=8)
    model.eval()
    ids = torch.tensor([[1, 2, 3]])
    expected = model(ids)
    for wrong, right in ((ids[0], ids[0][None]), (ids.int().to(torch.int16), ids.to(torch.int16).long())):
        with pytest.raises(LowtriError, match=r"Fix: ids\[None\] of one row \(N,\); ids\.long\(\) of another dtype"):
            model(wrong)
        assert torch.equal(model(right), expected)


def test_no_text_names_lowtri_on_an_index() -> None:
    """The name lowtri belongs to nobody there: what is missing is named itself, and repairs install the checkout."""
    files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "setup.py")]
    files += [x for folder in ("src", "docs", "examples", "tools") for x in (ROOT / folder).rglob("*.*")]
    texts = [x for x in files if x.suffix in (".py", ".md", ".json", ".txt", ".toml") and x.is_file()]
    assert len(texts) > 200
    for path in texts:
        for line in path.read_text(encoding="utf-8").splitlines():
            named = re.search(r"pip install(\s+-\S+)*\s+['\"]?lowtri([\s\['\"`=<>~!,.]|$)", line)
            assert named is None, f"{path.name}: {line.strip()}"
