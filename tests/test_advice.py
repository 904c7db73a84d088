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


def arrays(mask: Any = "causal", *, q: Any = Q, k: Any = K, v: Any = V, **options: Any) -> Any:
    return lowtri.attention(q, k, v, mask, **options)


def tensors(mask: Any = "causal", *, q: Any = TQ, k: Any = TK, v: Any = TV, **options: Any) -> Any:
    return lowtri.attention(q, k, v, mask, **options)


def one_head(q: Any, k: Any = K[0, 0], v: Any = V[0, 0]) -> Any:
    return lowtri.attention(q, k, v, "causal")


def torchs(mask: Any = None, *, q: Any = TQ, **options: Any) -> Any:
    return lowtri.scaled_dot_product_attention(q, TK, TV, mask, **options)


def pairs(text: str) -> Any:
    return lowtri.mask(text).dense(6)


ODD = TQ.as_subclass(Subclass)
SUB = Q[0, 0].view(SubArray)
LOWER = torch.tril(torch.ones(6, 6))
ADDED = torch.where(UPPER, -1e9, 0.0)
WIDE = [x.astype(np.float64) for x in (Q * np.float64(1e-38), K, V)]
WHOLE = torch.ones(6, 6, dtype=torch.int64).tril()
TWICE = torch.cat([TQ, TQ], 1)
TWO_DOCUMENTS = lowtri.documents(ROWS)

# The mistake, the words of its error that are followed, what they say in code, and what was asked for: the causal attention
# of Q, K and V where nothing stands.
CASES: dict[str, tuple[Any, ...]] = {
    "nested": (
        lambda: lowtri.attention(*NESTED, "causal"),
        "torch.nested.to_padded_tensor(q, 0.0), and keys(lengths=[...]) in the mask",
        lambda: padded_attention(NESTED),
        ALONE,
    ),
    "jagged": (
        lambda: lowtri.attention(*JAGGED, "causal", return_weights=True),
        "torch.nested.to_padded_tensor, and keys(lengths=[...]) in the mask",
        lambda: padded_attention(JAGGED),
        ALONE,
    ),
    "subclass": (
        lambda: tensors(q=ODD),
        "q.as_subclass(torch.Tensor)",
        lambda: tensors(q=ODD.as_subclass(torch.Tensor)),
    ),
    "sparse": (lambda: tensors(q=TQ.to_sparse()), "q.to_dense()", lambda: tensors(q=TQ.to_sparse().to_dense())),
    "a subclass of arrays": (lambda: one_head(SUB), "np.asarray(q)", lambda: one_head(np.asarray(SUB)), EXPECTED[0, 0]),
    "list": (
        lambda: one_head(Q[0, 0].tolist()),
        "np.asarray(q)",
        lambda: one_head(np.asarray(Q[0, 0].tolist()), *(x[0, 0].astype(np.float64) for x in (K, V))),
        EXPECTED[0, 0],
    ),
    "a hidden table": (lambda: tensors(UPPER), "lowtri.hidden(m)", lambda: tensors(lowtri.hidden(UPPER))),
    "a visible table": (lambda: tensors(~UPPER), "lowtri.table(m)", lambda: tensors(lowtri.table(~UPPER))),
    "zeros and ones": (
        lambda: tensors(LOWER),
        "lowtri.table(m != 0) if 1 = may see",
        lambda: tensors(lowtri.table(LOWER != 0)),
    ),
    "an additive mask": (
        lambda: tensors(ADDED),
        "lowtri.table(m == 0) as the mask",
        lambda: tensors(lowtri.table(ADDED == 0)),
    ),
    "an additive mask as a bias": (
        lambda: tensors(ADDED),
        'bias=m with the mask "full"',
        lambda: tensors("full", bias=ADDED),
    ),
    "a table as a bias": (
        lambda: tensors("full", bias=~UPPER),
        "lowtri.table(m) or lowtri.hidden(m)",
        lambda: tensors(lowtri.table(~UPPER)),
    ),
    "CausalBias": (lambda: tensors(causal_upper_left(6, 6)), 'the mask "causal"', lambda: tensors("causal")),
    "a function": (
        lambda: arrays(lambda q, k: k <= q),
        "lowtri.where(f)",
        lambda: arrays(lowtri.where(lambda q, k: k <= q)),
    ),
    "no parentheses": (lambda: arrays(lowtri.causal), "Fix: causal().", lambda: arrays(lowtri.causal())),
    "no mask": (lambda: arrays(None), "lowtri.full()", lambda: arrays(lowtri.full()), sdpa(TQ, TK, TV)),
    "a number": (lambda: arrays(3), "'window(3)'", lambda: pairs("window(3)"), lowtri.window(3).dense(6)),
    "integers": (
        lambda: lowtri.attention(*[np.ones((6, 8), int)] * 3, "causal"),
        "q.astype(np.float32)",
        lambda: lowtri.attention(*[np.ones((6, 8), int).astype(np.float32)] * 3, "causal"),
        np.ones((6, 8)),
    ),
    "devices of one kind": (lambda: arrays(q=TQ), "pass all of one kind", lambda: arrays(q=TQ, k=TK, v=TV)),
    "a huge scale": (
        lambda: arrays(q=Q * 1e-38, scale=1e38 / 8**0.5),
        "q, k and v in float64",
        lambda: lowtri.attention(*WIDE, "causal", scale=1e38 / 8**0.5),
    ),
    "a tensor as a scale": (
        lambda: tensors(scale=torch.tensor(8**-0.5)),
        "float(scale)",
        lambda: tensors(scale=float(torch.tensor(8**-0.5))),
    ),
    "a batch of masks": (
        lambda: arrays(TWO_DOCUMENTS, q=Q[1], k=K[1], v=V[1]),
        "mask.for_row(row)",
        lambda: arrays(TWO_DOCUMENTS.for_row(1), q=Q[1], k=K[1], v=V[1]),
        arrays(TWO_DOCUMENTS)[1],
    ),
    "more queries than keys": (
        lambda: arrays(k=K[:, :, :4], v=V[:, :, :4]),
        "q_positions=range(nq) in attention",
        lambda: arrays(k=K[:, :, :4], v=V[:, :, :4], q_positions=range(6)),
        sdpa(TQ, TK[:, :, :4], TV[:, :, :4], is_causal=True),
    ),
    "a table of more queries than keys": (
        lambda: lowtri.causal().dense(6, 4),
        "mask(q, k) answers for any positions",
        lambda: lowtri.causal()(np.arange(6)[:, None], np.arange(4)),
        TABLE[:, :4],
    ),
    "lengths that do not add up": (
        lambda: arrays("documents(lengths=[2, 3])"),
        "open_end=True",
        lambda: arrays("documents(lengths=[2, 3], open_end=True)"),
        arrays("documents(lengths=[2, 4])"),
    ),
    "and": (
        lambda: lowtri.causal() and lowtri.window(2),
        "m & n",
        lambda: (lowtri.causal() & lowtri.window(2)).dense(6),
        pairs("causal & window(2)"),
    ),
    "and in a text": (
        lambda: pairs("causal and window(256)"),
        "'causal & window(256)'",
        lambda: pairs("causal & window(256)"),
        TABLE,
    ),
    "an open bracket": (
        lambda: pairs("causal & window(3"),
        "Fix: 'causal & window(3)'",
        lambda: pairs("causal & window(3)"),
        (lowtri.causal() & lowtri.window(3)).dense(6),
    ),
    "no brackets": (lambda: pairs("window 3"), "Fix: window(3)", lambda: pairs("window(3)"), lowtri.window(3).dense(6)),
    "float16 has no -1e9": (
        lambda: lowtri.causal().additive(6, dtype=np.float16, hidden=-1e9),
        "hidden=-inf, or -1e4",
        lambda: lowtri.causal().additive(6, dtype=np.float16, hidden=-1e4) == 0,
        TABLE,
    ),
    "a dtype of torch": (
        lambda: lowtri.causal().additive(6, dtype=torch.float16),
        "like=tensor",
        lambda: lowtri.causal().additive(6, like=TQ) == 0,
        TABLE,
    ),
    "a condition in where": (
        lambda: lowtri.where(lambda q, k: k <= q and q - k < 3).dense(6),
        "write & | ~ instead of and, or, not",
        lambda: lowtri.where(lambda q, k: (k <= q) & (q - k < 3)).dense(6),
        pairs("causal & window(3)"),
    ),
    "weights with a batch": (
        lambda: lowtri.show(WEIGHTS),
        "show(weights[0])",
        lambda: [lowtri.show(WEIGHTS[0]).shape, lowtri.show(WEIGHTS[0]).greatest],
        [WEIGHTS[0].shape, WEIGHTS[0].max()],
    ),
    "score_mod that gives bools": (
        lambda: flex(lambda score, b, h, q, k: k <= q),
        'torch.where(condition, score, float("-inf"))',
        lambda: flex(lambda score, b, h, q, k: eval('torch.where(k <= q, score, float("-inf"))')),
    ),
    "mask_mod that gives integers": (
        lambda: flex_block(lambda b, h, q, k: (k <= q).int()),
        "!= 0",
        lambda: flex_block(lambda b, h, q, k: (k <= q).int() != 0),
    ),
    "an integer attn_mask": (lambda: torchs(WHOLE), "attn_mask != 0", lambda: torchs(WHOLE != 0)),
    "shared heads": (
        lambda: torchs(q=TWICE, is_causal=True),
        "enable_gqa=True",
        lambda: torchs(q=TWICE, is_causal=True, enable_gqa=True),
        sdpa(TWICE, TK, TV, is_causal=True, enable_gqa=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_advice_gives_what_was_asked_for(name: str) -> None:
    mistake, words, follow, *given = CASES[name]
    with pytest.raises((LowtriError, TypeError)) as error:
        mistake()
    assert words in str(error.value)
    (expected,) = given or [EXPECTED]
    same(*((follow(), expected) if isinstance(expected, list) else ([follow()], [expected])))


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
