"""Converts the tokenizer of a GGUF file to one of the ``tokenizers`` library.

    tokenizer.ggml.model gpt2    byte-level BPE with a list of merges; tokenizer.ggml.pre names the pre-tokenizer
    tokenizer.ggml.model llama   SentencePiece BPE: spaces as U+2581, byte fallback, merges by score

The pre-tokenizers are those with which the models were published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtri.errors import DataError
from lowtri.nn.tokenizer import guarded

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["tokenizer_of"]

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
        raise DataError(f"{path}: tokenizer.ggml.model {kind!r:.60} came, lowtri reads gpt2 and llama")
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
        raise DataError(f"{path}: tokenizer.ggml.pre {pre!r:.60} came, lowtri knows {', '.join(_PATTERNS)}")
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
