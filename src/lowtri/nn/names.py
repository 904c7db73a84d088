"""Resolves a model's name, as users write it, to its checkpoint folder.

out/book         a folder
model.gguf       a GGUF file, converted once to a folder in the user's cache
smollm2          weights shipped in an installed package (:mod:`lowtri.nn.packaged`)
org/name         a model of the Hugging Face hub (:mod:`lowtri.nn.hub`)
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lowtri.errors import DataError
from lowtri.nn.gguf import converted, is_gguf
from lowtri.nn.hub import download, is_hub_name
from lowtri.nn.packaged import PACKAGED

__all__ = ["folder_of"]


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
            try:
                return download(name)
            except DataError as error:
                raise DataError(f"{error}{_suggestion(name)}") from None
    if not path.is_file():
        raise DataError(
            f"{name} is not a folder: a checkpoint is a folder with config.json and model.safetensors, or a GGUF file;\n"
            f"packaged weights are {', '.join(PACKAGED)}; models of the Hugging Face hub are named org/name{_suggestion(str(name))}"
        )
    if not is_gguf(path):
        raise DataError(f"{path} is a file, but not a GGUF file. Fix: the folder of a model, or a GGUF file")
    return converted(path, note)


def _suggestion(name: str) -> str:
    """A line with the model whose name is closest, among packaged weights and the models in the folder that is named; or nothing."""
    known, folder = list(PACKAGED), Path(name).parent
    with suppress(OSError):
        entries = [path for path in folder.iterdir() if path.suffix == ".gguf" or (path / "config.json").is_file()]
        known += [str(path) for path in entries]
    closest = difflib.get_close_matches(name.rstrip("/"), known, 1)
    return f"\nDid you mean {closest[0]}?" if closest else ""
