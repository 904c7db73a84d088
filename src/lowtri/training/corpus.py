"""The training text of a model: documents, their tokens, the one long row into which they are packed, and the rows of each step.

Tokens are those of byte-level BPE, learned from the text and saved in a file that transformers also reads. Bytes are the smallest
tokens, so any vocabulary can encode any text, and decoding restores it exactly. A vocabulary of size ``BYTES`` has no merges.

Documents are packed end to end, and rows of equal length are cut from the whole, so no token is padding. The document of each
token is stored: the mask of a row is ``mask & documents(ids)``, and no target crosses from one document into the next. The
start of a row does not matter to the model, since rotary embedding depends only on distances.

The rows and settings of a step follow from the recipe, the number of rows and the step's number, so that a run that was killed
continues exactly where it stopped.

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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from lowtri.errors import CallError, DataError
from lowtri.nn.checkpoint import BEGIN, END

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IGNORED = -100  # a target that torch's cross_entropy skips by default


class Document(NamedTuple):
    """One text; its tokens see no other document."""

    name: str
    text: str


class Rows(NamedTuple):
    """A batch cut from the packed tokens, int64, each (B, N)."""

    inputs: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]  # the token that follows each input; IGNORED where a document ends
    documents: npt.NDArray[np.int64]  # which document each input belongs to


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

    ids: npt.NDArray[np.int32]  # (L,)
    documents: npt.NDArray[np.int32]  # (L,), counted from 0

    @classmethod
    def of(cls, token_lists: Iterable[Sequence[int]]) -> Packed:
        """Pack lists of token ids, one list a document."""
        lists = [np.asarray(tokens, dtype=np.int32) for tokens in token_lists]
        documents = np.repeat(np.arange(len(lists), dtype=np.int32), [len(tokens) for tokens in lists])
        return cls(np.concatenate([np.empty(0, np.int32), *lists]), documents)

    def __len__(self) -> int:
        return len(self.ids)

    def count(self, context: int) -> int:
        """How many rows of ``context`` inputs there are; each needs one more token, its last target."""
        return max(0, (len(self.ids) - 1) // context)

    def require(self, context: int) -> None:
        """Raise a DataError if there is not even one row."""
        if not self.count(context):
            raise DataError(
                f"the text has {len(self)} tokens, and one row takes {context + 1}.\nFix: more text, or a smaller context"
            )

    def rows(self, numbers: Sequence[int] | npt.NDArray[np.int64], context: int) -> Rows:
        """The rows with these numbers: row ``i`` starts at token ``i * context``. Every token is a target at most once."""
        index = np.asarray(numbers, dtype=np.int64)[:, None] * context + np.arange(context)  # (B, N)
        documents = self.documents[index]
        targets = np.where(documents == self.documents[index + 1], self.ids[index + 1], IGNORED)
        return Rows(self.ids[index].astype(np.int64), targets.astype(np.int64), documents.astype(np.int64))

    def digest(self) -> str:
        """A hash of the tokens and their documents."""
        return hashlib.sha256(self.ids.tobytes() + self.documents.tobytes()).hexdigest()[:16]


def read_files(paths: Sequence[str | Path]) -> list[Document]:
    """Each file is a document; its text must be UTF-8 and not empty.

    Raises:
        DataError: names the file and what is wrong with it.
    """
    return [Document(str(path), _read(Path(path))) for path in paths]


def _read(path: Path) -> str:
    if path.is_dir():
        raise DataError(f"{path} is a folder.\nFix: name the files in it, for instance {path / '*.txt'}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}.\n"
            "Fix: convert it, for instance with iconv -t utf-8"
        ) from None
    if not text.strip():
        raise DataError(f"{path} has no text in it")
    return text


BYTES = 2 + 256  # the smallest vocabulary: BEGIN, END and the bytes


def check_vocabulary(vocabulary: int) -> None:
    """Raise a DataError if a vocabulary cannot have so few tokens."""
    if vocabulary < BYTES:
        raise DataError(f"vocabulary: got {vocabulary}; at least {BYTES} are needed (256 bytes, begin and end)")


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

    check_vocabulary(vocabulary)
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


# Which rows, and how.


@dataclass(frozen=True)
class Recipe:
    """How to train. Two runs with the same recipe, tokens, machine and thread count give the same weights."""

    steps: int = 1000
    batch: int = 16  # rows in a step
    context: int = 256  # tokens in a row
    lr: float = 1e-3  # the highest learning rate, at the end of the warm-up
    warmup: int = 50  # steps from 0 to lr; at most a tenth of all
    lr_floor: float = 0.1  # the last learning rate, as a share of lr
    weight_decay: float = 0.1  # on matrices; norms have none
    clip: float = 1.0  # the gradient's greatest norm
    held_out: float = 0.05  # share of the rows kept for validation
    validate_every: int = 100  # steps
    save_every: int = 100  # steps
    seed: int = 0
    accumulate: int = 1  # parts of a batch that are computed one after the other, with one update
    dtype: str = "float32"  # or bfloat16, for the computation; weights, moments and sums of gradients stay float32

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "context", "validate_every", "save_every", "accumulate"):
            if getattr(self, name) < 1:
                raise CallError(f"{name}: got {getattr(self, name)}; at least 1 is needed")
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise CallError(f"{name}: got {getattr(self, name)}; a number above 0 is needed")
        if self.dtype not in ("float32", "bfloat16"):
            raise CallError(f"dtype: got {self.dtype!r}; float32 or bfloat16 is needed")
        if not 0 <= self.held_out < 1:
            raise CallError(f"held_out: got {self.held_out}; a share of the rows from 0 to below 1 is needed")

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

    def random_seed(self, step: int, rank: int) -> int:
        """The seed of the random numbers (dropout) that a process draws in a step."""
        return int(np.random.SeedSequence([self.seed, step, rank]).generate_state(1)[0])


def split(rows: int, held_out: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Numbers of the rows to train on, and of those held out.

    Those held out are spread evenly, 64 at most; of two rows or more there is at least one on either side.

    >>> split(10, held_out=0.2)
    (array([0, 1, 3, 4, 5, 6, 8, 9]), array([2, 7]))
    """
    count = min(64, rows - 1, max(1, round(rows * held_out))) if held_out and rows > 1 else 0
    validation = (np.arange(count) * 2 + 1) * rows // (2 * count) if count else np.empty(0, np.int64)
    return np.setdiff1d(np.arange(rows), validation), validation


def rows_of_step(rows: npt.NDArray[np.int64], step: int, recipe: Recipe) -> npt.NDArray[np.int64]:
    """The rows of a step: the next ``batch`` of an endless sequence of shuffled epochs."""
    numbers = np.arange(step * recipe.batch, (step + 1) * recipe.batch)  # (B,)
    epochs, indices = (x.tolist() for x in np.divmod(numbers, len(rows)))
    return rows[[_order(recipe.seed, epoch, len(rows))[index] for epoch, index in zip(epochs, indices, strict=True)]]


@lru_cache(2)  # a step may lie in two epochs; shuffling ten million rows takes most of a second
def _order(seed: int, epoch: int, rows: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(rows)
