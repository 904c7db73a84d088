"""lowtri's grouped-query attention under a window with sinks."""

from __future__ import annotations

import torch

import lowtri


def make_model(seed=0):
    torch.manual_seed(seed)
    return lowtri.nn.MultiHeadAttention(16, 4, 2, mask=MASK), torch.randn(2, 11, 16)


MASK = "causal & (window(3) | first(2))"
