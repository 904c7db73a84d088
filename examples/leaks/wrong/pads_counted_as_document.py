"""Pads carry document number 0, which is also the first document's: it sees them."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x):  # (B, N, 8)
        q, k, v = self.qkv(x).chunk(3, -1)
        document = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1])  # the first two are pads
        visible = (document[:, None] == document[None, :]).tril()
        scores = (q @ k.mT / 8**0.5).masked_fill(~visible, float("-inf"))
        return self.out(scores.softmax(-1) @ v)


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(2, 9, 8)


MASK = "causal & documents(lengths=[5, 4]) - first(2)"
PAIR = (2, 0)
PROBE = "change"
