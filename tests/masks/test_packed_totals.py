"""Lengths of documents add up to the row of a call; ``open_end=True`` leaves the last document without a fixed length."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lowtri
from lowtri import KVCache, MaskError, attention, documents
from lowtri.integrations.flex import block_mask
from lowtri.masks.text import from_text, to_text

N = 8
X = np.random.default_rng(0).standard_normal((2, N, 4))  # (H, N, D)
WRONG = {
    "documents(lengths=[3, 9])": 12,
    "documents(lengths=[3, 3])": 6,
    "causal & documents(cu_seqlens=[0, 3, 9])": 9,
    "causal - documents(lengths=[9])": 9,
    "causal | documents(lengths=[3, 5]) & documents(lengths=[2, 5])": 7,
    "heads([causal, causal & ~documents(lengths=[3, 4])])": 7,
}
FIX = "Fix: lengths that add up to 8; or open_end=True"


@pytest.mark.parametrize("text", WRONG)
def test_lengths_that_do_not_add_up_raise(text: str) -> None:
    words = rf"the lengths of the documents in .* add up to {WRONG[text]}, but the row has 8 tokens.\n{FIX}"
    with pytest.raises(MaskError, match=f"attention: {words}"):
        attention(X, X, X, text)
    with pytest.raises(MaskError, match=f"attention: {words}"):
        lowtri.which_engine(torch.from_numpy(X), torch.from_numpy(X), torch.from_numpy(X), text)
    with pytest.raises(MaskError, match=f"explain: {words}"):
        lowtri.explain((X, X, X), mask=text)
    with pytest.raises(MaskError, match=f"plan_shards: {words}"):
        lowtri.parallel.plan_shards(text, N, 2)
    with pytest.raises(MaskError, match=f"block_mask: {words}"):
        block_mask(text, N)
    with pytest.raises(MaskError, match=f"audit: {words}"):
        lowtri.audit(lambda x: x, torch.from_numpy(X), mask=text)


@pytest.mark.parametrize("text", ["documents(lengths=[3, 9], {})", "causal & documents(cu_seqlens=[0, 3, 4], {})"])
def test_an_open_end_allows_any_row(text: str) -> None:
    whole = text.replace("9", "5").replace("4", "8").format("open_end=False")
    assert np.array_equal(attention(X, X, X, text.format("open_end=True")), attention(X, X, X, whole))


def test_a_recurrent_model_too() -> None:
    model = lowtri.nn.RecurrentLM(9, 4)
    with pytest.raises(MaskError, match=r"RecurrentLM: .* add up to 12, but the row has 8 tokens"):
        model(torch.arange(N)[None], mask="causal & documents(lengths=[3, 9])")


def test_with_positions_the_row_may_go_on_but_not_past_its_end() -> None:
    mask, rows = lowtri.mask("causal & documents(lengths=[3, 5])"), np.array([[-1, 0, 1, 2], [4, 5, 6, 7]])
    x = np.stack([X[:, :4], X[:, 4:]])  # (B, H, N, D): left padding, and the end of a row
    output = attention(x, x, x, mask, q_positions=rows, k_positions=rows)
    assert np.allclose(output[1], attention(x[1], x[1], x[1], "causal"))  # one document
    with pytest.raises(MaskError, match=r"add up to 8, but the row has 9 tokens"):
        attention(x, x, x, mask, q_positions=rows + 1, k_positions=rows + 1)
    assert attention(x[:, :, :0], x[:, :, :0], x[:, :, :0], "causal & documents(lengths=[1], open_end=True)").size == 0


def test_a_cache_needs_an_open_end_and_equals_the_full_forward() -> None:
    words = r"(?s)KVCache: .* end after 8 tokens, but the sequence grows.\nFix: .*open_end=True"
    with pytest.raises(MaskError, match=words):
        KVCache("causal & documents(lengths=[3, 5])")
    growing = lowtri.causal() & documents(lengths=[3, 2], open_end=True)
    cache = KVCache(growing, block=1)
    steps = [cache.attend(*[X[:, t : t + 1]] * 3) for t in range(N)]
    whole = attention(X, X, X, "causal & documents(lengths=[3, 5])")
    assert np.allclose(np.concatenate(steps, 1), whole) and np.array_equal(whole, attention(X, X, X, growing))
    assert cache.evicted == 3  # the first document


def test_a_model_with_documents_generates_past_their_lengths_only_with_an_open_end() -> None:
    torch.manual_seed(0)
    config = {"vocab_size": 19, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    masks = ["causal & documents(lengths=[2, 2])", "causal & documents(lengths=[2, 2], open_end=True)"]
    closed, growing = (lowtri.nn.Decoder(lowtri.nn.DecoderConfig(**config, mask=mask)).eval() for mask in masks)
    with torch.no_grad():
        assert closed(torch.arange(4)[None]).shape == (1, 4, 19)
    for cached in (True, False):
        with pytest.raises(MaskError, match="open_end=True"):
            list(lowtri.generate(closed, [1, 2, 3, 4], 3, cached=cached))
    assert len(list(lowtri.generate(growing, [1, 2, 3, 4], 6))) == 6
    assert list(lowtri.generate(growing, [1, 2, 3], 6)) == list(lowtri.generate(growing, [1, 2, 3], 6, cached=False))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans())
def test_text_pickle_and_serialisation_keep_the_end(lengths: list[int], open_end: bool) -> None:
    mask = lowtri.causal() & documents(lengths=lengths, open_end=open_end)
    assert mask.packed_totals == (() if open_end else (sum(lengths),))
    for again in (lowtri.mask(repr(mask)), pickle.loads(pickle.dumps(mask)), from_text(*to_text(mask))):
        assert again == mask and hash(again) == hash(mask) and again.packed_totals == mask.packed_totals
    assert mask != lowtri.causal() & documents(lengths=lengths, open_end=not open_end)
    # Tiles and pictures have an answer for every position, whether or not the row ends.
    end = sum(lengths)
    assert mask.tile(end, end + 9, end, end + 9) == lowtri.Tile.PARTIAL
    assert len(mask.draw(end + 3).splitlines()) == end + 3


@pytest.mark.not_emulated
def test_a_compiled_call_compares_its_lengths_too() -> None:
    compiled = torch.compile(lambda x, mask: attention(x, x, x, mask), backend="eager")
    x = torch.from_numpy(X)
    assert torch.allclose(compiled(x, "documents(lengths=[3, 5])"), attention(x, x, x, "documents(lengths=[3, 5])"))
    with pytest.raises(Exception, match="add up to 12, but the row has 8 tokens"):
        compiled(x, "documents(lengths=[3, 9])")


@pytest.mark.parametrize("arguments", [{"ids": [0, 1], "open_end": True}, {"lengths": [2], "open_end": 1}])
def test_open_end_is_a_bool_for_lengths(arguments: dict[str, object]) -> None:
    with pytest.raises(MaskError, match=r"open_end is .*; it is True or False, and goes with lengths= or cu_seqlens="):
        documents(**arguments)
