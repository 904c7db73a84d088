"""Batch norm over (batch, time): in training every position enters the statistics."""

from __future__ import annotations

import torch


def make_model(seed=0):
    torch.manual_seed(seed)
    norm = torch.nn.BatchNorm1d(8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Swap(), norm, Swap(), torch.nn.Linear(8, 8))
    return model, torch.randn(2, 9, 8)


class Swap(torch.nn.Module):
    def forward(self, x):
        return x.mT


MASK = "causal"
PAIR = (0, 1)
PROBE = "training"
