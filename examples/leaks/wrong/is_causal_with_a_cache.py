"""`is_causal` is aligned to the first key: one new query beside a cache of t keys sees only key 0."""

from __future__ import annotations

import torch

import lowtri


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x):  # (B, N, 8)
        q, k, v = self.qkv(x).chunk(3, -1)
        at = torch.arange(x.shape[1])
        back = at[:, None] - at[None, :]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=(back >= 0) & (back < 4))

    def step(self, state, x):  # x (B, 8)
        q, k, v = self.qkv(x[:, None]).chunk(3, -1)
        keys, values = (k, v) if state is None else (torch.cat([state[0], k], 1), torch.cat([state[1], v], 1))
        keys, values = keys[:, -4:], values[:, -4:]
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True), (keys, values)


def make_model(seed=0):
    torch.manual_seed(seed)
    model = Model()
    return lowtri.Model(model, step=model.step), torch.randn(2, 9, 8)


MASK = "causal & window(4)"
PAIR = (1, 1)
PROBE = "cache"
