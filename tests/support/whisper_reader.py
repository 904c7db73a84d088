"""Whisper of transformers from a folder of CTranslate2: the one package that ships small trained weights of Whisper has these.

The layout of ``model.bin``, little-endian, from front to back; a text is its length with a closing zero (u16), then its bytes:

    u32 version   text name of the layout   u32 its revision
    u32 count, then for each variable:   text name   u8 rank   u32 sizes ...   u8 dtype   u32 bytes   the numbers
    u32 count, then for each alias:      text alias  text variable

Source: the documents of CTranslate2, "Model conversion", binary version 6.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["read", "whisper"]

_DTYPES = ("<f4", "i1", "<i2", "<i4", "<f2")  # by their number in the file
_ENGLISH_START = 50257  # the id of <|startoftranscript|> in the vocabulary of the English models; 50258 in the other


def read(path: str | Path) -> dict[str, NDArray[Any]]:
    """All variables of a ``model.bin`` of Whisper, aliases included, as arrays that lie in the file until they are used."""
    reader = _Reader(np.memmap(path, np.uint8, "r"))
    assert (reader.number("I"), reader.text()) == (6, "WhisperSpec"), f"{path} is another file"
    reader.number("I")  # the revision
    variables: dict[str, NDArray[Any]] = {}
    for _ in range(reader.number("I")):
        name = reader.text()
        variables[name] = reader.array()
    for _ in range(reader.number("I")):
        alias = reader.text()
        variables[alias] = variables[reader.text()]
    return variables


class _Reader:
    """Goes through the bytes from front to back."""

    def __init__(self, content: NDArray[np.uint8]) -> None:
        self.content = content
        self.at = 0

    def raw(self, size: int) -> NDArray[np.uint8]:
        self.at += size
        return self.content[self.at - size : self.at]

    def number(self, kind: str) -> int:
        return int(struct.unpack("<" + kind, self.raw(struct.calcsize(kind)).tobytes())[0])

    def text(self) -> str:
        return self.raw(self.number("H")).tobytes().rstrip(b"\0").decode("utf-8")

    def array(self) -> NDArray[Any]:
        shape = tuple(self.number("I") for _ in range(self.number("B")))
        kind = np.dtype(_DTYPES[self.number("B")])
        return self.raw(self.number("I")).view(kind).reshape(shape)


def whisper(folder: str | Path) -> Any:
    """Whisper of transformers, in float32 and eval mode.

    Args:
        folder: with ``model.bin``, ``config.json`` (which tokens are suppressed) and ``tokenizer.json`` (which are special).

    Returns:
        a ``WhisperForConditionalGeneration`` whose ``generate`` takes the features of ``WhisperFeatureExtractor``.
    """
    import torch
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    folder = Path(folder)
    variables = read(folder / "model.bin")
    ends, generation = _tokens(folder)
    sizes = _sizes(variables)
    tensors = {name: torch.from_numpy(x.astype(np.float32)) for name, x in _renamed(variables, sizes)}
    with torch.device("meta"):  # no weights are drawn, and no random numbers used up
        model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **ends))
    model.load_state_dict(tensors, assign=True)
    model.tie_weights()
    longest = sizes["max_target_positions"]
    model.generation_config = GenerationConfig(**ends, **generation, max_length=longest)
    return model.eval()


def _sizes(variables: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """The configuration, as the shapes say it."""
    width, mels, _ = variables["encoder/conv1/weight"].shape
    sizes = {"d_model": width, "num_mel_bins": mels, "vocab_size": variables["decoder/embeddings/weight"].shape[0]}
    for side, places in (("encoder", "max_source_positions"), ("decoder", "max_target_positions")):
        layers = {name.split("/")[1] for name in variables if name.startswith(f"{side}/layer_")}
        sizes[f"{side}_layers"] = len(layers - {"layer_norm"})
        sizes[f"{side}_attention_heads"] = int(variables[f"{side}/num_heads"])
        sizes[f"{side}_ffn_dim"] = variables[f"{side}/layer_0/ffn/linear_0/weight"].shape[0]
        sizes[places] = variables[f"{side}/position_encodings/encodings"].shape[0]
    return sizes


def _renamed(variables: dict[str, NDArray[Any]], sizes: dict[str, Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every weight under transformers' name; queries, keys and values that lie in one matrix are cut apart."""

    def both(ours: str, theirs: str, weight: str = "weight", bias: str = "bias") -> Iterator[tuple[str, NDArray[Any]]]:
        yield f"{theirs}.weight", variables[f"{ours}/{weight}"]
        yield f"{theirs}.bias", variables[f"{ours}/{bias}"]

    def norm(ours: str, theirs: str) -> Iterator[tuple[str, NDArray[Any]]]:
        return both(f"{ours}/layer_norm", theirs, "gamma", "beta")

    def attention(ours: str, theirs: str) -> Iterator[tuple[str, NDArray[Any]]]:
        *maps, out = (f"{ours}/linear_{i}" for i in range(3 if theirs.endswith("encoder_attn") else 2))
        weights, biases = (np.concatenate([variables[f"{one}/{part}"] for one in maps]) for part in ("weight", "bias"))
        for at, name in enumerate("qkv"):
            here = slice(at * sizes["d_model"], (at + 1) * sizes["d_model"])
            yield f"{theirs}.{name}_proj.weight", weights[here]
            if name != "k":  # a bias of the keys moves all scores of a query alike, so that Whisper has none
                yield f"{theirs}.{name}_proj.bias", biases[here]
            else:
                assert not np.any(biases[here])
        yield from both(out, f"{theirs}.out_proj")
        yield from norm(ours, f"{theirs}_layer_norm")

    for number in (1, 2):
        yield from both(f"encoder/conv{number}", f"model.encoder.conv{number}")
    yield "proj_out.weight", variables["decoder/projection/weight"]
    yield "model.decoder.embed_tokens.weight", variables["decoder/embeddings/weight"]
    for side in ("encoder", "decoder"):
        yield f"model.{side}.embed_positions.weight", variables[f"{side}/position_encodings/encodings"]
        yield from norm(side, f"model.{side}.layer_norm")
        for i in range(sizes[f"{side}_layers"]):
            ours = f"{side}/layer_{i}"
            theirs = f"model.{side}.layers.{i}"
            yield from attention(f"{ours}/self_attention", f"{theirs}.self_attn")
            if side == "decoder":
                yield from attention(f"{ours}/attention", f"{theirs}.encoder_attn")
            yield from norm(f"{ours}/ffn", f"{theirs}.final_layer_norm")
            yield from both(f"{ours}/ffn/linear_0", f"{theirs}.fc1")
            yield from both(f"{ours}/ffn/linear_1", f"{theirs}.fc2")


def _tokens(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tokens that begin and end a transcript, and what else generating needs to know."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    added = json.loads((folder / "tokenizer.json").read_text("utf-8"))["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    end = ids["<|endoftext|>"]
    start = ids["<|startoftranscript|>"]
    generation = {
        "is_multilingual": start != _ENGLISH_START,
        "lang_to_id": {name: at for name, at in ids.items() if at in config["lang_ids"]},
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "suppress_tokens": config["suppress_ids"],
        "begin_suppress_tokens": config["suppress_ids_begin"],
        "alignment_heads": config["alignment_heads"],
    }
    ends = {"decoder_start_token_id": start, "eos_token_id": end, "pad_token_id": end, "bos_token_id": end}
    return ends, generation
