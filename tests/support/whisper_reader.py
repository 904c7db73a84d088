"""Model files of CTranslate2 (``model.bin``), and Whisper from them into transformers.

The layout, little-endian, from front to back; a text is its length with a closing zero (u16), then its bytes:

    u32 version   text name of the layout   u32 its revision
    u32 count, then for each variable:   text name   u8 rank   u32 sizes ...   u8 dtype   u32 bytes   the numbers
    u32 count, then for each alias:      text alias  text variable

Nothing here needs the ``ctranslate2`` package. Source: the documents of CTranslate2, "Model conversion", binary version 6.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import DataError

__all__ = ["Stored", "read", "whisper"]

_VERSION = 6
_DTYPES = ("<f4", "i1", "<i2", "<i4", "<f2", "bfloat16")  # by their number in the file
_ENGLISH_START = 50257  # the id of <|startoftranscript|> in the vocabulary of the English models; 50258 in the other


@dataclass(frozen=True)
class Stored:
    """A model file: the name of its layout, the revision of that, and its variables by name."""

    kind: str
    revision: int
    variables: dict[str, NDArray[Any]]


def read(path: str | Path) -> Stored:
    r"""All variables of a ``model.bin``, aliases included, as arrays that lie in the file until they are used.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> start = b"\6\0\0\0" b"\5\0Spec\0" b"\1\0\0\0"  # version, name, revision
    >>> one = b"\1\0\0\0" b"\2\0x\0" b"\1" b"\3\0\0\0" b"\1" b"\3\0\0\0" b"\7\10\11"  # one variable: x, int8 (3,)
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "model.bin"
    ...     _ = path.write_bytes(start + one + b"\0\0\0\0")  # no aliases
    ...     read(path)
    Stored(kind='Spec', revision=1, variables={'x': memmap([7, 8, 9], dtype=int8)})

    Args:
        path: the file. bfloat16 comes as float32, which holds the same numbers.

    Raises:
        DataError: if it is no such file, of another version, or cut short.
    """
    try:
        reader = _Reader(np.memmap(path, np.uint8, "r"), path)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise DataError(f"whisper_reader.read: {path} cannot be read: {error}") from None
    version = reader.number("I")
    if version != _VERSION:
        raise DataError(
            f"whisper_reader.read: {path} begins with {version}; a model.bin begins with its version, and {_VERSION} is read.\n"
            "Fix: the right file, or convert the model anew with a CTranslate2 of today."
        )
    kind, revision = reader.text(), reader.number("I")
    variables: dict[str, NDArray[Any]] = {}
    for _ in range(reader.number("I")):
        name = reader.text()
        variables[name] = reader.array(name)
    for _ in range(reader.number("I")):
        alias, name = reader.text(), reader.text()
        if name not in variables:
            raise DataError(f"whisper_reader.read: {path}: {alias} is to be {name}, which is not there.")
        variables[alias] = variables[name]
    return Stored(kind, revision, variables)


class _Reader:
    """Goes through the bytes from front to back."""

    def __init__(self, content: NDArray[np.uint8], path: str | Path) -> None:
        self.content, self.path, self.at = content, path, 0

    def raw(self, size: int, what: str) -> NDArray[np.uint8]:
        if self.at + size > len(self.content):
            raise DataError(
                f"whisper_reader.read: {self.path} ends at byte {len(self.content):,}, within {what} that goes to byte "
                f"{self.at + size:,}.\nFix: the whole file."
            )
        self.at += size
        return self.content[self.at - size : self.at]

    def number(self, kind: str) -> int:
        return int(struct.unpack("<" + kind, self.raw(struct.calcsize(kind), "a number").tobytes())[0])

    def text(self) -> str:
        return self.raw(self.number("H"), "a name").tobytes().rstrip(b"\0").decode("utf-8", "replace")

    def array(self, name: str) -> NDArray[Any]:
        shape = tuple(self.number("I") for _ in range(self.number("B")))
        dtype, size = self.number("B"), self.number("I")
        if dtype >= len(_DTYPES):
            raise DataError(
                f"whisper_reader.read: {self.path}: {name} has the dtype {dtype}; 0 .. {len(_DTYPES) - 1} are known."
            )
        half = _DTYPES[dtype] == "bfloat16"
        kind = np.dtype("<u2" if half else _DTYPES[dtype])
        if size != kind.itemsize * int(np.prod(shape, dtype=np.int64)):
            raise DataError(
                f"whisper_reader.read: {self.path}: {name} has {size} bytes, but is {shape} of {_DTYPES[dtype]}."
            )
        found = self.raw(size, name).view(kind).reshape(shape)
        return (found.astype(np.uint32) << 16).view(np.float32) if half else found


def whisper(folder: str | Path) -> Any:
    """Whisper of transformers, in float32 and eval mode, from a folder of CTranslate2.

    Args:
        folder: with ``model.bin``, ``config.json`` (which tokens are suppressed) and ``tokenizer.json`` (which are special).

    Returns:
        a ``WhisperForConditionalGeneration`` whose ``generate`` takes the features of ``WhisperFeatureExtractor``.

    Raises:
        DataError: if a file is missing or damaged, holds another model, or has weights that are quantised to whole numbers.
    """
    import torch
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    folder = Path(folder)
    stored = read(folder / "model.bin")
    if stored.kind != "WhisperSpec":
        raise DataError(
            f"whisper_reader.whisper: {folder} holds a {stored.kind}. Fix: a folder of Whisper (WhisperSpec)."
        )
    whole = [name for name, x in stored.variables.items() if x.ndim and x.dtype.kind == "i"]
    if whole:
        raise DataError(
            f"whisper_reader.whisper: {whole[0]} is quantised to {stored.variables[whole[0]].dtype}.\n"
            "Fix: the model converted with --quantization float16 or float32."
        )
    ends, generation = _tokens(folder)
    try:
        sizes = _sizes(stored.variables)
        tensors = {name: torch.from_numpy(x.astype(np.float32)) for name, x in _renamed(stored.variables, sizes)}
    except KeyError as missing:
        raise DataError(f"whisper_reader.whisper: {folder / 'model.bin'} has no {missing}.") from None
    with torch.device("meta"):  # no weights are drawn, and no random numbers used up
        model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **ends))
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise DataError(f"whisper_reader.whisper: {folder / 'model.bin'} is no Whisper: {error}") from None
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
            elif np.any(biases[here]):
                raise DataError(f"whisper_reader.whisper: {ours} has a bias for its keys, which Whisper has not.")
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
            ours, theirs = f"{side}/layer_{i}", f"model.{side}.layers.{i}"
            yield from attention(f"{ours}/self_attention", f"{theirs}.self_attn")
            if side == "decoder":
                yield from attention(f"{ours}/attention", f"{theirs}.encoder_attn")
            yield from norm(f"{ours}/ffn", f"{theirs}.final_layer_norm")
            yield from both(f"{ours}/ffn/linear_0", f"{theirs}.fc1")
            yield from both(f"{ours}/ffn/linear_1", f"{theirs}.fc2")


def _tokens(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tokens that begin and end a transcript, and what else generating needs to know."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        added = json.loads((folder / "tokenizer.json").read_text("utf-8"))["added_tokens"]
        ids = {token["content"]: token["id"] for token in added}
        end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
        generation = {
            "is_multilingual": start != _ENGLISH_START,
            "lang_to_id": {name: at for name, at in ids.items() if at in config["lang_ids"]},
            "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
            "no_timestamps_token_id": ids["<|notimestamps|>"],
            "suppress_tokens": config["suppress_ids"],
            "begin_suppress_tokens": config["suppress_ids_begin"],
            "alignment_heads": config["alignment_heads"],
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"whisper_reader.whisper: config.json and tokenizer.json of {folder} cannot be read: {type(error).__name__}: {error}"
        ) from None
    ends = {"decoder_start_token_id": start, "eos_token_id": end, "pad_token_id": end, "bos_token_id": end}
    return ends, generation
