"""Saves a Decoder as a checkpoint folder that transformers can load, and loads such folders; a RecurrentLM uses the same files.

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

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import torch

from lowtri.errors import DataError
from lowtri.files import write_atomically, write_text
from lowtri.masks import Mask, as_mask
from lowtri.nn.config import check_sizes
from lowtri.nn.decoder import Decoder, DecoderConfig
from lowtri.nn.files import brief, file_in, read_json
from lowtri.nn.gpt2 import GPT2, GPT2Config, from_conv1d, to_conv1d
from lowtri.nn.layout import end_ids, from_json
from lowtri.nn.layout_written import to_json
from lowtri.nn.recurrent import RecurrentConfig, RecurrentLM
from lowtri.nn.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["BEGIN", "END", "load", "load_tokenizer", "save"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
RECURRENT = "lowtri_recurrent"  # the model_type of a RecurrentLM
BEGIN, END = "<|begin|>", "<|end|>"  # begin- and end-of-document tokens of tokenizers that lowtri trains


def save(model: Decoder | RecurrentLM, folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
    """Save a model as a checkpoint folder.

    Args:
        model: its weights are stored in their present dtype.
        folder: created if missing.
        tokenizer: a ``tokenizers.Tokenizer``; without one, the checkpoint works on token ids only.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # it is the embedding; safetensors stores no tensor twice
    if tokenizer is not None:
        write_atomically(folder / "tokenizer.json", lambda path: tokenizer.save(str(path)))
        _write_json(folder / "tokenizer_config.json", _tokenizer_config(model.config, tokenizer))
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    if isinstance(model.config, RecurrentConfig):
        config = {
            "model_type": RECURRENT,
            **asdict(model.config),
            "torch_dtype": dtype,
            "lowtri_mask": model.config.mask,
        }
    else:
        config = {**to_json(model.config), "torch_dtype": dtype, **_ends(model.config, tokenizer)}
        if isinstance(model.config, GPT2Config):
            tensors = {name: tensor.contiguous() for name, tensor in to_conv1d(tensors).items()}
    _write_json(folder / "config.json", config)
    write_atomically(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))


def load(folder: str | Path, *, mask: Mask | str | None = None) -> tuple[Decoder | RecurrentLM, Tokenizer | None]:
    """Load a folder written by :func:`save` or transformers: the model in evaluation mode, and the tokenizer, if any.

    Args:
        folder: with config.json and model.safetensors.
        mask: replaces the mask that config.json declares.

    Raises:
        DataError: if a file is missing or damaged, or describes an unsupported model.
        MaskError, CallError: if the mask is invalid, or unsupported by this model.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: a checkpoint is a folder with config.json and model.safetensors")
    config = _with_ends(_read_config(folder, mask), folder)
    tensors = _read_weights(folder)
    check_sizes(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, folder)
    try:
        with torch.device("meta"):  # no memory and no initialisation for weights that are replaced below
            model = _MODELS[type(config)](config)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise DataError(f"{folder}: config.json has sizes that torch cannot build: {brief(error)}") from None
    _fill(model, from_conv1d(tensors) if isinstance(model, GPT2) else tensors, folder)
    if config.tie_word_embeddings:
        embedding = model.model.embed_tokens if isinstance(model, Decoder) else model.embed_tokens
        model.lm_head.weight = embedding.weight
    model = model.to(model.lm_head.weight.dtype)  # one dtype, even if the norms were stored in another
    return model.eval(), load_tokenizer(folder)


_MODELS: dict[type, Callable[[Any], Decoder | RecurrentLM]] = {
    DecoderConfig: Decoder,
    GPT2Config: GPT2,
    RecurrentConfig: RecurrentLM.from_config,
}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


# config.json


def _read_config(folder: Path, mask: Mask | str | None) -> DecoderConfig | RecurrentConfig:
    path, found = folder / "config.json", read_json(folder, "config.json")
    if found is None:
        raise DataError(f"{folder} has no config.json: it is no checkpoint, or one that is not finished")
    if found.get("model_type") != RECURRENT:
        return from_json(found, path, mask)
    known = RecurrentConfig.__dataclass_fields__
    try:
        config = RecurrentConfig(**{key: value for key, value in found.items() if key in known and value is not None})
    except (TypeError, ValueError) as error:
        raise DataError(f"{path} does not describe a recurrent model: {brief(error)}") from None
    return config if mask is None else replace(config, mask=repr(as_mask(mask)))


def _with_ends(config: DecoderConfig | RecurrentConfig, folder: Path) -> DecoderConfig | RecurrentConfig:
    """Chat models keep their end-of-sequence ids in generation_config.json."""
    temporary = read_json(folder, "generation_config.json") or {}
    ends = end_ids(temporary.get("eos_token_id"), folder / "generation_config.json")
    return config if ends is None or isinstance(config, RecurrentConfig) else replace(config, eos_token_id=ends)


# tokenizer_config.json


def _ends(config: DecoderConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Begin and end tokens: the model's own, or else those of a tokenizer that lowtri trained."""
    begin, end = (tokenizer.token_to_id(token) if tokenizer else None for token in (BEGIN, END))
    own = config.eos_token_id
    return {"bos_token_id": begin, "eos_token_id": end if own is None else own[0] if len(own) == 1 else list(own)}


def _tokenizer_config(config: DecoderConfig | RecurrentConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    named = {"bos_token": BEGIN, "eos_token": END}
    context = {} if isinstance(config, RecurrentConfig) else {"model_max_length": config.max_position_embeddings}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **context,
        **{key: token for key, token in named.items() if tokenizer.token_to_id(token) is not None},
    }


# model.safetensors


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, from model.safetensors or its shards."""
    index = folder / "model.safetensors.index.json"
    listed = None if file_in(folder, "model.safetensors") is not None else read_json(folder, index.name)
    if listed is None:
        tensors = _read_file(folder, "model.safetensors")
    else:
        if not isinstance(listed.get("weight_map"), dict):
            raise DataError(f"{index} has no weight_map, which says in which file each weight stands")
        parts = sorted({_inside(part, index) for part in listed["weight_map"].values()})
        tensors = {name: tensor for part in parts for name, tensor in _read_file(folder, part).items()}
    if not tensors:
        raise DataError(f"{folder / 'model.safetensors'} has no weights in it")
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise DataError(
                f"{folder}: the weight {brief(name)} is {tensor.dtype}, expected floats of 16, 32 or 64 bits"
            )
    return tensors


def _inside(part: Any, index: Path) -> str:
    """Validate a file name from an index: an untrusted index must not name files outside of the folder."""
    named = PureWindowsPath(part if isinstance(part, str) else "")  # parses both kinds of slashes, and drives
    if not named.parts or named.anchor or ".." in named.parts or "\0" in part:
        raise DataError(
            f"{index} names {part!r:.200}, which is no file of its folder. Fix: weights from another source"
        )
    return str(PurePosixPath(part))  # normalised, so that each file is read once


def _read_file(folder: Path, name: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = file_in(folder, name)
    if path is None:
        raise DataError(f"{folder} has no {name}: training is not finished, or it is kept elsewhere")
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(f"{path} is damaged: {brief(error)}") from None


def _fill(model: Decoder | RecurrentLM, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        wanted.pop("lm_head.weight", None)
        tensors.pop("lm_head.weight", None)
    came = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(wanted.keys() | came.keys()):
        if wanted.get(name) != came.get(name):
            raise DataError(
                f"{folder}: config.json and model.safetensors do not fit together at {brief(name)}:\n"
                f"  the config asks for {wanted.get(name, 'nothing')}, the file has {came.get(name, 'nothing')}"
            )
    model.load_state_dict(tensors, strict=False, assign=True)
