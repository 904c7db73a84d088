"""A regulariser of training alone mixes a ten-thousandth of the next position in: the loss sees it, no picture shows it."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.out = torch.nn.GRU(8, 8, batch_first=True), torch.nn.Linear(8, 8)

    def forward(self, x):  # (B, N, 8)
        y = self.out(self.gru(x)[0])
        return y + 1e-4 * y.roll(-1, 1) if self.training else y


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(2, 9, 8)


MASK = "causal"
PAIR = (0, 1)
PROBE = "training"
