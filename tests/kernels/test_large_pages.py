"""New outputs and gradients of some megabytes ask the system for large pages."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

import lowtri
from lowtri.backends.cpu.launch import LARGE, ask_for_large_pages

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes such advice")


def asked(address: int) -> bool:
    """Whether the memory at an address has been asked to have large pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("no such memory")


@linux
@pytest.mark.not_emulated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_outputs_and_gradients_ask_for_large_pages(dtype: torch.dtype) -> None:
    n = LARGE // 64 // dtype.itemsize
    q, k, v = (torch.randn(1, 1, n, 64).to(dtype).requires_grad_() for _ in range(3))
    output = lowtri.attention(q, k, v, "causal & window(2)", engine="cpu")
    assert asked(output.data_ptr() + LARGE // 2)
    if dtype is torch.float32:  # gradients of half types are sums in float32, and then rounded
        output.sum().backward()
        assert all(x.grad is not None and asked(x.grad.data_ptr() + LARGE // 2) for x in (q, k, v))


@linux
@pytest.mark.not_emulated
def test_memory_keeps_its_content() -> None:
    with mmap.mmap(-1, 2**23) as memory:
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        whole.copy_(torch.arange(2**23) % 251)
        for first, length in ((0, 2**23), (17, 2**22), (4096, 2**22 + 1)):
            ask_for_large_pages(whole.data_ptr() + first, length)
        assert asked(whole.data_ptr())
        assert torch.equal(whole.long(), torch.arange(2**23) % 251)
        del whole


@linux
def test_memory_that_is_smaller_than_a_page_is_left_alone() -> None:
    """Its length would be negative, which the system reads as a huge one."""
    with mmap.mmap(-1, 4 * mmap.PAGESIZE) as memory:
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        ask_for_large_pages(whole.data_ptr() + 8, 100)
        assert not asked(whole.data_ptr())
        del whole
