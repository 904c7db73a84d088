"""The text of a language: short stories drawn from the lists and patterns of texts/LANGUAGE.json, and their entropy.

The odds of every draw are known, so the loss of the best model that does not look ahead is known, too: the mean of -log p of a
story. A lower loss means that a model read the answer.
"""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import dataclass, field
from pathlib import Path

TEXTS = Path(__file__).parent / "texts"
FIELD = re.compile(r"\{([a-z]+)(\d?)(?:\.(\d))?\}")
Entry = str | list[str]  # a word, or its forms


@dataclass
class Choices:
    """The words that one story has drawn, and the sum of -log p of these draws in nats."""

    lists: dict[str, list[Entry]]
    dice: random.Random
    nats: float = 0.0
    drawn: dict[tuple[str, str], Entry] = field(default_factory=dict)

    def fill(self, match: re.Match[str]) -> str:
        """The word for ``{thing}``, ``{thing.2}`` (another thing) or, in a list of forms, ``{name.1}`` and ``{name2.1}``."""
        name, number, form = match[1], match[2], match[3]
        has_forms = isinstance(self.lists[name][0], list)
        if not has_forms:
            number, form = form or "", None
        if (name, number) not in self.drawn:
            taken = [entry for (other, _), entry in self.drawn.items() if other == name]
            free = [entry for entry in self.lists[name] if entry not in taken]
            self.drawn[name, number] = self.dice.choice(free)
            self.nats += math.log(len(free))
        entry = self.drawn[name, number]
        return entry if isinstance(entry, str) else entry[int(form or 0)]


class Stories:
    """Stories of a language: an opening sentence and one to three others of the same kind."""

    def __init__(self, language: str) -> None:
        content = json.loads((TEXTS / f"{language}.json").read_text(encoding="utf-8"))
        self.lists, self.patterns = content["lists"], content["stories"]
        self.between = content.get("between", " ")

    def draw(self, dice: random.Random) -> tuple[str, float]:
        """A story, and -log of its probability in nats.

        >>> Stories("en").draw(random.Random(0))[0].endswith(".\\n")
        True
        """
        openings, others = dice.choice(self.patterns)
        count = dice.randint(1, 3)
        sentences = [dice.choice(openings), *dice.sample(others, count)]
        choices = Choices(self.lists, dice)
        choices.nats = math.log(len(self.patterns) * len(openings) * 3 * math.perm(len(others), count))
        story = FIELD.sub(choices.fill, self.between.join(sentences)) + "\n"
        return story, choices.nats

    def text(self, length: int, seed: int) -> tuple[str, float]:
        """Stories of together at least ``length`` characters, and their entropy in nats a character."""
        dice, parts, nats, count = random.Random(seed), [], 0.0, 0
        while count < length:
            story, surprise = self.draw(dice)
            parts.append(story)
            nats += surprise
            count += len(story)
        return "".join(parts), nats / count
