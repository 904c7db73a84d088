"""The answer is an index, so no gradient tells; the attention behind it has no mask."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.head = torch.nn.Linear(8, 24), torch.nn.Linear(8, 100)

    def forward(self, x):  # (B, N, 8) -> (B, N) indices
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head((q @ k.mT).softmax(-1) @ v).argmax(-1)


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(4, 5, 8)


MASK = "causal"
PAIR = (0, 1)
PROBE = "change"
