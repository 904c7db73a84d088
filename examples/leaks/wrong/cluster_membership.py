"""Attention within two clusters, cut at the median of the whole row (k-means and LSH attention do the like)."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.direction, self.value = torch.nn.Linear(8, 1), torch.nn.Linear(8, 8)

    def forward(self, x):  # (B, N, 8)
        side = self.direction(x).squeeze(-1)
        cluster = side > side.median(dim=1, keepdim=True).values
        visible = (cluster[:, :, None] == cluster[:, None, :]).tril()
        return visible.float() / visible.sum(-1, keepdim=True) @ self.value(x)


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(16, 5, 8)


MASK = "causal"
PAIR = (1, 2)
PROBE = "change"
