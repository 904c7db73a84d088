"""Two packed documents, rightly hidden from each other, but the second counts its positions on from the first."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.places, self.qkv = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 24)

    def forward(self, x, document):  # (B, N, 8), (N,)
        q, k, v = self.qkv(x + self.places(torch.arange(x.shape[1]))).chunk(3, -1)
        visible = (document[:, None] == document[None, :]).tril()
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def make_model(seed=0):
    torch.manual_seed(seed)
    document = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1])
    return Model(), {"x": torch.randn(2, 9, 8), "document": document}


MASK = "causal & documents(lengths=[5, 4])"
PAIR = (5, 4)
PROBE = "packing"
