"""Decoding loads rows of the cache before they are needed: never past its end."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

import lowtri

PROT_NONE = 0


def at_the_end_of_memory(x: torch.Tensor) -> tuple[torch.Tensor, mmap.mmap]:
    """A copy of a contiguous tensor whose last byte is followed by a page that cannot be read."""
    size, page = x.numel() * x.element_size(), mmap.PAGESIZE
    whole = -(-size // page) * page
    memory = mmap.mmap(-1, whole + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start + whole), page, PROT_NONE) == 0
    copy = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=whole - size).view(x.shape)
    copy.copy_(x)
    return copy, memory


@pytest.mark.parametrize("layout", ["heads of keys", "keys of heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_past_the_last_key_is_read(dtype: torch.dtype, layout: str) -> None:
    """A fault would end the process. Keys, values and outputs are those of a cache in the middle of memory."""
    shapes = [(d, n, group) for d in (32, 96, 128) for n in (1, 7, 8, 9, 16, 33) for group in (1, 3, 4)]
    for d, n, group in shapes:
        q = torch.randn(1, 2 * group, 1, d, generator=torch.Generator().manual_seed(n)).to(dtype)
        cache = torch.randn(2, 1, 2, n, d, generator=torch.Generator().manual_seed(d)).to(dtype)
        if layout == "keys of heads":
            cache = cache.transpose(2, 3).contiguous()
        expected = None
        for k, v in (cache, [at_the_end_of_memory(x)[0] for x in cache]):
            k, v = (x.transpose(1, 2) if layout == "keys of heads" else x for x in (k, v))
            output = lowtri.attention(q, k, v, lowtri.full(), engine="cpu")
            expected = output if expected is None else expected
            assert torch.equal(output, expected), (d, n, group)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 8, 13])
def test_every_number_of_query_heads(group: int) -> None:
    """Blocks of one, four and eight queries, and what is left of them, over one block of keys and over several."""
    for dtype, limit in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        for d, n in ((16, 300), (80, 300), (128, 300), (32, 2100)):
            q, cache = torch.randn(1, group, 1, d).to(dtype), torch.randn(2, 1, 1, n, d).to(dtype)
            output = lowtri.attention(q, *cache, lowtri.full(), engine="cpu")
            exact = torch.softmax(q.double() @ cache[0].double().mT / d**0.5, -1) @ cache[1].double()
            assert (output.double() - exact).abs().max() <= limit * exact.abs().max().clamp(min=1)
