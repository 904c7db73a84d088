"""A one-way LSTM language model."""

from __future__ import annotations

import torch

import lowtri


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20)
        self.cells = torch.nn.LSTM(8, 8, batch_first=True)

    def forward(self, ids):  # (B, N)
        return self.head(self.cells(self.embed(ids))[0])

    def step(self, state, ids):  # (B,)
        x, state = self.cells(self.embed(ids[:, None]), state)
        return self.head(x[:, 0]), state


def make_model(seed=0):
    torch.manual_seed(seed)
    model = Model()
    return lowtri.Model(model, step=model.step), torch.randint(0, 20, (2, 9))


MASK = "causal"
