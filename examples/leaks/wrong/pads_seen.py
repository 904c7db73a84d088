"""An encoder that takes a padding mask and forgets it: the pads enter every real position."""

from __future__ import annotations

import torch

import lowtri


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x, attention_mask=None):  # (B, N, 8), (B, N)
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def make_model(seed=0):
    torch.manual_seed(seed)
    return lowtri.Model(Model(), pads="attention_mask"), torch.randn(2, 9, 8)


MASK = "full"
PAIR = (0, -1)
PROBE = "padding"
