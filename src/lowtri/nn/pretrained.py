"""Weights that others trained, as a Decoder: a folder of transformers, or a GGUF file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from lowtri.errors import CallError, DataError
from lowtri.nn.checkpoint import load, read_json
from lowtri.nn.decoder import Decoder
from lowtri.nn.gguf import converted, is_gguf

__all__ = ["folder_of", "read"]


def read(path: str | Path, dtype: torch.dtype | str | None = None) -> Decoder:
    """What :meth:`lowtri.nn.Decoder.from_pretrained` does."""
    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        raise CallError(f"from_pretrained: dtype is {dtype!r}. Fix: float32, bfloat16, float16 or float64.")
    folder = folder_of(path)
    model, tokenizer = load(folder)
    if not isinstance(model, Decoder):
        raise DataError(f"{path} holds a {type(model).__name__}, no Decoder. Fix: lowtri.nn.checkpoint.load")
    model.tokenizer = tokenizer
    # What ends an answer of a model that was taught to chat stands beside its config, since the weights came earlier.
    beside = folder / "generation_config.json"
    ends = read_json(beside).get("eos_token_id") if beside.exists() else None
    if ends is not None:
        model.config = replace(model.config, eos_token_id=(ends,) if isinstance(ends, int) else tuple(ends))
    return model if wanted is None else model.to(wanted)


def folder_of(path: str | Path) -> Path:
    """The folder to read: the path itself, or what a GGUF file was converted to."""
    path = Path(path)
    return converted(path) if path.is_file() and is_gguf(path) else path
