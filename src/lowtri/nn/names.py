"""Resolves a model's name, as users write it, to its checkpoint folder.

out/book         a folder
model.gguf       a GGUF file, converted once to a folder in the user's cache
smollm2          weights shipped in an installed package (:mod:`lowtri.nn.packaged`)
org/name         a model of the Hugging Face hub (:mod:`lowtri.nn.hub`)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lowtri.errors import DataError
from lowtri.nn.gguf import converted, is_gguf
from lowtri.nn.hub import download, is_hub_name
from lowtri.nn.packaged import PACKAGED

__all__ = ["folder_of", "names_a_model"]


def names_a_model(name: str) -> bool:
    """Whether this is a GGUF file, the name of packaged weights, or a name of the hub; an existing folder is none of them."""
    return not Path(name).is_dir() and (name in PACKAGED or name.endswith(".gguf") or is_hub_name(name))


def folder_of(name: str | Path, note: Callable[[str], object] | None = None) -> Path:
    """The checkpoint folder for a name; an existing path takes precedence over a package's or a hub's name.

    Args:
        name: a path (as a str or a Path), or one of the other names (as a str).
        note: called with a message before a conversion.

    Raises:
        DataError: if there is no such model, or it cannot be downloaded or converted.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if not path.exists() and isinstance(name, str):
        if name in PACKAGED:
            path = PACKAGED[name].path()
        elif is_hub_name(name):
            return download(name)
    if not path.is_file():
        raise DataError(
            f"{name} is not a folder: a checkpoint is a folder with config.json and model.safetensors, or a GGUF file;\n"
            f"packaged weights are {', '.join(PACKAGED)}; models of the Hugging Face hub are named org/name"
        )
    if not is_gguf(path):
        raise DataError(f"{path} is a file, but not a GGUF file. Fix: the folder of a model, or a GGUF file")
    return converted(path, note)
