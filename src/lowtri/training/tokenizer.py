"""Text to tokens and back: byte-level BPE, learned from the training text and saved in a file that transformers also reads.

Bytes are the smallest tokens, so any vocabulary can encode any text, and decoding restores it exactly. A vocabulary of size
``BYTES`` has no merges: each byte is a token.
Source: Sennrich et al. 2016 (byte-pair encoding), Radford et al. 2019 (on bytes).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lowtri.errors import DataError
from lowtri.nn.checkpoint import BEGIN, END

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["BYTES", "encode_document", "learn"]

BYTES = 2 + 256  # the smallest vocabulary: BEGIN, END and the bytes


def learn(texts: Iterable[str], vocabulary: int = BYTES) -> Tokenizer:
    """Learn a byte-level BPE vocabulary from texts.

    Encoding puts ``BEGIN`` in front, as Llama's tokenizer does; ``encode(text, add_special_tokens=False)`` does not.

    >>> tokenizer = learn(["abc"])
    >>> ids = tokenizer.encode("añ").ids
    >>> len(ids), ids[0], tokenizer.decode(ids)
    (4, 0, 'añ')

    Args:
        vocabulary: how many tokens at most, ``BYTES`` or more. A short text gives fewer: what occurs once is not merged.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    if vocabulary < BYTES:
        raise DataError(f"vocabulary: {vocabulary} came, at least {BYTES} are needed (256 bytes, begin and end)")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BEGIN, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


def encode_document(tokenizer: Tokenizer, text: str) -> list[int]:
    """A whole document as training sees it: BEGIN, the text, END.

    >>> tokenizer = learn(["abc"])
    >>> encode_document(tokenizer, "a")
    [0, 66, 1]
    """
    end = tokenizer.token_to_id(END)
    return [*tokenizer.encode(text).ids, *([] if end is None else [end])]
