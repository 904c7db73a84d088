"""A query that sees nothing: with -1e9 on every score its softmax is even, the mean of what was hidden."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x):  # (B, N, 8)
        q, k, v = self.qkv(x).chunk(3, -1)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(0)
        scores = (q @ k.mT / 8**0.5).masked_fill(hidden, -1e9)
        return self.out(scores.softmax(-1) @ v)


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(2, 9, 8)


MASK = "causal - window(1)"
PAIR = (0, 0)
PROBE = "change"
