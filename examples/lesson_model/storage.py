"""What the page reads: the matrices of a model as int8 with a scale for each row, all other numbers as float32, in base64."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch

from lowtri.nn import Decoder, GPT2Config

SIZES = ("layers", "heads", "width", "inner", "context")


def model_of(mask: str, characters: int, sizes: dict[str, int]) -> Decoder:
    """An untrained decoder in GPT-2's shape; every character is a token."""
    return Decoder(
        GPT2Config(
            vocab_size=characters,
            hidden_size=sizes["width"],
            intermediate_size=sizes["inner"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            max_position_embeddings=sizes["context"],
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            mask=mask,
        )
    )


def round_weights(model: Decoder) -> tuple[bytes, bytes]:
    """Round the matrices of a model in place. Returns all int8 numbers, and all float32 numbers."""
    small, exact = [], []
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim != 2:
                exact.append(weight.numpy().astype("<f4").tobytes())
                continue
            scale = weight.abs().amax(1).clamp(min=1e-12) / 127
            whole = (weight / scale[:, None]).round().to(torch.int8)
            small.append(whole.numpy().tobytes())
            exact.append(scale.numpy().astype("<f4").tobytes())
            weight.copy_(whole * scale[:, None])
    return b"".join(small), b"".join(exact)


def packed(model: Decoder, characters: str, measured: dict[str, Any]) -> dict[str, Any]:
    """A model as JSON; its matrices are rounded in place."""
    config = model.config
    small, exact = round_weights(model)
    names = [(name.removeprefix("model.").removesuffix(".weight"), w.shape) for name, w in model.named_parameters()]
    return {
        "measured": measured,
        "mask": config.mask,
        "characters": characters,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "width": config.hidden_size,
        "inner": config.intermediate_size,
        "context": config.max_position_embeddings,
        "tensors": [[name, *shape] for name, shape in names],
        "int8": base64.b64encode(small).decode(),
        "float32": base64.b64encode(exact).decode(),
    }


def unpacked(stored: dict[str, Any]) -> Decoder:
    """The model that the page runs, from what the page reads."""
    model = model_of(stored["mask"], len(stored["characters"]), {name: stored[name] for name in SIZES})
    small = np.frombuffer(base64.b64decode(stored["int8"]), np.int8)
    exact = np.frombuffer(base64.b64decode(stored["float32"]), "<f4")
    for weight in model.parameters():
        count = weight.shape[0]
        if weight.ndim == 2:
            value = small[: weight.numel()].reshape(weight.shape) * exact[:count, None]
            small = small[weight.numel() :]
        else:
            value = exact[:count]
        exact = exact[count:]
        weight.data.copy_(torch.from_numpy(value.astype(np.float32)))
    if len(small) or len(exact):
        raise ValueError(f"unpacked: {len(small)} int8 and {len(exact)} float32 numbers are left over")
    return model.eval()
