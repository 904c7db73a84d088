"""The configurations of the models, with the names of Llama's ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from lowtri.errors import CallError, DataError
from lowtri.masks import Mask, as_mask
from lowtri.nn.positions import RopeScaling

CELLS = ("lstm", "gru", "rnn")  # of a RecurrentLM


@dataclass(frozen=True)
class DecoderConfig:
    """The configuration of a :class:`~lowtri.nn.Decoder`.

    >>> from lowtri.nn import DecoderConfig
    >>> config = DecoderConfig(vocab_size=1000, hidden_size=96, num_attention_heads=4)
    >>> config.head_dim, config.num_key_value_heads, config.intermediate_size
    (24, 4, 256)

    Args:
        vocab_size: number of tokens in the vocabulary.
        hidden_size: size of the hidden states.
        intermediate_size: width of the feed-forward layer; default 8/3 of ``hidden_size``, rounded up to a multiple of 64.
        num_hidden_layers: number of layers.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key/value heads, a divisor of the query heads; default: the same number.
        head_dim: the size of a head, an even number; default ``hidden_size // num_attention_heads``.
        max_position_embeddings: context length, in tokens.
        rms_norm_eps: epsilon of RMSNorm.
        rope_theta: the base of rotary embedding.
        tie_word_embeddings: whether the output projection shares the embedding's weights.
        mask: the mask as text; Llama's config.json has no such key.
        rope_scaling: scaled rotary frequencies for a longer context (Llama 3.1).
        rope_layers: for each layer, whether it has rotary embedding (SmolLM3); None: all do.
        qkv_bias, o_bias, mlp_bias: whether the projections of queries, keys and values (Qwen2), the output projection of
            the attention, and the feed-forward layer have biases.
        qk_norm: whether queries and keys have an RMSNorm per head before rotary embedding (Qwen3).
        eos_token_id: end-of-sequence tokens.

    Raises:
        CallError: if the sizes do not fit together.
        MaskError: if the mask's text is invalid.
    """

    vocab_size: int
    hidden_size: int = 256
    # None is replaced by the default below, so that readers always find a number.
    intermediate_size: int = None  # type: ignore[assignment]
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    mask: str = "causal"
    rope_scaling: RopeScaling | None = None
    rope_layers: tuple[bool, ...] | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_id: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_types("DecoderConfig", self)
        defaults = {
            "num_key_value_heads": self.num_attention_heads,
            "intermediate_size": -(-8 * self.hidden_size // 3 // 64) * 64,
        }
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)  # the dataclass is frozen for its users
        sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads")
        size = head_size("DecoderConfig", self.head_dim, True, {name: getattr(self, name) for name in sizes})
        object.__setattr__(self, "head_dim", size)
        if not self.rms_norm_eps >= 0 or not self.rope_theta > 0:
            raise CallError(
                f"DecoderConfig: rms_norm_eps is {self.rms_norm_eps} and rope_theta {self.rope_theta}; "
                "the first is at least 0, the second above 0."
            )
        if self.rope_layers is not None and len(self.rope_layers) != self.num_hidden_layers:
            raise CallError(
                f"DecoderConfig: rope_layers has {len(self.rope_layers)} entries, but there are "
                f"{self.num_hidden_layers} layers. Fix: one bool for each layer."
            )
        mask = as_mask(self.mask)
        if isinstance(self.mask, Mask):  # stored as text, so that the config can be saved
            object.__setattr__(self, "mask", repr(mask))
            as_mask(self.mask)
        if mask.batch and (mask.batch[0] != 1 or mask.batch[1:] not in ((), (self.num_attention_heads,))):
            raise CallError(
                f"DecoderConfig: mask {self.mask} has batch {mask.batch}, but a model has {self.num_attention_heads} "
                "heads, and one mask for all rows."
            )


class GPT2Config(DecoderConfig):
    """The sizes of a GPT-2, under the names of :class:`DecoderConfig`; ``rms_norm_eps`` is LayerNorm's epsilon."""


@dataclass(frozen=True)
class RecurrentConfig:
    """The configuration of a :class:`~lowtri.nn.RecurrentLM`.

    Args:
        vocab_size: number of tokens in the vocabulary.
        hidden_size: size of the hidden states, and of the embedding.
        num_hidden_layers: number of recurrent layers.
        cell: ``"lstm"``, ``"gru"`` or ``"rnn"``.
        tie_word_embeddings: whether the output projection shares the embedding's weights.
        mask: always ``"causal"``.

    Raises:
        CallError: if a value does not fit.
    """

    vocab_size: int
    hidden_size: int = 256
    num_hidden_layers: int = 2
    cell: str = "lstm"
    tie_word_embeddings: bool = False
    mask: str = "causal"

    def __post_init__(self) -> None:
        if not isinstance(self.cell, str) or self.cell not in CELLS:
            raise CallError(f"RecurrentLM: cell is {self.cell!r:.60}; expected one of {', '.join(CELLS)}.")
        _check_types("RecurrentLM", self)
        if self.mask != "causal":
            raise CallError(
                f"RecurrentLM: mask is {self.mask!r:.60}, but a recurrent model is causal.\n"
                "Fix: a Decoder for any other mask; for packed documents, pass mask= or positions= to the call."
            )


MOST = 2**31
"""Above any size of a model; torch's own errors for greater ones name neither the argument nor what is wrong."""


def check_size(owner: str, name: str, value: Any, least: int = 1) -> None:
    """Raise unless a size is a whole number from ``least`` to 2**31."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
        raise CallError(f"{owner}: {name} is {value!r:.60}; expected a whole number from {least} to 2**31.")


def head_size(owner: str, given: int | None, rotary: bool, sizes: Mapping[str, int]) -> int:
    """The size of a head: ``given``, or the width divided by the heads. ``sizes`` are width, heads and key/value heads."""
    width, heads, kv_heads = sizes
    d, count, kv_count = sizes.values()
    for name, value in sizes.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value > MOST:
            check_size(owner, name, value)
    if given is not None and not isinstance(given, Integral):
        check_size(owner, "head_dim", given)
    wrong = ""
    if min(d, count, kv_count) < 1:
        wrong = f"{width} {d}, {heads} {count}, {kv_heads} {kv_count}"
    elif count % kv_count:
        wrong = f"{heads} {count} is not a multiple of {kv_heads} {kv_count}"
    if wrong:
        raise CallError(
            f"{owner}: {wrong}: each key/value head serves an equal number of query heads.\n"
            f"Fix: sizes of at least 1, {heads} a multiple of {kv_heads}."
        )
    if given is None and d % count:
        raise CallError(
            f"{owner}: {width} {d} is not a multiple of {heads} {count}. Fix: change one of them, or pass head_dim=."
        )
    size = d // count if given is None else given
    if rotary and size % 2:
        raise CallError(
            f"{owner}: head_dim is {size}, but rotary embedding rotates entries in pairs. Fix: an even head_dim."
        )
    return size


_MOST_LAYERS = 2**16


def _check_types(owner: str, config: Any) -> None:
    """Sizes are whole numbers from 1, flags are True or False, the rest are numbers; None stands for the default."""
    for field in fields(config):
        value = getattr(config, field.name)
        expected = None
        if field.type == "int" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            expected = "a whole number, at least 1"
        elif field.type == "int" and value > (_MOST_LAYERS if "layers" in field.name else MOST):
            expected = "a size of a model, at most 2**31, or a number of layers, at most 65,536"
        elif field.type == "bool" and not isinstance(value, bool):
            expected = "True or False"
        elif field.type == "float":
            expected = "a number"
            if isinstance(value, int | float):
                with suppress(OverflowError):
                    object.__setattr__(config, field.name, float(value))  # torch takes no huge whole numbers
                    expected = None
        if expected is not None and not (value is None and field.default is None):
            raise CallError(f"{owner}: {field.name} is {value!r:.60}; it is {expected}.")


def check_sizes(config: Any, shapes: Mapping[str, tuple[int, ...]], where: Any) -> None:
    """Check sizes against the weights (shapes by name) of the folder or file ``where``, before any memory is allocated.

    Every size is a dimension of some weight, and every layer has weights, so none can exceed the number of all elements, or
    of tensors. The shapes are compared one by one later.
    """
    names = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads")
    most = dict.fromkeys(names, sum(map(math.prod, shapes.values()))) | {"num_hidden_layers": len(shapes)}
    for name, limit in most.items():
        value = getattr(config, name, 0)
        if value > limit:
            raise DataError(
                f"{where}: config and weights do not fit together: {name} is {value!r:.30},\n"
                f"  and the weights are {len(shapes)} tensors of {most['vocab_size']} numbers in all"
            )


def check_not_set(model: Any, name: str, fixes: Mapping[str, str]) -> None:
    """Refuse to replace an attribute from which the layers were built; ``fixes`` says for each what to do instead."""
    if name in fixes and name in vars(model):
        raise CallError(
            f"{type(model).__name__}: {name} is what the model was built from; set now, it would not reach the layers.\n"
            f"Fix: {fixes[name]}"
        )
