"""Loads a model by its name, with its tokenizer and folder, for the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from lowtri.errors import DataError
from lowtri.masks import Mask
from lowtri.nn.checkpoint import load
from lowtri.nn.checkpoint_reader import as_dtype
from lowtri.nn.decoder import Decoder
from lowtri.nn.names import folder_of
from lowtri.nn.products import WEIGHTS
from lowtri.nn.recurrent import RecurrentLM

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Pretrained", "load_named"]


class Pretrained(NamedTuple):
    """A loaded checkpoint."""

    model: Decoder | RecurrentLM
    tokenizer: Tokenizer | None
    folder: Path


def load_named(
    name: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    mask: Mask | str | None = None,
    weights: str | None = None,
    note: Callable[[str], object] | None = None,
) -> Pretrained:
    """A model by its name: see :func:`~lowtri.nn.names.folder_of` for names, :meth:`lowtri.nn.Decoder.from_pretrained` for the rest.

    Args:
        weights: quantize the model, see :meth:`lowtri.nn.Decoder.quantize`; the rest of it is then float32 by default.

    Raises:
        DataError: if there is no such model, a file is missing or damaged, or describes an unsupported model.
    """
    if weights is not None and weights not in WEIGHTS:
        raise DataError(f"weights is {weights!r:.60}. Fix: {', '.join(WEIGHTS)}")
    wanted = as_dtype(dtype if weights is None else dtype or torch.float32)
    folder = folder_of(name, note)
    model, tokenizer = load(folder, mask=mask)
    if wanted is not None:
        model = model.to(wanted)
    if weights is not None:
        if not isinstance(model, Decoder):
            raise DataError(f"{name} holds a RecurrentLM, which cannot be quantized. Fix: leave weights out")
        model.quantize(weights)
    return Pretrained(model, tokenizer, folder)
