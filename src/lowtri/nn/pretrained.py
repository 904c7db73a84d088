"""Weights that others trained, as a Decoder: a folder of transformers, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

import torch

from lowtri.errors import DataError
from lowtri.nn.checkpoint import load
from lowtri.nn.decoder import Decoder
from lowtri.nn.gguf import converted, is_gguf

__all__ = ["as_dtype", "read"]


def read(path: str | Path, dtype: torch.dtype | str | None = None) -> Decoder:
    """What :meth:`lowtri.nn.Decoder.from_pretrained` does."""
    wanted = as_dtype(dtype)
    path = Path(path)
    if path.is_file():
        if not is_gguf(path):
            raise DataError(f"{path} is a file, but no GGUF file. Fix: the folder of a model, or a GGUF file")
        path = converted(path)
    model, tokenizer = load(path)
    if not isinstance(model, Decoder):
        raise DataError(f"{path} holds a {type(model).__name__}, no Decoder. Fix: lowtri.nn.checkpoint.load")
    model.tokenizer = tokenizer
    return model if wanted is None else model.to(wanted)


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype of torch for weights, from its name too.

    Raises:
        DataError: for one that is not a kind of float.
    """
    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        raise DataError(f"dtype is {dtype!r}. Fix: float32, bfloat16, float16 or float64")
    return wanted
