"""An expert with one place gives it to the best score of the row, not to the first comer."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.expert = torch.nn.Linear(8, 1), torch.nn.Linear(8, 8)

    def forward(self, x):  # (B, N, 8)
        score = self.router(x).squeeze(-1)
        rank = (score[:, None, :] > score[:, :, None]).sum(-1)  # how many of the row come before me
        return x + self.expert(x) * (rank < 1)[..., None]


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(64, 4, 8)


MASK = "causal"
PAIR = (0, 1)
PROBE = "change"
