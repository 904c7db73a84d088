"""Reads a checkpoint folder: config.json and the weights, which are checked against each other before any memory is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple, TypeVar

import torch

from lowtri.errors import DataError
from lowtri.extras import require
from lowtri.masks import Mask, as_mask
from lowtri.nn.config import DecoderConfig, GPT2Config, RecurrentConfig, check_sizes
from lowtri.nn.files import brief, file_in, read_json
from lowtri.nn.hf_config import end_ids, from_conv1d, from_json

__all__ = ["RECURRENT", "Checkpoint", "as_dtype", "read_checkpoint"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
RECURRENT = "lowtri_recurrent"  # the model_type of a RecurrentLM


M = TypeVar("M")


class Checkpoint(NamedTuple):
    """The content of a checkpoint folder."""

    folder: Path
    config: DecoderConfig | RecurrentConfig
    tensors: dict[str, torch.Tensor]

    def build(self, model_class: Callable[[Any], M]) -> M:
        """The model, in evaluation mode.

        Raises:
            DataError: if torch cannot build it, or a weight is missing, unknown or of another shape.
        """
        try:
            with torch.device("meta"):  # no memory and no initialisation for weights that are replaced below
                model: Any = model_class(self.config)
        except (RuntimeError, TypeError, OverflowError) as error:
            raise DataError(f"{self.folder}: config.json has sizes that torch cannot build: {brief(error)}") from None
        tensors, state = dict(self.tensors), model.state_dict()
        if self.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
            tensors.pop("lm_head.weight", None)
        expected, stored = ({name: tuple(x.shape) for name, x in group.items()} for group in (state, tensors))
        for name in sorted(expected.keys() | stored.keys()):
            if expected.get(name) != stored.get(name):
                raise DataError(
                    f"{self.folder}: config.json and model.safetensors do not fit together at {brief(name)}:\n"
                    f"  the config asks for {expected.get(name, 'nothing')}, the file has {stored.get(name, 'nothing')}"
                )
        model.load_state_dict(tensors, strict=False, assign=True)
        model.tie_weights()
        built: M = model.to(model.lm_head.weight.dtype).eval()  # one dtype, even if the norms were stored in another
        return built


def read_checkpoint(folder: Path, *, mask: Mask | str | None = None) -> Checkpoint:
    """Read a folder written by lowtri or transformers; arguments and errors are those of :func:`lowtri.nn.checkpoint.load`."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: a checkpoint is a folder with config.json and model.safetensors")
    config = _read_config(folder, mask)
    tensors = _read_weights(folder)
    check_sizes(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, folder)
    return Checkpoint(folder, config, from_conv1d(tensors) if isinstance(config, GPT2Config) else tensors)


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating-point torch dtype, from a dtype or its name.

    Raises:
        DataError: for any other.
    """
    converted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(converted, torch.dtype) and converted.is_floating_point):
        raise DataError(f"dtype is {dtype!r}. Fix: float32, bfloat16, float16 or float64")
    return converted


def _read_config(folder: Path, mask: Mask | str | None) -> DecoderConfig | RecurrentConfig:
    path, content = folder / "config.json", read_json(folder, "config.json")
    if content is None:
        raise DataError(f"{folder} has no config.json: it is not a checkpoint, or not a finished one")
    # Chat models keep their end-of-sequence ids in generation_config.json.
    generation = read_json(folder, "generation_config.json") or {}
    ends = end_ids(generation.get("eos_token_id"), folder / "generation_config.json")
    if content.get("model_type") != RECURRENT:
        decoder = from_json(content, path, mask)
        return decoder if ends is None else replace(decoder, eos_token_id=ends)
    fields = RecurrentConfig.__dataclass_fields__
    try:
        config = RecurrentConfig(
            **{key: value for key, value in content.items() if key in fields and value is not None}
        )
    except (TypeError, ValueError) as error:
        raise DataError(f"{path} does not describe a recurrent model: {brief(error)}") from None
    return config if mask is None else replace(config, mask=repr(as_mask(mask)))


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, from model.safetensors or its shards."""
    index = folder / "model.safetensors.index.json"
    listed = None if file_in(folder, "model.safetensors") is not None else read_json(folder, index.name)
    if listed is None:
        tensors = _read_file(folder, "model.safetensors")
    else:
        if not isinstance(listed.get("weight_map"), dict):
            raise DataError(f"{index} has no weight_map, which names the file of each weight")
        shards = sorted({_inside(shard, index) for shard in listed["weight_map"].values()})
        tensors = {name: tensor for shard in shards for name, tensor in _read_file(folder, shard).items()}
    if not tensors:
        raise DataError(f"{folder / 'model.safetensors'} has no weights in it")
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise DataError(
                f"{folder}: the weight {brief(name)} is {tensor.dtype}, expected floats of 16, 32 or 64 bits"
            )
    return tensors


def _inside(shard: Any, index: Path) -> str:
    """A file name from an untrusted index, which must not name files outside of the folder."""
    path = PureWindowsPath(shard if isinstance(shard, str) else "")  # parses both kinds of slashes, and drives
    if not path.parts or path.anchor or ".." in path.parts or "\0" in shard:
        raise DataError(
            f"{index} names {shard!r:.200}, which is not a file of its folder. Fix: weights from another source"
        )
    return str(PurePosixPath(shard))  # normalised, so that each file is read once


def _read_file(folder: Path, name: str) -> dict[str, torch.Tensor]:
    require("reading a checkpoint", "safetensors")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = file_in(folder, name)
    if path is None:
        raise DataError(f"{folder} has no {name}: training is not finished, or it is kept elsewhere")
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(f"{path} is damaged: {brief(error)}") from None
