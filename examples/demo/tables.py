"""The two pairs that are easily confused: training and inference, masked self-attention and an autoregressive model."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

__all__ = ["KIN", "TIMES", "as_text"]

# Each table: a title, the two columns, and for each row a question with its two answers.
Pair = tuple[str, tuple[str, str], tuple[tuple[str, str, str], ...]]

TIMES: Pair = (
    "Training and inference",
    ("training", "inference"),
    (
        ("Do future tokens exist?", "yes: the whole text is there", "no: they are not generated yet"),
        (
            "Is a mask needed?",
            "yes",
            "not with a key/value cache; yes if the prefix is recomputed, from two layers on",
        ),
        (
            "Why?",
            "all positions are computed at once, and without the mask position i reads the token that it must predict",
            "a cache has only earlier tokens; a prefix recomputed without a mask lets old tokens see newer ones",
        ),
    ),
)
KIN: Pair = (
    "Masked self-attention and an autoregressive model",
    ("masked self-attention", "autoregressive model"),
    (
        (
            "What is it?",
            "attention in which token i sees tokens 1 to i",
            "a model that predicts each token from those before it",
        ),
        ("What for?", "to hide later tokens while all positions are computed at once", "to generate, token by token"),
        (
            "Where is it used?",
            "in GPT, and in the decoders of T5, BART and Whisper",
            "the same models when they generate; also recurrent (RNN, LSTM) language models",
        ),
        ("Does it hide the future?", "yes, by its mask", "there is none: later tokens do not exist yet"),
        (
            "Does it need its own output?",
            "no: in training it reads the true text",
            "yes: each output is the next input",
        ),
        ("How does it run?", "in parallel over the tokens", "one token at a time"),
    ),
)


def as_text(pair: Pair, width: int = 100) -> str:
    """The table for a terminal."""
    title, columns, rows = pair
    table = Table(title=title, title_justify="left", show_lines=True)
    for name in ("", *columns):
        table.add_column(name, no_wrap=not name)
    for row in rows:
        table.add_row(*row)
    console = Console(width=width, color_system=None, highlight=False, emoji=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
