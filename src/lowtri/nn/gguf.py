"""A GGUF file as a folder in Llama's layout: dequantised once, kept in the user's cache.

A GGUF file holds sizes, weights (mostly quantised) and the tokenizer in one. Its weights become float32 here, and the folder is
read like any other: by :func:`lowtri.nn.checkpoint.load`, and by transformers. The package ``gguf`` knows the format's blocks.

    general.architecture llama   also Mistral and SmolLM2; rows of queries and keys stand in another order, see :func:`from_pairs`
    qwen2, qwen3, gpt2           as the folder has them

Source: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtri.errors import DataError, LowtriError
from lowtri.nn.gguf_names import config_of, tensor_name
from lowtri.nn.gguf_tokenizer import tokenizer_of
from lowtri.nn.rotary import RopeScaling, from_pairs, rotary_speeds

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["cache_folder", "converted", "is_gguf"]

_FORM = 1  # of the folders that are written here; a new form is converted anew


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"


def cache_folder() -> Path:
    """Where what was computed from other files is kept: ``LOWTRI_CACHE``, else the place that the system has for it."""
    own = os.environ.get("LOWTRI_CACHE")
    if own:
        return Path(own)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lowtri"


def converted(path: str | Path, note: Callable[[str], object] | None = None) -> Path:
    """The folder that a GGUF file becomes; made at the first call, found at the next.

    Args:
        path: the file.
        note: told before the slow part.

    Raises:
        DataError: if the package ``gguf`` is missing, the file is damaged, or the model is none of ours; the key is named.
    """
    path = Path(path).resolve()
    state = path.stat()
    key = hashlib.sha256(f"{_FORM} {path} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache_folder() / "gguf" / f"{path.stem}-{key}"
    if (folder / "model.safetensors").exists():
        return folder
    if note is not None:
        note(f"converting {path.name} once, to {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        try:
            _convert(path, beside)
        except LowtriError:
            raise
        except (LookupError, TypeError, ValueError) as error:  # what a flipped or missing byte leads to
            raise DataError(f"{path} is damaged or cut off: {type(error).__name__}: {error}") from None
        try:
            beside.rename(folder)
        except OSError:  # another process was faster, and its folder is the same
            if not (folder / "model.safetensors").exists():
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def _convert(path: Path, folder: Path) -> None:
    """Fill a folder with config, tokenizer, and, last, the weights."""
    import json

    from safetensors.numpy import save_file

    gguf, reader = _open(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors: dict[str, NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise DataError(
                f"{path}: {tensor.name} is {tensor.tensor_type.name}, which gguf cannot dequantise"
            ) from None
        tensors[tensor.name] = np.asarray(values, np.float32)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    config = config_of(fields, shapes, path)
    if "rope_freqs.weight" in tensors:
        config["rope_scaling"] = _scaling_of(tensors.pop("rope_freqs.weight"), config, path)
    kind = fields["general.architecture"]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, NDArray[np.float32]] = {}
    for name, values in tensors.items():
        part = name.split(".")[2] if name.startswith("blk.") else name
        if kind == "llama" and part in heads:
            values = from_pairs(values, heads[part])
        if kind == "gpt2" and values.ndim == 2 and name.startswith("blk."):
            values = values.T  # GPT-2's own file keeps its maps as (in, out)
        weights[tensor_name(name, kind, path)] = np.ascontiguousarray(values)
    tokenizer, its_config = tokenizer_of(fields, path)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
        _write(folder / "tokenizer_config.json", json.dumps(its_config, indent=2))
        template = fields.get("tokenizer.chat_template")
        if template:
            _write(folder / "chat_template.jinja", template)
    _write(folder / "config.json", json.dumps(config, indent=2))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _open(path: Path) -> tuple[Any, Any]:
    try:
        import gguf
    except ImportError:
        raise DataError(
            f"{path} is a GGUF file, and the package gguf, which reads them, is not installed.\n"
            "Fix: pip install 'lowtri[gguf]', or pip install gguf"
        ) from None
    try:
        return gguf, gguf.GGUFReader(path)
    except Exception as error:  # the reader trusts the file's numbers, and fails where they lead
        raise DataError(f"{path} is damaged or cut off: {type(error).__name__}: {error}") from None


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")


def _scaling_of(slower: NDArray[np.float32], config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Llama 3's scaling, of which the file keeps only the result: how many times slower each pair turns."""
    size, theta = config["head_dim"], config["rope_theta"]
    found = RopeScaling(float(slower.max()), 1.0, 4.0, 8192)  # what Llama 3.1 and 3.2 were published with
    expected = rotary_speeds(size, theta) / rotary_speeds(size, theta, found)
    if slower.shape != expected.shape or not np.allclose(slower, expected.numpy(), rtol=1e-3):
        raise DataError(f"{path}: rope_freqs.weight is not the scaling of Llama 3, the only one that the Decoder knows")
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "factor": found.factor, **bounds}
