"""Two layers of window 3 reach 5 back, and the mask says so with `layers`."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 24) for _ in range(2))

    def forward(self, x):  # (B, N, 8)
        back = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])[None, :]
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, -1)
            x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=(back >= 0) & (back < 3))
        return x


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(2, 9, 8), {"layers": 2}


MASK = "causal & window(3)"
