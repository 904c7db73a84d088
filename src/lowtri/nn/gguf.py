"""Converts a GGUF file to a checkpoint folder, once; the folder is kept in the user's cache.

A GGUF file holds the configuration, (mostly quantised) weights and the tokenizer. The package ``gguf`` dequantises the weights to
float32, and the folder is loaded like any other, by :func:`lowtri.nn.checkpoint.load` or transformers.

    general.architecture llama   also Mistral and SmolLM2; rotary pairs are interleaved, see :func:`from_pairs`
    qwen2, qwen3, gpt2           the same layout

    tokenizer.ggml.model gpt2    byte-level BPE with a list of merges; tokenizer.ggml.pre names the pre-tokenizer
    tokenizer.ggml.model llama   SentencePiece BPE: spaces as U+2581, byte fallback, merges by score

transformers also reads GGUF files, but drops settings that these models need. With versions 5.20 and 5.23, it reads Llama without
its biases, its scaled rotary frequencies (linear, llama3), its sliding window and attention.key_length; SmolLM's tokenizer without
the splitting of digits; and Qwen2's tokenizer without NFC. Names of tensors come from the package gguf; the pre-tokenizers are those
with which the models were published.

Source: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import hashlib
import math
import mmap
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from lowtri.errors import DataError, LowtriError
from lowtri.files import write_text
from lowtri.nn.attention import Body
from lowtri.nn.config import DecoderConfig, GPT2Config, check_sizes
from lowtri.nn.files import brief, guarded, write_folder
from lowtri.nn.hf_config import check_layers, damaged_config, end_ids, gpt2_config, sliding_mask, to_conv1d, to_json
from lowtri.nn.positions import RopeScaling, from_pairs, rotary_frequencies
from lowtri.system import cache_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

_FORM = 2  # version of the folders written here; a new version converts again
_SCALING = "rope_freqs.weight"


def is_gguf(path: Path) -> bool:
    """Whether a file starts with the GGUF magic."""
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"


def converted(path: str | Path, progress: Callable[[str], object] | None = None) -> Path:
    """The checkpoint folder of a GGUF file; converted at the first call, and again when the file has changed.

    Args:
        path: the file.
        progress: called with a message before the conversion.

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
    if progress is not None:
        progress(f"converting {path.name} once, to {folder}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise DataError(
            f"{folder.parent} cannot be written: {error.strerror}. Fix: LOWTRI_CACHE=/another/folder"
        ) from None
    try:
        _convert(path, temporary)
        temporary.rename(folder)
    except (LowtriError, OSError):
        if not (folder / "model.safetensors").exists():  # else another process converted it first
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
        divisors = dequantised(_SCALING, tensors.pop(_SCALING))
        config = replace(config, rope_scaling=_llama3_scaling(divisors, config, path))
    check_sizes(config, shapes, path)
    architecture = fields["general.architecture"]
    names = tensor_names(config, architecture)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name not in names:
            raise DataError(f"{path}: the tensor {brief(name)} has no place in lowtri's Decoder")
        values, part = dequantised(name, tensor), name.split(".")[-2]
        if architecture == "llama" and part in heads:
            values = from_pairs(values, heads[part])
        if architecture == "gpt2" and values.ndim == 2 and name.startswith("blk."):
            values = values.T  # GPT-2 checkpoints store projections as (in, out)
        weights[names[name]] = torch.tensor(values).contiguous()
    tokenizer, tokenizer_config = tokenizer_of(fields, path)
    if tokenizer is not None and (template := fields.get("tokenizer.chat_template")):
        write_text(folder / "chat_template.jinja", template + "\n")
    as_json = to_json(config) | {"bos_token_id": fields.get("tokenizer.ggml.bos_token_id")}
    write_folder(folder, as_json, weights, tokenizer, tokenizer_config)


def _llama3_scaling(divisors: NDArray[np.float32], config: DecoderConfig, path: Path) -> RopeScaling:
    """Llama 3's scaling, recovered from the stored divisor of each pair's frequency."""
    size, theta = config.head_dim, config.rope_theta
    scaling = RopeScaling(float(divisors.max()), 1.0, 4.0, 8192)  # the published values of Llama 3.1 and 3.2
    expected = rotary_frequencies(size, theta) / rotary_frequencies(size, theta, scaling)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected.numpy(), rtol=1e-3):
        raise DataError(f"{path}: rope_freqs.weight is not the scaling of Llama 3, the only one that the Decoder knows")
    return scaling


_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
# Read below, or irrelevant to the computation.
_ALSO = {"attention.value_length", "attention.causal", "rope.dimension_count", "attention.sliding_window", "vocab_size"}
_ALSO |= {"rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"}


def config_of(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: Path) -> DecoderConfig:
    """The configuration, from the metadata fields and the tensor shapes (in NumPy's order)."""
    kind = fields.get("general.architecture")
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        raise DataError(f"{path}: got general.architecture {kind!r:.60}; lowtri reads {', '.join(_ARCHITECTURES)}")
    own = {key.removeprefix(f"{kind}."): value for key, value in fields.items() if key.startswith(f"{kind}.")}
    for key, value in own.items():
        if key not in _SIZES and key not in _ALSO and value:
            raise DataError(f"{path}: got {kind}.{brief(key)} {value!r:.60}, which lowtri's Decoder does not support")
        # Some architectures have lists, one entry for each layer.
        if key in _SIZES and not key.endswith(("epsilon", "freq_base")) and not isinstance(value, int):
            raise DataError(f"{path}: got {kind}.{key} {value!r:.60}; expected a whole number")
    if "token_embd.weight" not in shapes:
        raise DataError(f"{path}: it has no token_embd.weight, so it is not a language model")
    scaling = own.get("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise DataError(f"{path}: got {kind}.rope.scaling.type {scaling!r:.60}; lowtri's Decoder has none and linear")
    window = own.get("attention.sliding_window")
    mask = sliding_mask(window, path) if window else "causal"
    ids = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]  # end of text, end of turn
    ends = list(dict.fromkeys(index for index in ids if index is not None))
    sizes: dict[str, Any] = {_SIZES[key]: value for key, value in own.items() if key in _SIZES}
    check_layers(sizes.get("num_hidden_layers"), path)
    sizes |= {
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "eos_token_id": end_ids(ends[0] if len(ends) == 1 else ends, path),
    }
    with damaged_config(path, "a decoder"):
        if kind == "gpt2":
            return gpt2_config(**sizes)
        config = DecoderConfig(
            **sizes,
            mask=mask,
            rope_scaling=RopeScaling(own["rope.scaling.factor"]) if scaling == "linear" else None,
            qkv_bias="blk.0.attn_q.bias" in shapes,
            o_bias="blk.0.attn_output.bias" in shapes,
            mlp_bias=kind == "llama" and "blk.0.ffn_up.bias" in shapes,
            qk_norm=kind == "qwen3",
        )
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, config.head_dim) != config.head_dim:
            raise DataError(
                f"{path}: got {kind}.{key} {own[key]!r:.60}; lowtri's Decoder has the head size {config.head_dim} only"
            )
    return config


def tensor_names(config: DecoderConfig, architecture: str) -> dict[str, str]:
    """For each tensor of such a model, its name in a GGUF file, and in model.safetensors."""
    import gguf

    with torch.device("meta"):
        weights = {f"model.{name}": weight for name, weight in Body(config).state_dict().items()}
        names = [*(to_conv1d(weights) if isinstance(config, GPT2Config) else weights), "lm_head.weight"]
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table: Any = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    return {table.get_name(name, (".weight", ".bias")): name for name in names}


_MOST_WORK = 2**28  # the sum of squared lengths; of 128,000 tokens with 10 characters each it is 13 million
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

# Pre-tokenizer patterns: contractions, words, numbers, punctuation, white space; None is the default pattern of ByteLevel.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
_PATTERNS = {"gpt-2": None, "gpt2": None, "smollm": None, "qwen2": _WORDS + r"\p{N}" + _REST}
_PATTERNS |= {"llama-bpe": _LLAMA3, "llama3": _LLAMA3}


def tokenizer_of(fields: Mapping[str, Any], path: Path) -> tuple[Tokenizer | None, dict[str, Any]]:
    """The tokenizer (None if the file has none) and the content of tokenizer_config.json."""
    kind = fields.get("tokenizer.ggml.model", "none")
    if kind == "none":
        return None, {}
    if kind not in ("gpt2", "llama"):
        raise DataError(f"{path}: got tokenizer.ggml.model {kind!r:.60}; lowtri reads gpt2 and llama")
    prefix = "tokenizer.ggml."
    own = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
    return guarded(f"{path}: its tokenizer is damaged", lambda: _build(own, kind, path))


def _build(fields: Mapping[str, Any], kind: str, path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    from tokenizers import AddedToken, processors

    tokens = _texts(fields, "tokens", path)
    tokenizer = (_byte_level if kind == "gpt2" else _sentence_piece)(fields, tokens, path)
    for add, wanted in ((tokenizer.add_special_tokens, _CONTROL), (tokenizer.add_tokens, _USER_DEFINED)):
        chosen = [token for token, of in zip(tokens, fields.get("token_type", ()), strict=False) if of == wanted]
        add([AddedToken(token, normalized=False, special=wanted == _CONTROL) for token in chosen])
    config: dict[str, Any] = {}
    for name, ggml_name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = fields.get(f"{ggml_name}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            config[f"{name}_token"] = tokens[index]
    begin = config.get("bos_token")
    if begin is not None and fields.get("add_bos_token", kind == "llama"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    return tokenizer, config


def _texts(fields: Mapping[str, Any], name: str, path: Path) -> list[str]:
    """A list of texts, with a limit on the work of splitting each in every way."""
    texts = fields.get(name)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{path}: tokenizer.ggml.{name} is not a list of texts")
    if sum(len(text) ** 2 for text in texts) > _MOST_WORK:
        raise DataError(f"{path}: tokenizer.ggml.{name} has texts of up to {max(map(len, texts))} characters")
    return texts


def _byte_level(fields: Mapping[str, Any], tokens: Sequence[str], path: Path) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = fields.get("pre", "gpt-2")
    if not isinstance(pre, str) or pre not in _PATTERNS:
        raise DataError(f"{path}: got tokenizer.ggml.pre {pre!r:.60}; lowtri knows {', '.join(_PATTERNS)}")
    merges: list[Any] = [tuple(merge.split(" ", 1)) for merge in _texts(fields, "merges", path)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in ("llama-bpe", "llama3")))
    pattern = _PATTERNS[pre]
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    if pre == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(fields: Mapping[str, Any], tokens: Sequence[str], path: Path) -> Tokenizer:
    """SentencePiece merges the pair whose merged token has the greatest score: a list of merges, greatest first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = fields.get("scores")
    if not isinstance(scores, list) or len(scores) < len(tokens):
        raise DataError(f"{path}: tokenizer.ggml.scores has no score for each of the {len(tokens)} tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, index in vocabulary.items():
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    pairs = [(left, right) for *_, left, right in sorted(merges)]
    unknown = fields.get("unknown_token_id")
    unknown_token = None if unknown is None else tokens[unknown]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, unk_token=unknown_token, fuse_unk=True, byte_fallback=True))
    prefixed = fields.get("add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence(
        ([normalizers.Prepend("▁")] if prefixed else []) + [normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


# The header. Every count and length is checked against the rest of the file before use, and tensors may not overlap, so time and
# memory are proportional to the file's size even for hostile files. The reader of the package gguf makes no such checks, and takes
# twenty times as long (dev/LOG.md).

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MOST_NAMES = 2**16  # fields, and tensors; the largest models have a few thousand
_MOST_ITEMS = 2**23  # in all arrays together; a vocabulary of 262,144 with its merges has 1.3 million


class StoredTensor(NamedTuple):
    """The location of a tensor in the file."""

    shape: tuple[int, ...]  # in NumPy's order, in elements rather than blocks
    kind: int  # a GGMLQuantizationType
    start: int  # in bytes, from the beginning of the file
    row: int  # bytes of a row, the innermost dimension

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape[:-1]) * self.row

    def blocks(self, file: Any) -> NDArray[np.uint8]:
        """Its bytes, (..., row)."""
        return np.frombuffer(file, np.uint8, self.end - self.start, self.start).reshape(*self.shape[:-1], self.row)


class Header(NamedTuple):
    """A file's metadata."""

    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(file: Any, blocks: Mapping[int, tuple[int, int]]) -> Header:
    """Read the header at the beginning of a file (bytes, or an mmap); a ValueError says why it is invalid.

    ``blocks`` has for each block type its number of elements and its size in bytes.
    """
    reader = _Reader(file)
    if reader.take(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = reader.number("I")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}, where 2 and 3 are read (in little-endian byte order)")
    n_tensors, n_fields = reader.number("Q"), reader.number("Q")
    for count, what in ((n_tensors, "tensors"), (n_fields, "fields")):
        if count > _MOST_NAMES:
            raise ValueError(f"it announces {count} {what}, where at most {_MOST_NAMES} are read")
    fields: dict[str, Any] = {}
    for _ in range(n_fields):
        name = reader.new_name(fields)
        fields[name] = reader.value(reader.number("I"))
    tensors: dict[str, StoredTensor] = {}
    for _ in range(n_tensors):
        name, dimensions = reader.new_name(tensors), reader.number("I")
        if not 1 <= dimensions <= 4:
            raise ValueError(f"the tensor {name} has {dimensions} dimensions, where 1 to 4 are possible")
        shape = tuple(reader.number("Q") for _ in range(dimensions))[::-1]
        kind, offset = reader.number("I"), reader.number("Q")
        if kind not in blocks:
            raise ValueError(f"the tensor {name} has the type {kind}, which does not exist")
        elements, size = blocks[kind]
        if min(shape) < 1 or shape[-1] % elements:
            raise ValueError(f"the tensor {name} is {shape}, which is not a whole number of blocks of {elements}")
        tensors[name] = StoredTensor(shape, kind, offset, shape[-1] // elements * size)
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment}, which is not a power of two")
    begin = -(-reader.position // alignment) * alignment
    tensors = {name: one._replace(start=begin + one.start) for name, one in tensors.items()}
    previous, end = "", 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start < end:  # overlapping tensors would let a small file describe a large model
            raise ValueError(f"the tensors {previous} and {name} overlap")
        previous, end = name, tensor.end
        if end > len(file):
            raise ValueError(f"the tensor {name} ends at byte {end}, the file at {len(file)}")
    return Header(fields, tensors)


class _Reader:
    """Reads one value after the other; reading past the end raises."""

    def __init__(self, file: Any) -> None:
        self.file, self.position, self.items = file, 0, 0

    def take(self, size: int) -> bytes:
        left = len(self.file) - self.position
        if size > left:
            raise ValueError(f"{size} bytes are announced at byte {self.position}, {left} are left")
        self.position += size
        return bytes(self.file[self.position - size : self.position])

    def numbers(self, form: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{form}", self.take(count * struct.calcsize(f"<{form}")))

    def number(self, form: str) -> Any:
        return self.numbers(form, 1)[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def new_name(self, known: Mapping[str, Any]) -> str:
        name = self.text()
        if name in known:
            raise ValueError(f"{name} occurs twice in it")
        return name

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"a field has the type {kind}, which does not exist")
        inner, count = self.number("I"), self.number("Q")
        self.items += count
        if self.items > _MOST_ITEMS:
            raise ValueError(f"its arrays announce {self.items} items, where at most {_MOST_ITEMS} are read")
        if inner in _NUMBERS:
            return list(self.numbers(_NUMBERS[inner], count))
        if inner != _TEXT:
            raise ValueError(f"an array has items of the type {inner}, which are neither numbers nor texts")
        return [self.text() for _ in range(count)]
