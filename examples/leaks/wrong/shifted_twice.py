"""Loader and model both shift the tokens by one: each output reads the token that it must predict."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.cells = torch.nn.GRU(8, 8, batch_first=True)
        self.head = torch.nn.Linear(8, 20)

    def forward(self, ids):  # (B, N)
        inputs = torch.cat([ids[:, 1:], ids[:, -1:]], dim=1)
        return self.head(self.cells(self.embed(inputs))[0])


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randint(0, 20, (2, 9))


MASK = "causal"
PAIR = (0, 1)
PROBE = "change"
