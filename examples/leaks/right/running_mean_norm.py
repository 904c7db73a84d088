"""A norm over time that is right: the statistics run, and end at each position itself."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x):  # (B, N, 8)
        count = torch.arange(1, x.shape[1] + 1)[:, None]
        mean = x.cumsum(1) / count
        spread = (x.square().cumsum(1) / count - mean.square()).clamp(min=0).sqrt()
        return self.out((x - mean) / (1 + spread))


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(2, 9, 8)


MASK = "causal"
