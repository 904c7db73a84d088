"""lowtri's decoder: masked, padded, cached."""

from __future__ import annotations

import torch

import lowtri


def make_model(seed=0):
    torch.manual_seed(seed)
    config = lowtri.nn.DecoderConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=64,
    )  # fmt: skip
    return lowtri.nn.Decoder(config), torch.randint(0, 50, (2, 12))


MASK = "causal"
