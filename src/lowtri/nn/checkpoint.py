"""A Decoder as a folder that transformers can load, and such a folder as a Decoder; a RecurrentLM in the same files.

    config.json              sizes, under Llama's key names; also the mask
    model.safetensors        weights, under Llama's names (or several files, which model.safetensors.index.json names)
    tokenizer.json           how text becomes tokens (the format of the tokenizers library)
    tokenizer_config.json    what AutoTokenizer asks besides

How the mask is written, so that transformers computes the same logits:

    causal                   model_type llama
    window(n) [& causal]     model_type mistral, sliding_window n (there too the query's own position is one of the n)
    any other                model_type llama, and the text of the mask as lowtri_mask: transformers has no such mask and
                             would run it as causal. ``lowtri_mask`` is always written, and decides when lowtri loads.
    a RecurrentLM            model_type lowtri_recurrent, which transformers does not know

Each file is written beside its place and moved there whole.
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
BEGIN, END = "<|begin|>", "<|end|>"  # a document's first token, and its last, in tokenizers that lowtri trains


def save(model: Decoder | RecurrentLM, folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
    """Write a model as a folder, a decoder's in Llama's layout.

    Args:
        model: its weights are written in the dtype they have.
        folder: made if it is not there.
        tokenizer: a ``tokenizers.Tokenizer``; without one the folder takes token ids only.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # it is the embedding itself; the format stores no tensor twice
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
    """Read a folder that :func:`save` or transformers wrote: the model in evaluation mode, and the tokenizer if there is one.

    Args:
        folder: with config.json and model.safetensors.
        mask: who may see whom, instead of the mask that config.json declares.

    Raises:
        DataError: if a file is missing, damaged, or describes a model that is not one of ours.
        MaskError, CallError: if the mask cannot be read, or is none for this model.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: a checkpoint is a folder with config.json and model.safetensors")
    config = _with_ends(_read_config(folder, mask), folder)
    tensors = _read_weights(folder)
    check_sizes(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, folder)
    try:
        with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
            model = _MODELS[type(config)](config)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise DataError(f"{folder}: config.json has sizes that torch cannot build: {brief(error)}") from None
    _fill(model, from_conv1d(tensors) if isinstance(model, GPT2) else tensors, folder)
    if config.tie_word_embeddings:
        embedding = model.model.embed_tokens if isinstance(model, Decoder) else model.embed_tokens
        model.lm_head.weight = embedding.weight
    model = model.to(model.lm_head.weight.dtype)  # one for all, should the norms have come in another
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
    """What ends an answer of a model that was taught to chat stands in a file of its own, where it was taught later."""
    beside = read_json(folder, "generation_config.json") or {}
    ends = end_ids(beside.get("eos_token_id"), folder / "generation_config.json")
    return config if ends is None or isinstance(config, RecurrentConfig) else replace(config, eos_token_id=ends)


# tokenizer_config.json


def _ends(config: DecoderConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The tokens that begin and end a text: the model's own, else those of a tokenizer that lowtri trained."""
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
    """All tensors of a folder, from its one file or from those that its index names."""
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
    """A file that an index names. A folder from elsewhere must not choose what else is read on this machine."""
    named = PureWindowsPath(part if isinstance(part, str) else "")  # knows slashes of both kinds, and drives
    if not named.parts or named.anchor or ".." in named.parts or "\0" in part:
        raise DataError(
            f"{index} names {part!r:.200}, which is no file of its folder. Fix: weights from another source"
        )
    return str(PurePosixPath(part))  # without dots between its slashes: each file is read once


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
