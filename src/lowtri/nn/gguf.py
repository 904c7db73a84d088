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
import json
import mmap
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lowtri.errors import DataError, LowtriError
from lowtri.nn.config import DecoderConfig, GPT2Config, check_sizes
from lowtri.nn.files import brief, guarded
from lowtri.nn.gguf_header import StoredTensor, read_header
from lowtri.nn.hf_config import GPT2_KEYS, from_json, to_conv1d
from lowtri.nn.layers import GPT2Body, LlamaBody
from lowtri.nn.positions import RopeScaling, from_pairs, rotary_frequencies
from lowtri.system import cache_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

__all__ = ["config_of", "converted", "is_gguf", "tensor_names", "tokenizer_of"]


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


def config_of(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: Path) -> dict[str, Any]:
    """The content of config.json, from the metadata fields and the tensor shapes (in NumPy's order).

    Raises:
        DataError: for another architecture, or a field that the Decoder does not support.
    """
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
    config: dict[str, Any] = {_SIZES[key]: value for key, value in own.items() if key in _SIZES}
    heads = config.get("num_attention_heads", 1)
    config |= {
        "model_type": kind,
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "eos_token_id": _end_ids(fields),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "architectures": ["GPT2LMHeadModel" if kind == "gpt2" else f"{kind.capitalize()}ForCausalLM"],
    }
    config.setdefault("num_key_value_heads", heads)
    if kind == "gpt2":
        names = {ours: theirs for theirs, ours in GPT2_KEYS.items()}
        return {names.get(key, key): value for key, value in config.items()} | {"activation_function": "gelu_new"}
    config.setdefault("head_dim", config.get("hidden_size", 0) // max(1, heads))
    config.setdefault("rope_theta", 10000.0)
    config["hidden_act"] = "silu"
    if kind in ("llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if kind == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, config["head_dim"]) != config["head_dim"]:
            raise DataError(
                f"{path}: got {kind}.{key} {own[key]}; lowtri's Decoder has the head size {config['head_dim']} only"
            )
    scaling = own.get("rope.scaling.type", "none")
    if scaling == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": own["rope.scaling.factor"]}
    elif scaling != "none":
        raise DataError(f"{path}: got {kind}.rope.scaling.type {scaling!r}; lowtri's Decoder has none and linear")
    window = own.get("attention.sliding_window")
    if window and kind == "llama":
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    elif window:
        config |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    return config


def tensor_names(config: DecoderConfig, architecture: str) -> dict[str, str]:
    """For each tensor of such a model, its name in a GGUF file, and in model.safetensors."""
    import gguf

    with torch.device("meta"):
        body = GPT2Body(config) if isinstance(config, GPT2Config) else LlamaBody(config)
        weights = {f"model.{name}": weight for name, weight in body.state_dict().items()}
        names = [*(to_conv1d(weights) if isinstance(config, GPT2Config) else weights), "lm_head.weight"]
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table: Any = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    return {table.get_name(name, (".weight", ".bias")): name for name in names}


def _end_ids(fields: Mapping[str, Any]) -> int | list[int] | None:
    """End-of-text and, if different, end-of-turn token ids."""
    ids = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    ends = list(dict.fromkeys(index for index in ids if index is not None))
    return ends[0] if len(ends) == 1 else ends or None


_MOST_WORK = 2**28  # the sum of squared lengths; of 128,000 tokens with 10 characters each it is 13 million
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # values of tokenizer.ggml.token_type

# Pre-tokenizer patterns: contractions, words, numbers, punctuation, white space.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    "gpt-2": None,  # None: the default pattern of ByteLevel
    "gpt2": None,
    "smollm": None,
    "qwen2": _WORDS + r"\p{N}" + _REST,
    "llama-bpe": _WORDS + r"\p{N}{1,3}" + _REST,
    "llama3": _WORDS + r"\p{N}{1,3}" + _REST,
}
_SINGLE_DIGITS = ("smollm",)
_NFC = ("qwen2",)  # texts are normalised to NFC first


def tokenizer_of(fields: Mapping[str, Any], path: Path) -> tuple[Tokenizer | None, dict[str, Any]]:
    """The tokenizer (None if the file has none) and the content of tokenizer_config.json.

    Raises:
        DataError: for an unknown kind of tokenizer or pre-tokenizer.
    """
    kind = fields.get("tokenizer.ggml.model", "none")
    if kind == "none":
        return None, {}
    if kind not in ("gpt2", "llama"):
        raise DataError(f"{path}: got tokenizer.ggml.model {kind!r:.60}; lowtri reads gpt2 and llama")
    return guarded(f"{path}: its tokenizer is damaged", lambda: _build(fields, kind, path))


def _build(fields: Mapping[str, Any], kind: str, path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    tokens = _texts(fields, "tokens", path)
    tokenizer = _byte_level(fields, tokens, path) if kind == "gpt2" else _sentence_piece(fields, tokens, path)
    _add_special(tokenizer, tokens, fields.get("tokenizer.ggml.token_type", ()))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, ggml_name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = fields.get(f"tokenizer.ggml.{ggml_name}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            config[f"{name}_token"] = tokens[index]
    _prepend_begin(tokenizer, fields, config, default=kind == "llama")
    return tokenizer, config


def _texts(fields: Mapping[str, Any], name: str, path: Path) -> list[str]:
    """A list of texts, with a limit on the work of splitting each in every way."""
    texts = fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{path}: tokenizer.ggml.{name} is not a list of texts")
    if sum(len(text) ** 2 for text in texts) > _MOST_WORK:
        raise DataError(f"{path}: tokenizer.ggml.{name} has texts of up to {max(map(len, texts))} characters")
    return texts


def _byte_level(fields: Mapping[str, Any], tokens: Sequence[str], path: Path) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = fields.get("tokenizer.ggml.pre", "gpt-2")
    if not isinstance(pre, str) or pre not in _PATTERNS:
        raise DataError(f"{path}: got tokenizer.ggml.pre {pre!r:.60}; lowtri knows {', '.join(_PATTERNS)}")
    merges: list[Any] = [tuple(merge.split(" ", 1)) for merge in _texts(fields, "merges", path)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in ("llama-bpe", "llama3")))
    pattern, level = _PATTERNS[pre], pre_tokenizers.ByteLevel
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre in _SINGLE_DIGITS else []
    if pattern is None:
        steps.append(level(add_prefix_space=False))
    else:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
        steps.append(level(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(fields: Mapping[str, Any], tokens: Sequence[str], path: Path) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = fields.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) < len(tokens):
        raise DataError(f"{path}: tokenizer.ggml.scores has no score for each of the {len(tokens)} tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = fields.get("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        vocabulary,
        _merges_by_score(vocabulary, scores),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefixed = fields.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence(
        ([normalizers.Prepend("▁")] if prefixed else []) + [normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def _merges_by_score(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose merged token has the greatest score; as a list of merges, greatest first."""
    merges = []
    for token, index in vocabulary.items():
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _add_special(tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Add control tokens (special, not decoded) and user-defined tokens."""
    from tokenizers import AddedToken

    pairs = list(zip(tokens, kinds, strict=False))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in pairs if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t, k in pairs if k == _USER_DEFINED])


def _prepend_begin(tokenizer: Tokenizer, fields: Mapping[str, Any], config: Mapping[str, Any], default: bool) -> None:
    """Prepend the begin token if the file says so."""
    from tokenizers import processors

    begin = config.get("bos_token")
    if begin is not None and fields.get("tokenizer.ggml.add_bos_token", default):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
