"""A prefix of 3 that all may see, written as `<=`: position 3 is shown to the ones before it."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x):  # (B, N, 8)
        q, k, v = self.qkv(x).chunk(3, -1)
        at = torch.arange(x.shape[1])
        visible = (at[None, :] <= at[:, None]) | (at[None, :] <= 3)
        scores = (q @ k.mT / 8**0.5).masked_fill(~visible, float("-inf"))
        return self.out(scores.softmax(-1) @ v)


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(2, 9, 8)


MASK = "causal | first(3)"
PAIR = (0, 3)
PROBE = "change"
