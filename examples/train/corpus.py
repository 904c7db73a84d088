"""What a training run reads: the tokens of texts, the one long row into which documents are packed, and the recipe of its steps.

Documents are packed end to end, and rows of equal length are cut from the whole, so no token is padding. The document of each token
is stored: the mask of a row is ``mask & documents(ids)``, and no target crosses from one document into the next.

Sources: Sennrich et al. 2016 (byte-pair encoding), Radford et al. 2019 (on bytes); Loshchilov and Hutter 2017 (cosine); Goyal et al.
2017 (warm-up).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BEGIN, END = "<|begin|>", "<|end|>"  # the tokens around a document
BYTES = 2 + 256  # the smallest vocabulary: BEGIN, END and the bytes
IGNORED = -100  # a target that torch's cross_entropy leaves out by default


class Rows(NamedTuple):
    """A batch cut from the packed tokens, int64, each (B, N)."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]  # the token that follows each input; IGNORED where a document ends
    documents: NDArray[np.int64]  # which document each input belongs to

    @property
    def predicted(self) -> int:
        """How many targets there are; at least 1, to divide by."""
        return max(1, int((self.targets != IGNORED).sum()))

    def share(self, number: int, groups: int) -> Rows:
        """The rows of one of several groups of processes.

        Every process takes part in the collectives of a forward: a group that gets no rows computes one that counts for nothing.
        """
        mine = Rows(*(part[number::groups] for part in self))
        if len(mine.inputs):
            return mine
        return Rows(self.inputs[:1], np.full_like(self.targets[:1], IGNORED), self.documents[:1])


@dataclass(frozen=True)
class Packed:
    """Documents as tokens, end to end.

    >>> packed = Packed.of([[1, 5, 6], [1, 7]])
    >>> rows = packed.rows([0], context=4)
    >>> rows.inputs
    array([[1, 5, 6, 1]])
    >>> rows.targets                                  # what follows 6 belongs to another document
    array([[   5,    6, -100,    7]])
    >>> rows.documents
    array([[0, 0, 0, 1]])
    """

    ids: NDArray[np.int32]  # (L,)
    documents: NDArray[np.int32]  # (L,), counted from 0

    @classmethod
    def of(cls, token_lists: Iterable[Sequence[int]]) -> Packed:
        """Pack lists of token ids, one list a document."""
        lists = [np.asarray(tokens, dtype=np.int32) for tokens in token_lists]
        documents = np.repeat(np.arange(len(lists), dtype=np.int32), [len(tokens) for tokens in lists])
        return cls(np.concatenate([np.empty(0, np.int32), *lists]), documents)

    def count(self, context: int) -> int:
        """How many rows of ``context`` inputs there are; each needs one more token, its last target."""
        return max(0, (len(self.ids) - 1) // context)

    def require(self, context: int) -> None:
        """Raise a DataError if there is not even one row."""
        if not self.count(context):
            raise DataError(
                f"the text has {len(self.ids)} tokens, and one row takes {context + 1}.\n"
                "Fix: more text, or a smaller context"
            )

    def rows(self, numbers: Sequence[int] | NDArray[np.int64], context: int) -> Rows:
        """The rows with these numbers: row ``i`` starts at token ``i * context``. Every token is a target at most once."""
        index = np.asarray(numbers, dtype=np.int64)[:, None] * context + np.arange(context)  # (B, N)
        documents = self.documents[index]
        targets = np.where(documents == self.documents[index + 1], self.ids[index + 1], IGNORED)
        return Rows(self.ids[index].astype(np.int64), targets.astype(np.int64), documents.astype(np.int64))

    def digest(self) -> str:
        """A hash of the tokens and their documents."""
        return hashlib.sha256(self.ids.tobytes() + self.documents.tobytes()).hexdigest()[:16]


def read_corpus(paths: Iterable[str | Path], vocabulary: int = BYTES) -> tuple[Tokenizer, Packed]:
    """Learn a tokenizer from text files, and pack them, a document a file.

    Raises:
        DataError: names the file that cannot be read, or is not UTF-8.
    """
    texts = []
    for path in paths:
        try:
            texts.append(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read: {error}.\nFix: a file of UTF-8 text") from None
    tokenizer = learn(texts, vocabulary)
    return tokenizer, Packed.of(encode_document(tokenizer, text) for text in texts)


def learn(texts: Iterable[str], vocabulary: int = BYTES) -> Tokenizer:
    """Learn a byte-level BPE vocabulary from texts. Any vocabulary can encode any text, and decoding restores it exactly.

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
        raise DataError(f"vocabulary: got {vocabulary}; at least {BYTES} are needed (256 bytes, begin and end)")
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
    end: Any = tokenizer.token_to_id(END)
    return [*tokenizer.encode(text).ids, end]


def split(rows: int, held_out: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of the rows to train on, and of those held out.

    Those held out are spread evenly, 64 at most; of two rows or more there is at least one on either side.

    >>> split(10, held_out=0.2)
    (array([0, 1, 3, 4, 5, 6, 8, 9]), array([2, 7]))
    """
    count = min(64, rows - 1, max(1, round(rows * held_out))) if held_out and rows > 1 else 0
    validation = (np.arange(count) * 2 + 1) * rows // (2 * count) if count else np.empty(0, np.int64)
    return np.setdiff1d(np.arange(rows), validation), validation


@dataclass(frozen=True)
class Recipe:
    """How to train. Two runs with the same recipe, tokens, machine and number of processes give the same weights."""

    steps: int = 1000
    batch: int = 16  # rows in a step
    context: int = 256  # tokens in a row
    lr: float = 1e-3  # the highest learning rate, at the end of the warm-up
    warmup: int = 50  # steps from 0 to lr; at most a tenth of all
    lr_floor: float = 0.1  # the last learning rate, as a share of lr
    weight_decay: float = 0.1  # on matrices; norms and biases have none
    clip: float = 1.0  # the gradient's greatest norm
    held_out: float = 0.05  # share of the rows kept for validation
    every: int = 100  # steps between two validations, each with a checkpoint
    seed: int = 0
    bf16: bool = False  # compute in bfloat16; weights, moments and losses stay float32

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0: a straight line up, then half a cosine down to the floor.

        >>> recipe = Recipe(steps=100, lr=1.0)
        >>> [round(recipe.lr_at(step), 3) for step in (0, 9, 10, 55, 99)]
        [0.1, 1.0, 1.0, 0.542, 0.1]
        """
        warmup = min(self.warmup, self.steps // 10)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        done = (step - warmup) / max(1, self.steps - 1 - warmup)
        return self.lr * (self.lr_floor + (1 - self.lr_floor) * (1 + math.cos(math.pi * done)) / 2)

    def seed_at(self, step: int, rank: int) -> int:
        """The seed of the random numbers (dropout) that a process draws in a step: the same after a resume."""
        return int(np.random.SeedSequence([self.seed, step, rank]).generate_state(1)[0])


def rows_of_step(rows: NDArray[np.int64], step: int, recipe: Recipe) -> NDArray[np.int64]:
    """The rows of a step: the next ``recipe.batch`` of an endless sequence of shuffled epochs.

    They follow from the seed and the step alone, so a run that was killed goes on with the rows that it would have had.
    """
    numbers = np.arange(step * recipe.batch, (step + 1) * recipe.batch)  # (B,)
    epochs, indices = np.divmod(numbers, len(rows))
    places = [_order(recipe.seed, int(epoch), len(rows))[index] for epoch, index in zip(epochs, indices, strict=True)]
    return rows[places]


@lru_cache(2)  # a step may lie in two epochs; shuffling ten million rows takes most of a second
def _order(seed: int, epoch: int, rows: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(rows)
