"""`GroupNorm` on (batch, channels, time) takes its statistics over time as well."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = torch.nn.Conv1d(8, 8, 3), torch.nn.GroupNorm(2, 8)

    def forward(self, x):  # (B, N, 8)
        past = torch.nn.functional.pad(x.mT, (2, 0))
        return self.norm(self.convolution(past)).mT


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(2, 9, 8)


MASK = "causal"
PAIR = (0, 1)
PROBE = "change"
