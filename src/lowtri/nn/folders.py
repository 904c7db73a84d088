"""Folders of lowtri's own models: config.json and model.safetensors, written atomically, and checked before they are read.

    config.json          model_type, the class of the configuration, its fields with Llama's names, and the mask's text
    model.safetensors    the weights, each stored once; written last, so that a folder that has it is complete

A folder may come from anywhere: it holds no code, and its sizes are compared with the shapes in the header of the weights before any
memory is allocated for them.

Source of the format of the weights: the documentation of safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lowtri.errors import CallError, DataError, MaskError
from lowtri.extras import require
from lowtri.files import write_atomically, write_text, writing
from lowtri.nn.config import DecoderConfig, GPT2Config, RecurrentConfig, check_sizes
from lowtri.nn.positions import RopeScaling

M = TypeVar("M", bound=nn.Module)

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_LONGEST = 2**20  # bytes of a config.json; those in use have some hundreds
_CLASSES = {  # of a configuration; the model_type of its folder
    DecoderConfig: "lowtri_decoder",
    GPT2Config: "lowtri_decoder",
    RecurrentConfig: "lowtri_recurrent",
}


def save_folder(folder: str | Path, config: DecoderConfig | RecurrentConfig, state: Mapping[str, Tensor]) -> None:
    """Write a model's configuration and weights; the folder is created if it is missing.

    Args:
        state: the model's ``state_dict``. Of tied weights the embedding is stored, and the output projection is not.

    Raises:
        DataError: if a file cannot be written.
        ExtraError: if safetensors is not installed; nothing is written then.
    """
    require("saving a model", "safetensors")
    from safetensors.torch import save_file

    folder = Path(folder)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    content = {"model_type": _CLASSES[type(config)], "config_class": type(config).__name__, **asdict(config)}
    scaling = content.get("rope_scaling")
    if scaling is not None:  # JSON has no infinity, which is what bounds are by default
        content["rope_scaling"] = {name: value for name, value in scaling.items() if math.isfinite(value)}
    with writing("save", folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / CONFIG, json.dumps(content, indent=2) + "\n")
        write_atomically(folder / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))


def read_config(folder: str | Path) -> dict[str, Any]:
    """The content of a folder's config.json.

    Raises:
        DataError: if there is none, or it is not an object in JSON.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        what = "has no config.json" if Path(folder).is_dir() else "is not a folder"
        raise DataError(f"{folder} {what}. Fix: a folder with {CONFIG} and {WEIGHTS}, as Decoder.save writes it")
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(_LONGEST + 1)[:_LONGEST])
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {brief(error)}. Fix: the file as it was saved") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}; expected an object. Fix: the file as it was saved")
    return content


def load_folder(folder: str | Path, model_type: str, build: Callable[[Any], M], **changes: Any) -> M:
    """The model of a folder that :func:`save_folder` wrote, in evaluation mode.

    Args:
        model_type: what config.json must declare.
        build: from the configuration to a model.
        changes: fields of the configuration that replace the folder's; those that are None replace nothing.

    Raises:
        DataError: if a file is missing or damaged, is of another kind of model, or the two files do not fit together.
        MaskError, CallError: if a change does not fit.
    """
    require("loading a model", "safetensors")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    config = _config(folder, model_type)
    changes = {name: value for name, value in changes.items() if value is not None}
    if changes:
        config = replace(config, **changes)
    path = folder / WEIGHTS
    if not path.is_file():
        raise DataError(f"{folder} has no {WEIGHTS}, which is written last. Fix: save the model again")
    try:
        shapes = _shapes(path)
        check_sizes(config, shapes, folder)
        with torch.device("meta"):  # no memory, and no initialisation, for weights that are replaced below
            model: Any = build(config)
        _check_shapes(folder, config, model, shapes)
        tensors = load_file(path)
    except (OSError, SafetensorError, RuntimeError, OverflowError) as error:
        if isinstance(error, CallError):
            raise
        raise DataError(
            f"{path} is damaged: {brief(error)}. Fix: save the model again, or copy its folder anew"
        ) from None
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    loaded: M = model.eval()
    return loaded


def brief(text: object) -> str:
    """Text from a file or a library made safe for a message: one line, no control characters, of limited length.

    >>> brief("a\\x1b[31mb\\nsecond line" + "c" * 999)
    'a?[31mb'
    """
    line = str(text).strip().splitlines()[:1] or [type(text).__name__]
    return "".join(letter if letter.isprintable() else "?" for letter in line[0][:200])


def _config(folder: Path, model_type: str) -> Any:
    """The configuration in a folder, if it is one of this kind of model."""
    content = read_config(folder)
    path = folder / CONFIG
    found = content.pop("model_type", None)
    if found != model_type:
        raise DataError(
            f"{path}: model_type is {found!r:.60}; expected {model_type!r}.\n"
            "Fix: Decoder.load or RecurrentLM.load, by the model that was saved; transformers for its own models"
        )
    name = content.pop("config_class", None)
    kind = next((kind for kind, of in _CLASSES.items() if kind.__name__ == name and of == model_type), None)
    if kind is None:
        raise DataError(f"{path}: config_class is {name!r:.60}, which is none of lowtri.nn. Fix: a newer lowtri")
    unknown = sorted(content.keys() - {field.name for field in fields(kind)})
    if unknown:
        raise DataError(f"{path}: {brief(unknown[0])} is unknown to this lowtri. Fix: a newer lowtri")
    try:
        if content.get("rope_scaling") is not None:
            content["rope_scaling"] = RopeScaling(**content["rope_scaling"])
        for name, convert in (("rope_layers", bool), ("eos_token_id", int)):
            if content.get(name) is not None:
                content[name] = tuple(map(convert, content[name]))
        return kind(**content)
    except (CallError, MaskError, TypeError, ValueError) as error:
        raise DataError(f"{path} does not describe a model: {brief(error)}. Fix: the file as it was saved") from None


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors, from the header of the file."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        for name, part in parts.items():
            if part.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                raise DataError(
                    f"{path}: the weight {brief(name)} is {part.get_dtype()}; expected floats of 16 to 64 bits. "
                    "Fix: save the model again"
                )
        return {name: tuple(part.get_shape()) for name, part in parts.items()}


def _check_shapes(folder: Path, config: Any, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise unless the file has the model's weights and no others."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight")
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            raise DataError(
                f"{folder}: {CONFIG} and {WEIGHTS} do not fit together at {brief(name)}:\n"
                f"  the config asks for {expected.get(name, 'nothing')}, the file has {shapes.get(name, 'nothing')}.\n"
                "Fix: both files from one save"
            )
