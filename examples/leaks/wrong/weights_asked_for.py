"""Asked for its weights, the model takes another road, and that road has no mask."""

from __future__ import annotations

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x, output_attentions=False):  # (B, N, 8)
        q, k, v = self.qkv(x).chunk(3, -1)
        if output_attentions:
            weights = (q @ k.mT / 8**0.5).softmax(-1)
            return self.out(weights @ v), weights
        return self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)), None


def make_model(seed=0):
    torch.manual_seed(seed)
    return Model(), torch.randn(2, 9, 8)


MASK = "causal"
PAIR = (0, 1)
PROBE = "code_paths"
