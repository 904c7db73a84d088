"""Activations are rounded to 8 bits with one scale for the whole row: a large later value coarsens earlier ones."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):  # (B, N, 8)
        scale = x.abs().amax(dim=(1, 2), keepdim=True) / 7
        return self.linear((x / scale).round() * scale).cumsum(1)


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(8, 5, 8)


MASK = "causal"
PAIR = (0, 1)
PROBE = "change"
