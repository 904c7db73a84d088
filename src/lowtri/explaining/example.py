"""Inputs for explain without a trained model: the worked example, or any sentence with random weights.

The worked example is "Write a poem" with the encodings and the seed under which notebooks on masked self-attention show it;
the results agree with the notebooks' in every printed digit.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import DataError
from lowtri.explaining.explanation import Explanation, printable
from lowtri.explaining.steps import explain
from lowtri.masks import Mask
from lowtri.pictures.labels import split
from lowtri.sentences import sentence as sentence_of

SENTENCE = "Write a poem"
SEED = 42
ENCODINGS = [[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]]


def worked(mask: Mask | str = "causal", *, heads: int = 1, head: int | None = None, lang: str = "en") -> Explanation:
    """The worked example. Hidden scores are written -1e9, as the notebooks write them.

    >>> worked()["weights"].value.round(4)
    array([[1.    , 0.    , 0.    ],
           [0.3606, 0.6394, 0.    ],
           [0.0722, 0.032 , 0.8959]])
    """
    return untrained(SENTENCE, mask, heads=heads, head=head, lang=lang)


def untrained(
    sentence: str,
    mask: Mask | str = "causal",
    *,
    encodings: NDArray[Any] | None = None,
    seed: int = SEED,
    heads: int = 1,
    head: int | None = None,
    lang: str = "en",
) -> Explanation:
    """Any sentence, under random weights: the steps are real, what they find is chance, and the note says so.

    Args:
        sentence: cut at spaces, and by characters where its script has none. That of the worked example has its encodings.
        encodings: (N, d_model), a row for each token; random embeddings plus the sinusoidal position if not given.
        seed: draws the weights, and the embeddings.
        lang: the language of the sentences that explain the steps.

    Raises:
        DataError: if the sentence is empty, or the encodings do not have a row for each token.
    """
    tokens, how = tokens_of(sentence)
    if encodings is not None and (encodings.ndim != 2 or len(encodings) != len(tokens)):
        shown = " | ".join(map(printable, tokens))
        raise DataError(
            f"explain: the encodings are {encodings.shape}, but the sentence has {len(tokens)} tokens: {shown}\n"
            f"Fix: a row of numbers for each token, ({len(tokens)}, d_model)."
        )
    cuts = sentence_of(lang, "explain.characters" if "characters" in how else "explain.spaces")
    note = sentence_of(lang, "explain.random", seed=seed, how=cuts)
    hidden = -math.inf
    position = None
    if encodings is not None:
        module, _ = drawn(encodings.shape[1], 0, seed)
    elif tokens == SENTENCE.split() and seed == SEED and heads <= 2:  # two numbers a token: one head, or two
        module, _ = drawn(2, 0, SEED)
        note = sentence_of(lang, "explain.worked")
        hidden = -1e9
        position = _positions(3, 2)
        encodings = np.array(ENCODINGS) - position
    else:
        known = list(dict.fromkeys(tokens))
        module, rows = drawn(2 * heads, len(known), seed)
        encodings = rows[[known.index(token) for token in tokens]]  # the same token, the same embedding
        position = _positions(len(tokens), 2 * heads)
    options: dict[str, Any] = {"position": position, "heads": heads, "head": head, "hidden": hidden, "lang": lang}
    explanation = explain(module, encodings, tokens=tokens, mask=mask, **options)
    # The module holds the weights; its own forward has one head, however many are shown.
    steps = tuple(step for step in explanation.steps if step.name != "own output")
    return replace(explanation, steps=steps, note=note, warning="")


def tokens_of(sentence: str) -> tuple[list[str], str]:
    """The tokens of a sentence, one at least, and how it was cut: :func:`lowtri.pictures.labels.split`."""
    tokens, how = split(sentence)
    if not tokens:
        raise DataError(f'explain: the sentence is empty. Fix: a word at least, as in "{SENTENCE}".')
    return tokens, how


def drawn(width: int, tokens: int, seed: int) -> tuple[Any, NDArray[np.float64]]:
    """A module and as many embeddings (tokens, width), drawn under the seed; torch's own generator stays as it was."""
    import torch

    from lowtri.plain import MaskedSelfAttention

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = MaskedSelfAttention(width)  # first: the worked example's figures are those of the seed itself
        return module, torch.randn(tokens, width, dtype=torch.float64).numpy()


def _positions(n: int, d: int) -> NDArray[np.float64]:
    from lowtri.nn import sinusoidal

    return np.asarray(sinusoidal(n, d), dtype=np.float64)
