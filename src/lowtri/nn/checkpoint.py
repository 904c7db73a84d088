"""Saves a model as a checkpoint folder that transformers can load, and loads such folders.

    config.json              the configuration with Llama's key names, and the mask
    model.safetensors        weights with Llama's names (or shards, listed in model.safetensors.index.json)
    tokenizer.json           the tokenizer, in the format of the tokenizers library
    tokenizer_config.json    further settings for AutoTokenizer

The mask is stored so that transformers computes the same logits:

    causal                   model_type llama
    window(n) [& causal]     model_type mistral, sliding_window n (which also counts the query's own position)
    any other                model_type llama, and the mask's text as lowtri_mask. transformers ignores it and runs causal;
                             lowtri always writes it and gives it precedence when loading.
    a RecurrentLM            model_type lowtri_recurrent, unknown to transformers

Files are written atomically.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lowtri.errors import DataError
from lowtri.masks import Mask
from lowtri.nn.config import GPT2Config, RecurrentConfig
from lowtri.nn.decoder import Decoder
from lowtri.nn.files import load_tokenizer, write_folder
from lowtri.nn.hf_config import to_conv1d, to_json
from lowtri.nn.names import as_dtype, folder_of, read_checkpoint
from lowtri.nn.quantized import WEIGHTS
from lowtri.nn.recurrent import RecurrentLM

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BEGIN, END = "<|begin|>", "<|end|>"  # begin- and end-of-document tokens of tokenizers that lowtri trains


def save(model: Decoder | RecurrentLM, folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
    """Save a model as a checkpoint folder.

    Args:
        model: its weights are stored in their present dtype.
        folder: created if missing.
        tokenizer: a ``tokenizers.Tokenizer``; without one, the checkpoint works on token ids only.
    """
    config = model.config
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # it is the embedding; safetensors stores no tensor twice
    if isinstance(config, GPT2Config):
        tensors = {name: tensor.contiguous() for name, tensor in to_conv1d(tensors).items()}
    content = to_json(config)
    settings: dict[str, Any] = {}
    if tokenizer is not None:
        for name, token in (("bos", BEGIN), ("eos", END)):
            index = tokenizer.token_to_id(token)
            if index is not None:
                settings[f"{name}_token"] = token
            if content.get(f"{name}_token_id") is None:  # a model's own end tokens take precedence
                content[f"{name}_token_id"] = index
        if not isinstance(config, RecurrentConfig):
            settings["model_max_length"] = config.max_position_embeddings
    write_folder(Path(folder), content, tensors, tokenizer, settings)


def load(folder: str | Path, *, mask: Mask | str | None = None) -> tuple[Decoder | RecurrentLM, Tokenizer | None]:
    """Load a folder written by :func:`save` or transformers: the model in evaluation mode, and the tokenizer, if any.

    Args:
        folder: with config.json and model.safetensors (or its shards).
        mask: replaces the mask that config.json declares.

    Raises:
        DataError: if a file is missing or damaged, or describes an unsupported model.
        MaskError, CallError: if the mask is invalid, or unsupported by this model.
    """
    checkpoint = read_checkpoint(Path(folder), mask=mask)
    recurrent = isinstance(checkpoint.config, RecurrentConfig)
    model = checkpoint.build(RecurrentLM.from_config) if recurrent else checkpoint.build(Decoder)
    return model, load_tokenizer(folder)


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
    progress: Callable[[str], object] | None = None,
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
    folder = folder_of(name, progress)
    model, tokenizer = load(folder, mask=mask)
    if wanted is not None:
        model = model.to(wanted)
    if weights is not None:
        if not isinstance(model, Decoder):
            raise DataError(f"{name} holds a RecurrentLM, which cannot be quantized. Fix: leave weights out")
        model.quantize(weights)
    return Pretrained(model, tokenizer, folder)
