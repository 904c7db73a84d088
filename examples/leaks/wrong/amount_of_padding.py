"""Pads are hidden from attention, but the mean divides by the padded length: how much padding there is shows."""

from __future__ import annotations

import torch

import lowtri


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.value = torch.nn.Linear(8, 8)

    def forward(self, x, attention_mask=None):  # (B, N, 8), (B, N)
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        return self.value(x) + x.mean(dim=1, keepdim=True)


def make_model(seed=0):
    torch.manual_seed(seed)
    return lowtri.Model(Model(), pads="attention_mask"), torch.randn(2, 9, 8)


MASK = "full"
PAIR = (0, 9)
PROBE = "padding"
