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
        ("Do future tokens exist?", "yes: the whole text is there", "no: they are not written yet"),
        (
            "Is a mask needed?",
            "yes",
            "not with a cache of keys and values; yes where the prefix is computed anew, from two layers on",
        ),
        (
            "Why?",
            "all positions are computed at once, and without it position i reads the token that it is to predict",
            "a cache holds the past alone; computed anew without a mask, old tokens see newer ones, and the next layer reads that",
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
        ("What for?", "to keep the future out while all positions are computed at once", "to write, token after token"),
        (
            "Where is it used?",
            "in GPT, and in the decoders of T5, BART and Whisper",
            "the same models when they write; recurrent (RNN, LSTM) language models too",
        ),
        ("Does it hide the future?", "yes, by its mask", "it has none: what is to come is not there yet"),
        (
            "Does it need its own output?",
            "no: in training it reads the true text",
            "yes: each output is the next input",
        ),
        ("How does it run?", "in parallel over the tokens", "one token after the other"),
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
