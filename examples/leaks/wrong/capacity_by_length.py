"""The expert's capacity is a share of the row's length: a longer row serves an early token that a shorter drops."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.expert = torch.nn.Linear(8, 8)

    def forward(self, x):  # (B, N, 8)
        capacity = x.shape[1] // 2
        served = (torch.arange(x.shape[1]) < capacity)[:, None]  # first come, first served
        return x + self.expert(x) * served


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(2, 9, 8)


MASK = "causal"
PAIR = (0, 1)
PROBE = "prefix"
