"""Positions are counted from the end of the row: content stays hidden, but every output knows the length."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = torch.nn.Embedding(20, 8), torch.nn.Embedding(32, 8)
        self.cells, self.head = torch.nn.GRU(8, 8, batch_first=True), torch.nn.Linear(8, 20)

    def forward(self, ids):  # (B, N)
        places = torch.arange(ids.shape[1]).flip(0)
        return self.head(self.cells(self.embed(ids) + self.places(places))[0])


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randint(0, 20, (2, 9))


MASK = "causal"
PAIR = (0, 1)
PROBE = "prefix"
