"""Weights that others trained, by the name that a user gives: a folder, a GGUF file, or weights in a package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from lowtri.errors import DataError
from lowtri.masks import Mask
from lowtri.nn.checkpoint import load
from lowtri.nn.decoder import Decoder
from lowtri.nn.packaged import folder_of
from lowtri.nn.recurrent import RecurrentLM

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Named", "as_dtype", "load_named", "read"]


class Named(NamedTuple):
    """What a name stands for."""

    model: Decoder | RecurrentLM
    tokenizer: Tokenizer | None
    folder: Path


def load_named(
    name: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    mask: Mask | str | None = None,
    note: Callable[[str], object] | None = None,
) -> Named:
    """A model by its name: see :func:`~lowtri.nn.packaged.folder_of` for names, :meth:`lowtri.nn.Decoder.from_pretrained` for the rest.

    Raises:
        DataError: if there is no such model, a file is missing or damaged, or describes a model that is not one of ours.
    """
    wanted = as_dtype(dtype)
    folder = folder_of(name, note)
    model, tokenizer = load(folder, mask=mask)
    return Named(model if wanted is None else model.to(wanted), tokenizer, folder)


def read(path: str | Path, dtype: torch.dtype | str | None = None, mask: Mask | str | None = None) -> Decoder:
    """What :meth:`lowtri.nn.Decoder.from_pretrained` does."""
    model, tokenizer, _ = load_named(path, dtype=dtype, mask=mask)
    if not isinstance(model, Decoder):
        raise DataError(f"{path} holds a {type(model).__name__}, no Decoder. Fix: lowtri.nn.checkpoint.load")
    model.tokenizer = tokenizer
    return model


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype of torch for weights, from its name too.

    Raises:
        DataError: for one that is not a kind of float.
    """
    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        raise DataError(f"dtype is {dtype!r}. Fix: float32, bfloat16, float16 or float64")
    return wanted
