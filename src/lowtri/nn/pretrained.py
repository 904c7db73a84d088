"""Pretrained weights by name: a checkpoint folder, a GGUF file, or a package's weights."""

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
    """A loaded checkpoint."""

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
        DataError: if there is no such model, a file is missing or damaged, or describes an unsupported model.
    """
    wanted = as_dtype(dtype)
    folder = folder_of(name, note)
    model, tokenizer = load(folder, mask=mask)
    return Named(model if wanted is None else model.to(wanted), tokenizer, folder)


def read(path: str | Path, dtype: torch.dtype | str | None = None, mask: Mask | str | None = None) -> Decoder:
    """The implementation of :meth:`lowtri.nn.Decoder.from_pretrained`."""
    model, tokenizer, _ = load_named(path, dtype=dtype, mask=mask)
    if not isinstance(model, Decoder):
        raise DataError(f"{path} holds a {type(model).__name__}, no Decoder. Fix: lowtri.nn.checkpoint.load")
    model.tokenizer = tokenizer
    return model


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating-point torch dtype, from a dtype or its name.

    Raises:
        DataError: for any other.
    """
    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        raise DataError(f"dtype is {dtype!r}. Fix: float32, bfloat16, float16 or float64")
    return wanted
