"""Converts a GGUF file to a checkpoint folder, once; the folder is kept in the user's cache.

A GGUF file holds the configuration, (mostly quantised) weights and the tokenizer. The package ``gguf`` dequantises the weights to
float32, and the folder is loaded like any other, by :func:`lowtri.nn.checkpoint.load` or transformers.

    general.architecture llama   also Mistral and SmolLM2; rotary pairs are interleaved, see :func:`from_pairs`
    qwen2, qwen3, gpt2           the same layout

Source: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtri.errors import DataError, LowtriError
from lowtri.nn.config import check_sizes
from lowtri.nn.files import brief
from lowtri.nn.gguf_header import StoredTensor, read_header
from lowtri.nn.gguf_names import config_of, tensor_names
from lowtri.nn.gguf_tokenizer import tokenizer_of
from lowtri.nn.layout import from_json
from lowtri.nn.rotary import RopeScaling, from_pairs, rotary_frequencies
from lowtri.system import cache_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["converted", "is_gguf"]

_FORM = 2  # version of the folders written here; a new version converts again
_SCALING = "rope_freqs.weight"


def is_gguf(path: Path) -> bool:
    """Whether a file starts with the GGUF magic."""
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"


def converted(path: str | Path, note: Callable[[str], object] | None = None) -> Path:
    """The checkpoint folder of a GGUF file; converted at the first call, and again when the file has changed.

    Args:
        path: the file.
        note: called with a message before the conversion.

    Raises:
        DataError: if the package ``gguf`` is missing, the file is damaged, the model is unsupported (the message names the
            key), or the cache cannot be written.
    """
    path = Path(path).resolve()
    state = path.stat()
    key = hashlib.sha256(f"{_FORM} {path} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache_folder() / "gguf" / f"{path.stem}-{key}"
    if (folder / "model.safetensors").exists():
        return folder
    if note is not None:
        note(f"converting {path.name} once, to {folder}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise DataError(
            f"{folder.parent} cannot be written: {error.strerror}. Fix: LOWTRI_CACHE=/another/folder"
        ) from None
    try:
        _convert(path, temporary)
        try:
            temporary.rename(folder)
        except OSError:  # another process converted it first
            if not (folder / "model.safetensors").exists():
                raise
    except (LowtriError, OSError):
        raise
    except Exception as error:  # corrupt bytes can lead to any error
        raise DataError(f"{path} is damaged or cut off: {brief(f'{type(error).__name__}: {error}')}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _convert(path: Path, folder: Path) -> None:
    """Write config, tokenizer and, last, the weights."""
    try:
        import gguf
    except ImportError:
        raise DataError(
            f"{path} is a GGUF file, and the package gguf, which reads them, is not installed.\n"
            "Fix: pip install 'lowtri[models]', or pip install gguf"
        ) from None
    from safetensors.numpy import save_file

    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    fields, tensors = read_header(content, {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()})
    shapes = {name: tensor.shape for name, tensor in tensors.items()}

    def dequantised(name: str, tensor: StoredTensor) -> NDArray[np.float32]:
        kind = gguf.GGMLQuantizationType(tensor.kind)
        try:
            return np.asarray(gguf.quants.dequantize(tensor.blocks(content), kind), np.float32)
        except NotImplementedError:
            raise DataError(f"{path}: {brief(name)} is {kind.name}, which gguf cannot dequantise") from None

    config = config_of(fields, shapes, path)
    if _SCALING in tensors:
        config["rope_scaling"] = _llama3_scaling(dequantised(_SCALING, tensors.pop(_SCALING)), config, path)
    decoder_config = from_json(config, path)  # validated here, so that errors name the GGUF file
    check_sizes(decoder_config, shapes, path)
    config["lowtri_mask"] = decoder_config.mask
    architecture = fields["general.architecture"]
    names = tensor_names(decoder_config, architecture)
    heads = {"attn_q": decoder_config.num_attention_heads, "attn_k": decoder_config.num_key_value_heads}
    weights: dict[str, NDArray[np.float32]] = {}
    for name, tensor in tensors.items():
        if name not in names:
            raise DataError(f"{path}: the tensor {brief(name)} has no place in lowtri's Decoder")
        values, part = dequantised(name, tensor), name.split(".")[-2]
        if architecture == "llama" and part in heads:
            values = from_pairs(values, heads[part])
        if architecture == "gpt2" and values.ndim == 2 and name.startswith("blk."):
            values = values.T  # GPT-2 checkpoints store projections as (in, out)
        weights[names[name]] = np.ascontiguousarray(values)
    tokenizer, tokenizer_config = tokenizer_of(fields, path)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
        _write(folder / "tokenizer_config.json", json.dumps(tokenizer_config, indent=2))
        if template := fields.get("tokenizer.chat_template"):
            _write(folder / "chat_template.jinja", template)
    _write(folder / "config.json", json.dumps(config, indent=2))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")


def _llama3_scaling(divisors: NDArray[np.float32], config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Llama 3's scaling, recovered from the stored divisor of each pair's frequency."""
    size, theta = config["head_dim"], config["rope_theta"]
    scaling = RopeScaling(float(divisors.max()), 1.0, 4.0, 8192)  # the published values of Llama 3.1 and 3.2
    expected = rotary_frequencies(size, theta) / rotary_frequencies(size, theta, scaling)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected.numpy(), rtol=1e-3):
        raise DataError(f"{path}: rope_freqs.weight is not the scaling of Llama 3, the only one that the Decoder knows")
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "factor": scaling.factor, **bounds}
