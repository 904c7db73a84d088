"""How much of a text is made of words, and of neighbouring words, that the training text has too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

__all__ = ["Known", "Shares"]


class Shares(NamedTuple):
    """What was counted in some text, and how much of it is known."""

    counted: int  # words: runs of two letters or more, in small letters
    words: float  # the share of them that the training text has; 0 where there are no words
    pairs: float  # the same for pairs of neighbouring words: their order


@dataclass(frozen=True)
class Known:
    """The words of a training text and its pairs of neighbours.

    >>> known = Known.of(["the cat sat on the mat"])
    >>> known.shares(["... the cat on the sat ..."])     # cat on, the sat: words in an order that the text never has
    Shares(counted=5, words=1.0, pairs=0.5)
    """

    words: frozenset[str]
    pairs: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Known:
        """Read a training text."""
        words: set[str] = set()
        pairs: set[tuple[str, str]] = set()
        for text in texts:
            found = _words(text)
            words.update(found)
            pairs.update(pairwise(found))
        return cls(frozenset(words), frozenset(pairs))

    def shares(self, texts: Iterable[str]) -> Shares:
        """Measure texts; a word that begins or ends one may be cut off, and is not counted."""
        words: list[str] = []
        pairs: list[tuple[str, str]] = []
        for text in texts:
            found = _words(re.sub(r"^[A-Za-z]+|[A-Za-z]+$", "", text))
            words += found
            pairs += pairwise(found)
        return Shares(len(words), _share(words, self.words), _share(pairs, self.pairs))


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]{2,}", text.lower())


def _share(found: Sequence[object], known: Set[object]) -> float:
    return sum(one in known for one in found) / max(1, len(found))
