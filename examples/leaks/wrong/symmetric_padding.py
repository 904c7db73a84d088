"""A convolution padded alike on both sides: each output is one ahead."""

from __future__ import annotations

import torch

import lowtri


def make_model(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Conv1d(4, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv1d(8, 4, 1))
    return lowtri.Model(model, axes="BDN"), torch.randn(2, 4, 9)  # channels before time


MASK = "causal"
PAIR = (0, 1)
PROBE = "change"
