"""A Decoder as a folder that transformers can load, and such a folder as a Decoder; a RecurrentLM in the same files.

    config.json              sizes, under Llama's key names; also the mask
    model.safetensors        weights, under Llama's names
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
import os
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtri.errors import DataError
from lowtri.masks import as_mask, causal, window
from lowtri.nn.decoder import Decoder, DecoderConfig
from lowtri.nn.recurrent import RecurrentConfig, RecurrentLM

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

__all__ = ["BEGIN", "END", "load", "load_tokenizer", "save", "write_whole"]

RECURRENT = "lowtri_recurrent"  # the model_type of a RecurrentLM
BEGIN, END = "<|begin|>", "<|end|>"  # a document's first token, and its last, in tokenizers that lowtri trains


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file beside ``path``, then move it there: the file is the old one or the new one, never half."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.touch()
        mode = beside.stat().st_mode  # what any new file gets here; some writers make theirs unreadable for others
        write(beside)
        beside.chmod(mode)
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())  # before the move, or a power cut could leave the new name with no bytes
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


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
        write_whole(folder / "tokenizer.json", lambda path: tokenizer.save(str(path)))
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
        config = _to_llama(model.config, tokenizer, dtype)
    _write_json(folder / "config.json", config)
    write_whole(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))


def load(folder: str | Path) -> tuple[Decoder | RecurrentLM, Tokenizer | None]:
    """Read a folder that :func:`save` or transformers wrote: the model in evaluation mode, and the tokenizer if there is one.

    Raises:
        DataError: if a file is missing, damaged, or describes a model that is not one of ours.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: a checkpoint is a folder with config.json and model.safetensors")
    config = _read_config(folder / "config.json")
    tensors = _read_weights(folder / "model.safetensors")
    model = RecurrentLM.from_config(config) if isinstance(config, RecurrentConfig) else Decoder(config)
    model = model.to(next(iter(tensors.values())).dtype)
    _fill(model, tensors, folder)
    return model.eval(), load_tokenizer(folder)


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The folder's tokenizer, None if it has none."""
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise DataError(f"{path} is not a tokenizer: {error}") from None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, lambda beside: beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8"))


# config.json


def _to_llama(config: DecoderConfig, tokenizer: Tokenizer | None, dtype: str) -> dict[str, Any]:
    sizes = asdict(config)
    mask = as_mask(sizes.pop("mask"))
    n = _window_size(mask)
    kind: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    if n is not None:
        kind = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": n}
    return {
        **kind,
        **sizes,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        "bos_token_id": tokenizer.token_to_id(BEGIN) if tokenizer else None,
        "eos_token_id": tokenizer.token_to_id(END) if tokenizer else None,
        "lowtri_mask": repr(mask),
    }


def _window_size(mask: object) -> int | None:
    """The n of ``window(n)``, with or without ``causal &``, which it implies; None for any other mask."""
    found = re.search(r"window\((\d+)\)", repr(mask))
    n = int(found.group(1)) if found else 0
    return n if found and mask in (window(n), causal() & window(n), window(n) & causal()) else None


# Keys of other models' files that change the computation, with the one value for which Decoder computes the same.
_MUST_BE = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
}


def _read_config(path: Path) -> DecoderConfig | RecurrentConfig:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path.parent} has no config.json: it is no checkpoint, or one that is not finished") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    kind = found.get("model_type") if isinstance(found, dict) else None
    make: Callable[..., DecoderConfig | RecurrentConfig] = DecoderConfig
    if kind == RECURRENT:
        make, known = RecurrentConfig, RecurrentConfig.__dataclass_fields__
    elif kind in ("llama", "mistral"):
        found, known = _from_llama(found, path), DecoderConfig.__dataclass_fields__
    else:
        raise DataError(f"{path}: model_type {kind!r} came, lowtri's Decoder reads llama and mistral")
    try:
        return make(**{key: value for key, value in found.items() if key in known and value is not None})
    except (TypeError, ValueError) as error:
        raise DataError(f"{path} does not describe a decoder: {error}") from None


def _from_llama(found: dict[str, Any], path: Path) -> dict[str, Any]:
    """What a Decoder reads of Llama's or Mistral's config."""
    if "rope_parameters" in found:  # how transformers 5 spells rope_theta and rope_scaling
        rope = found["rope_parameters"] or {}
        found.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
        if rope.get("rope_type", "default") != "default":
            found["rope_scaling"] = rope
    for key, wanted in _MUST_BE.items():
        if found.get(key, wanted) != wanted:
            raise DataError(f"{path}: {key} {found[key]!r} came, lowtri's Decoder has {wanted!r} only")
    n = found.get("sliding_window") if found["model_type"] == "mistral" else None
    found["mask"] = found.get("lowtri_mask") or (f"causal & window({n})" if n else "causal")
    return found


# tokenizer_config.json


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


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise DataError(
            f"{path.parent} has no model.safetensors: training is not finished, or it is kept elsewhere"
        ) from None
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} is damaged: {error}") from None
    if not tensors:
        raise DataError(f"{path} has no weights in it")
    return tensors


def _fill(model: Decoder | RecurrentLM, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        wanted.pop("lm_head.weight", None)
        tensors.pop("lm_head.weight", None)
    came = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(wanted.keys() | came.keys()):
        if wanted.get(name) != came.get(name):
            raise DataError(
                f"{folder}: config.json and model.safetensors do not fit together at {name}:\n"
                f"  the config asks for {wanted.get(name, 'nothing')}, the file has {came.get(name, 'nothing')}"
            )
    model.load_state_dict(tensors, strict=False)
