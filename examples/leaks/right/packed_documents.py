"""Two packed documents, hidden from each other, with positions that restart: packed equals alone."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.places, self.qkv = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 24)

    def forward(self, x, document, place):  # (B, N, 8), (N,), (N,)
        q, k, v = self.qkv(x + self.places(place)).chunk(3, -1)
        visible = (document[:, None] == document[None, :]).tril()
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def make_model(seed=0):
    torch.manual_seed(seed)
    document, place = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1]), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3])
    return Model(), {"x": torch.randn(2, 9, 8), "document": document, "place": place}


MASK = "causal & documents(lengths=[5, 4])"
