"""Expert-choice routing: each expert takes its best tokens of the whole row, so later ones push earlier ones out."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = torch.nn.Linear(8, 2), torch.nn.Linear(8, 16)

    def forward(self, x):  # (B, N, 8)
        taken = torch.zeros(*x.shape[:2], 2)
        best = self.router(x).topk(x.shape[1] // 2, dim=1).indices
        taken = taken.scatter(1, best, 1.0)
        return (self.experts(x).unflatten(-1, (2, 8)) * taken[..., None]).sum(-2)


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(8, 4, 8)


MASK = "causal"
PAIR = (0, 1)
PROBE = "change"
