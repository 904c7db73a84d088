"""Padded on the left only, but by reflection: the first outputs see their own future in the mirror."""

from __future__ import annotations

import torch

import lowtri


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv1d(4, 4, 4)

    def forward(self, x):  # (B, 4, N)
        return self.convolution(torch.nn.functional.pad(x, (3, 0), mode="reflect"))


def make_model(seed=0):
    torch.manual_seed(seed)
    return lowtri.Model(Model(), axes="BDN"), torch.randn(2, 4, 12)


MASK = "causal"
PAIR = (0, 1)
PROBE = "change"
