"""An encoder without order that hides its pads: padded equals alone on every side."""

from __future__ import annotations

import torch

import lowtri


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x, attention_mask=None):  # (B, N, 8), (B, N)
        q, k, v = self.qkv(x).chunk(3, -1)
        real = None if attention_mask is None else attention_mask[:, None, :].bool()
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=real)


def make_model(seed=0):
    torch.manual_seed(seed)
    return lowtri.Model(Model(), pads="attention_mask"), torch.randn(2, 9, 8)


MASK = "full"
