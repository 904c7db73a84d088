"""A scan in chunks of 4 that adds a whisper of its own chunk's total: tiny, and above no loss's notice."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x):  # (B, N, 8)
        inside = torch.cat([part.cumsum(1) for part in x.split(4, dim=1)], dim=1)
        totals = torch.stack([part.sum(1) for part in x.split(4, dim=1)], dim=1).cumsum(1)  # its own chunk included
        state = totals.repeat_interleave(4, dim=1)[:, : x.shape[1]]
        return self.out(inside + 3e-5 * state)


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(2, 9, 8)


MASK = "causal"
PAIR = (0, 1)
PROBE = "change"
