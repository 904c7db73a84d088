"""lowtri's recurrent language model: the same loop and the same audit."""

from __future__ import annotations

import torch

from lowtri.nn.recurrent import RecurrentLM


def make_model(seed=0):
    torch.manual_seed(seed)
    return RecurrentLM(vocab_size=50, hidden_size=16, cell="lstm"), torch.randint(0, 50, (2, 12))


MASK = "causal"
