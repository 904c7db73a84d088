"""A mask with room for 100 positions: what comes after them is not hidden, and a short example never gets there."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x):  # (B, N, 8)
        q, k, v = self.qkv(x).chunk(3, -1)
        n = x.shape[1]
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        hidden[:, 100:] = False
        return self.out((q @ k.mT / 8**0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v)


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(2, 9, 8)


MASK = "causal"
PAIR = (8, 100)
PROBE = "longer"
