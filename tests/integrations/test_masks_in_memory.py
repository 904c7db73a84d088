"""Masks whose memory changes through another name: each call uses what the memory holds then.

torch does not count changes through NumPy, ``.data`` or shared memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lowtri.integrations import flex
from lowtri.integrations.content import content_of
from lowtri.integrations.dense_mask import _lazy_mask_of, read_dense_mask
from lowtri.integrations.torch import switch
from lowtri.integrations.transformers import attend

N = 70
SOURCE = torch.Generator().manual_seed(0)
Q = torch.randn(1, 2, N, 16, generator=SOURCE)


def through_numpy(x: Tensor, value: Any) -> None:
    x.numpy()[..., 30:] = value


def through_data(x: Tensor, value: Any) -> None:
    x.data[..., 30:] = value


def through_shared_memory(x: Tensor, value: Any) -> None:
    torch.frombuffer(memoryview(x.numpy()), dtype=x.dtype).reshape(x.shape)[..., 30:] = value


WAYS = [through_numpy, through_data, through_shared_memory]
Change = Callable[[Tensor, Any], None]


def expected(visible: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(Q, Q, Q, attn_mask=visible)


@pytest.mark.parametrize("change", WAYS)
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("floats", [False, True])
def test_masks_of_a_switched_module(change: Change, padding: bool, floats: bool) -> None:
    plain = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    switched, x = switch(copy.deepcopy(plain)), torch.randn(1, N, 8, generator=SOURCE)
    mask = torch.zeros((1, N) if padding else (N, N), dtype=torch.float32 if floats else torch.bool)
    options = {"key_padding_mask" if padding else "attn_mask": mask, "need_weights": False}
    for value in (True, False, -1.5, 0.0) if not floats else (-torch.inf, 2.0, 0.0):
        change(mask, value)
        torch.testing.assert_close(switched(x, x, x, **options)[0], plain(x, x, x, **options)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("change", WAYS)
def test_tables_of_a_layer_of_transformers(change: Change) -> None:
    layer, table = nn.Module(), torch.ones(1, 1, N, N, dtype=torch.bool)
    for value in (True, False, True):
        change(table, value)
        found, _ = attend(layer, Q, Q, Q, table, is_causal=False)
        torch.testing.assert_close(found.transpose(1, 2), expected(table), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("change", WAYS)
@pytest.mark.parametrize("traced", [True, False])
def test_what_a_mask_mod_captures(change: Change, traced: bool) -> None:
    """Small and large tensors, also of a function that cannot be traced."""
    for size in (N, 300):
        ids = torch.zeros(size, dtype=torch.int64)

        def same(b: Any, h: Any, q: Any, k: Any, ids: Tensor = ids) -> Any:
            inside = ids[q] == ids[k]
            return inside if traced else inside & torch.tensor(ids.tolist()[:1])[k * 0].ge(0)

        blocks = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, N, N, device="cpu")  # one block
        blocks.mask_mod = same
        for value in (0, 1, 0, 2):
            change(ids, value)
            found = flex.flex_attention(Q, Q, Q, None, blocks)
            torch.testing.assert_close(found, expected(ids[:N, None] == ids[:N]), atol=1e-5, rtol=1e-5)


def test_the_lists_of_a_block_mask() -> None:
    blocks = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, N, N, device="cpu")
    causal = flex.flex_attention(Q, Q, Q, None, blocks)
    blocks.kv_num_blocks.numpy()[...] = 0
    assert causal.any() and not flex.flex_attention(Q, Q, Q, None, blocks).any()


@pytest.mark.parametrize("change", WAYS)
@pytest.mark.parametrize("size", [N, 300])
def test_what_a_condition_in_a_score_mod_captures(change: Change, size: int) -> None:
    seen = torch.ones(size, dtype=torch.bool)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where(seen[k], score, -torch.inf)

    for value in (True, False, True):
        change(seen, value)
        found = flex.flex_attention(Q, Q, Q, score_mod)
        torch.testing.assert_close(found, expected(seen[:N].expand(N, N)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("read", [lambda x: x, lambda x: x.item(), lambda x: int(x)], ids=["tensor", "item", "int"])
def test_numbers_that_a_mask_mod_reads(read: Callable[[Tensor], Any]) -> None:
    size = torch.tensor(5)
    blocks = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, N, N, device="cpu")
    blocks.mask_mod = lambda b, h, q, k: (q >= k) & (q - k < read(size))
    distance = torch.arange(N)[:, None] - torch.arange(N)
    for n in (5, 9, 5):
        size.numpy()[...] = n
        found = flex.flex_attention(Q, Q, Q, None, blocks)
        torch.testing.assert_close(found, expected((distance >= 0) & (distance < n)), atol=1e-5, rtol=1e-5)


def test_equal_tables_are_one_mask_and_their_memory_is_not_kept() -> None:
    table = torch.rand(1, 1, N, N, generator=SOURCE) < 0.5
    one, other = (read_dense_mask(x, N, N, torch.float32).lazy for x in (table, table.clone()))
    assert one is other
    change = table.clone()
    through_numpy(change, False)
    assert read_dense_mask(change, N, N, torch.float32).lazy is not one
    through_numpy(table, False)
    assert one.mask.table.array.any(axis=0)[30:].any(), "a mask has memory of its own"  # type: ignore[attr-defined]
    assert _lazy_mask_of.cache_info().maxsize == 16


def test_content_is_that_of_numbers_shape_and_dtype() -> None:
    x = torch.arange(6, dtype=torch.float32)
    tensors = [x, x.reshape(2, 3), x.int(), x.bfloat16(), x > 2, torch.tensor(1), torch.empty(0), torch.empty(0, 3)]
    assert len({content_of(one) for one in tensors}) == len(tensors)
    assert all(content_of(one) == content_of(one.clone()) for one in tensors)
    assert content_of(x[::2]) == content_of(x[::2].clone()) and content_of(None) is None
    assert np.array_equal(x.numpy(), np.arange(6))
    torch.vmap(lambda row: (content_of(row), row)[1])(x.reshape(2, 3))


@pytest.mark.parametrize("change", WAYS)
@pytest.mark.parametrize("captured", [0, 1])
def test_lists_made_of_documents_that_change(change: Change, captured: int) -> None:
    """The lists of our create_block_mask, full and empty blocks among them, were made of what the documents held then."""
    ids = torch.full((N,), captured)
    blocks = flex.create_block_mask(
        lambda b, h, q, k: ids[q] * ids[k] == 1, None, None, N, N, device="cpu", BLOCK_SIZE=32
    )
    for value in (2, 1, 0):
        change(ids, value)
        visible = ids[:, None] * ids == 1
        found = flex.flex_attention(Q, Q, Q, None, blocks)
        torch.testing.assert_close(found, expected(visible).nan_to_num(), atol=1e-5, rtol=1e-5)


def test_lists_decide_beside_another_mask_mod() -> None:
    blocks = flex.create_block_mask(lambda b, h, q, k: k < 64, None, None, N, N, device="cpu", BLOCK_SIZE=32)
    blocks.mask_mod = lambda b, h, q, k: q >= 0
    visible = (torch.arange(N) < 64).expand(N, N)
    torch.testing.assert_close(flex.flex_attention(Q, Q, Q, None, blocks), expected(visible), atol=1e-5, rtol=1e-5)
