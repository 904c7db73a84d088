"""A window of 4 that sees 5: `<=` for `<`."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x):  # (B, N, 8)
        q, k, v = self.qkv(x).chunk(3, -1)
        at = torch.arange(x.shape[1])
        back = at[:, None] - at[None, :]
        scores = (q @ k.mT / 8**0.5).masked_fill((back < 0) | (back > 4), float("-inf"))
        return self.out(scores.softmax(-1) @ v)


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(2, 9, 8)


MASK = "causal & window(4)"
PAIR = (4, 0)
PROBE = "change"
