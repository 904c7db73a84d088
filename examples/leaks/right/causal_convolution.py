"""Two dilated convolutions, padded on the left only."""

from __future__ import annotations

import torch

import lowtri


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.near, self.far = torch.nn.Conv1d(4, 8, 2), torch.nn.Conv1d(8, 4, 2, dilation=2)

    def forward(self, x):  # (B, 4, N)
        x = self.near(torch.nn.functional.pad(x, (1, 0))).relu()
        return self.far(torch.nn.functional.pad(x, (2, 0)))


def make_model(seed=0):
    torch.manual_seed(seed)
    return lowtri.Model(Model(), axes="BDN"), torch.randn(2, 4, 9)


MASK = "causal & window(4)"
