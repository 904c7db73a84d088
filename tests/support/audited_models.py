"""Inputs and small models of transformers and of lowtri, with the same random numbers in every test of the audit."""

from __future__ import annotations

from typing import Any

import torch

import lowtri


def vectors(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def tiny(kind: str, **options: Any) -> Any:
    """A causal language model of transformers, in evaluation mode; `kind` is what its config's class begins with."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, "pad_token_id": 0, **options})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def decoder(**options: Any) -> lowtri.nn.Decoder:
    """Lowtri's own decoder, in evaluation mode."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return lowtri.nn.Decoder(lowtri.nn.DecoderConfig(**{**sizes, **options})).eval()
