"""The LSTM of a language model, made bidirectional for a better loss."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.cells = torch.nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.head = torch.nn.Linear(16, 20)

    def forward(self, ids):  # (B, N)
        return self.head(self.cells(self.embed(ids))[0])


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randint(0, 20, (2, 9))


MASK = "causal"
PAIR = (0, 1)
PROBE = "change"
