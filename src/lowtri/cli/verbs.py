"""The verbs of the command ``lowtri``, and the packages that each needs. Loads nothing, so that it can say what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Verb(NamedTuple):
    """A verb of the command line."""

    file: str  # its function is in lowtri.cli.<file>
    line: str  # its line in `lowtri --help`
    packages: tuple[str, ...] = ()  # it always needs these, besides those of the command line


VERBS = {
    "explain": Verb("learn", "Every step of masked attention for a sentence, with numbers."),
    "mask": Verb("learn", "What a mask shows and hides: a picture, counts, or a file."),
    "generate": Verb("models", "Let a trained model continue a text.", ("torch", "transformers")),
    "audit": Verb("checks", "Does a model use what its mask hides? Every leak, by position."),
    "verify": Verb("checks", "Does a function compute masked attention? Its mistake, by name.", ("torch",)),
    "bench": Verb("machine", "How fast attention is, against torch and the CPU's limit.", ("torch",)),
    "lesson": Verb("learn", "Masked self-attention as an interactive page, in four languages.", ("torch",)),
    "doctor": Verb("machine", "What this machine has, what is missing, and what follows."),
}
COMMAND_LINE = ("typer", "rich")  # what every verb needs
_OF_OPTIONS = {"--threads": ("torch",), "--model": ("torch", "transformers")}


def packages_for(arguments: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """What is called, and every package that it needs besides NumPy.

    >>> packages_for(["generate", "smollm2", "hello"])
    ('lowtri generate', ('typer', 'rich', 'torch', 'transformers'))
    >>> packages_for(["mask", "causal"])
    ('the command lowtri', ('typer', 'rich'))
    """
    verb = VERBS.get(arguments[0]) if arguments else None
    more = () if verb is None else verb.packages
    for word in arguments:
        more += _OF_OPTIONS.get(word.partition("=")[0], ())
    if not more or "--help" in arguments:
        return "the command lowtri", COMMAND_LINE
    return f"lowtri {arguments[0]}", tuple(dict.fromkeys((*COMMAND_LINE, *more)))
