"""torch's BlockMask from a plan, block for block against torch's create_block_mask, and its mask_mod pair for pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_masks import SIZE, Case, cases
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from lowtri.errors import CallError, MaskError
from lowtri.integrations.flex import block_mask
from lowtri.masks import band, causal, chunks, documents, first, full, heads, keys, strided, table, where, window
from lowtri.masks.mask import Mask

pytestmark = pytest.mark.not_emulated  # choices and block masks: no kernel runs

LISTS = ("kv", "full_kv", "q", "full_q")


def same_blocks(ours: BlockMask, theirs: BlockMask) -> None:
    """The listed blocks are equal; further entries of a row are unused."""
    assert (ours.shape, ours.BLOCK_SIZE, ours.seq_lengths) == (theirs.shape, theirs.BLOCK_SIZE, theirs.seq_lengths)
    for name in LISTS:
        counts, indices = getattr(ours, f"{name}_num_blocks"), getattr(ours, f"{name}_indices")
        other_counts, other = getattr(theirs, f"{name}_num_blocks"), getattr(theirs, f"{name}_indices")
        if other_counts is None:
            assert counts is None and indices is None
            continue
        assert counts.dtype == other_counts.dtype and indices.dtype == other.dtype
        assert torch.equal(counts, other_counts), name
        listed = torch.arange(indices.shape[-1]) < counts[..., None]
        assert torch.equal(indices[listed], other[listed]), name


def tables(mask: Mask, nq: int, nk: int) -> Tensor:
    """(B|1, H|1, nq, nk): all pairs."""
    return torch.from_numpy(mask.dense(nq, nk).reshape(*(*mask.batch, 1, 1)[:2], nq, nk))


def of_table(pairs: Tensor, block: int = 128) -> BlockMask:
    return create_block_mask(
        lambda b, h, q, k: pairs[b, h, q, k], *pairs.shape[:2], *pairs.shape[2:], device="cpu", BLOCK_SIZE=block
    )


N = 700
IDS = np.stack([np.repeat(np.arange(4), [250, 6, 128, 316]), np.repeat(np.arange(2), [384, 316])])
RANDOM = np.random.default_rng(0)
MASKS: dict[str, Mask] = {
    "causal": causal(),
    "full": full(),
    "window": causal() & window(300),
    "sinks": causal() & (window(200) | first(5)),
    "prefix": causal() | first(300),
    "documents": causal() & documents(lengths=[250, 6, 128, 316], open_end=True),
    "documents by row": documents(IDS),
    "band": band(200, 64),
    "chunks": causal() & chunks(200),
    "strided": causal() & strided(3),
    "strided by blocks": strided(128),
    "keys": causal() & keys(RANDOM.random(N) < 0.5),
    "key lengths": causal() & keys(lengths=[700, 100]),
    "heads": heads([causal(), window(100), full()]),
    "difference": causal() - window(300),
    "not": ~causal(),
    "table": table(RANDOM.random((2, 2, N, N)) < 0.0005),
    "where": where(lambda q, k: (k <= q) & (k % 7 == 3)),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_blocks_are_those_of_torch(name: str) -> None:
    mask = MASKS[name]
    for nq, nk, block in ((N, N, 128), (640, 640, 64), (130, N, 128), (1, 500, 128)):
        if "table" in name and nq != N:
            continue
        ours, pairs = block_mask(mask, nq, nk, block=block), tables(mask, nq, nk)
        same_blocks(ours, of_table(pairs, block))
        assert torch.equal(create_mask(ours.mask_mod, *pairs.shape, device="cpu"), pairs)


@settings(max_examples=25, deadline=None)
@given(cases, st.integers(1, SIZE), st.integers(1, SIZE), st.integers(0, 99))
def test_any_mask_at_any_positions(case: Case, nq: int, nk: int, seed: int) -> None:
    source = np.random.default_rng(seed)
    q, k = (np.where(source.random(n) < 0.1, -1, source.permutation(SIZE)[:n]) for n in (nq, nk))
    ours = block_mask(case.mask, nq, nk, q_positions=q, k_positions=k, block=64)
    pairs = torch.from_numpy(
        np.asarray(case.mask(q[:, None], k[None, :])).reshape(*(*case.mask.batch, 1, 1)[:2], nq, nk)
    )
    same_blocks(ours, of_table(pairs, 64))
    assert torch.equal(create_mask(ours.mask_mod, *pairs.shape, device="cpu"), pairs)


def test_masks_of_two_ranges_share_one_function_and_its_shapes() -> None:
    """So that torch compiles one program for them."""

    def kinds(mask: Mask) -> list[Any]:
        made = block_mask(mask, N).mask_mod
        captured = (cell.cell_contents for cell in made.__closure__)
        return [made.__code__, *((x.shape, x.dtype) for x in captured if isinstance(x, Tensor))]

    names = ("causal", "full", "window", "sinks", "prefix", "documents", "band", "chunks", "difference")
    assert all(kinds(MASKS[name]) == kinds(causal()) for name in names)
    assert kinds(MASKS["strided"])[0] is kinds(MASKS["keys"])[0] is not kinds(causal())[0]


def test_positions_by_row() -> None:
    """Left padding: the same mask at other positions in each row."""
    positions = np.stack([np.arange(300), np.arange(300) - 40])
    ours = block_mask(causal(), 300, q_positions=positions, k_positions=positions)
    pairs = causal()(positions[:, :, None], positions[:, None, :])
    same_blocks(ours, of_table(torch.from_numpy(pairs)[:, None]))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (("causal", 8), {"block": 100}, MaskError, "block is 100, but it is a multiple of 64. Fix: block=128"),
        (("causal", 8), {"block": 0}, MaskError, "multiple of 64"),
        (("causal", 0), {}, MaskError, "there are no blocks"),
        (("causal", 8.5), {}, MaskError, r"nq is 8\.5"),
        (("causal", 9, 8), {}, MaskError, r"Fix: q_positions=range\(nq\) in attention"),
        (("causal", 8), {"q_positions": range(7)}, CallError, r"q_positions is \(7,\)"),
        (("causal", 8), {"k_positions": [0.5] * 8}, CallError, "k_positions is float64"),
        ((torch.ones(2, 2) > 0, 2), {}, MaskError, "True hides in many notebooks"),
    ],
)
def test_errors(arguments: Any, options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        block_mask(*arguments, **options)
