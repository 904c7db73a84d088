"""lowtri's plain module."""

from __future__ import annotations

import torch

import lowtri


def make_model(seed=0):
    torch.manual_seed(seed)
    return lowtri.nn.MaskedSelfAttention(8), torch.randn(9, 8)


MASK = "causal"
