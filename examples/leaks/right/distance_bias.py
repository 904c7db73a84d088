"""A bias that falls with the distance, as ALiBi has it."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x):  # (B, N, 8)
        q, k, v = self.qkv(x).chunk(3, -1)
        at = torch.arange(x.shape[1])
        bias = (at[None, :] - at[:, None]).float().masked_fill(at[None, :] > at[:, None], float("-inf"))
        return self.out((q @ k.mT + 0.3 * bias).softmax(-1) @ v)


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(2, 9, 8)


MASK = "causal"
