"""What was asked of lowtri: worked numbers, forms, sentences and tables, which the tour and the tests share."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import lowtri
from lowtri import plain

__all__ = [
    "ENCODINGS",
    "FIGURES",
    "FOUR_DIGITS",
    "HIDDEN",
    "KIN",
    "LAST_DIGIT",
    "OUTPUT",
    "SCORES",
    "SENTENCES",
    "TIMES",
    "UNMASKED",
    "VALUES",
    "WEIGHTS",
    "Pair",
    "causal_forms",
    "token_by_token",
    "token_table",
]

# The plain module under seed 42 reads "Write a poem": every step, printed to four digits.
ENCODINGS = [[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]]
HIDDEN = [[False, True, True], [False, False, True], [False, False, False]]
FIGURES: dict[str, list[list[float]]] = {
    "W_q^T": [[0.5406, -0.1657], [0.5869, 0.6496]],
    "W_k^T": [[-0.1549, -0.3443], [0.1427, 0.4153]],
    "W_v^T": [[0.6233, 0.6146], [-0.5188, 0.1323]],
    "q": [[0.7621, -0.0428], [1.1063, 0.7890], [1.1164, -2.1336]],
    "k": [[-0.1469, -0.3038], [0.1057, 0.3685], [-0.9914, -2.4152]],
    "v": [[0.6038, 0.7434], [-0.3502, 0.5303], [3.8695, 2.4246]],
    "scores": [[-0.0990, 0.0648, -0.6523], [-0.4022, 0.4078, -3.0024], [0.4842, -0.6683, 4.0461]],
    "scaled": [[-0.0700, 0.0458, -0.4612], [-0.2844, 0.2883, -2.1230], [0.3424, -0.4725, 2.8610]],
    "masked": [[-0.0700, -1e9, -1e9], [-0.2844, 0.2883, -1e9], [0.3424, -0.4725, 2.8610]],
    "weights": [[1, 0, 0], [0.3606, 0.6394, 0], [0.0722, 0.0320, 0.8959]],
    "output": [[0.6038, 0.7434], [-0.0062, 0.6072], [3.4989, 2.2427]],
}
UNMASKED = {
    "weights": [[0.3573, 0.4011, 0.2416], [0.3410, 0.6047, 0.0542], [0.0722, 0.0320, 0.8959]],
    "output": [[1.0100, 1.0641], [0.2040, 0.7057], [3.4989, 2.2427]],
}
FOUR_DIGITS = 6e-5

# The NumPy form for four tokens, printed to eight digits; the last one is off by one in three places.
SCORES = np.array(
    [
        [0.50390039, 0.5365974, 0.41871129, 0.81252469],
        [0.84036985, 0.86761153, 0.80269944, 0.87209218],
        [0.69733857, 0.93032391, 0.81018176, 0.74386275],
        [0.41280469, 0.59346427, 0.12186543, 0.97038267],
    ]
)
VALUES = np.array(
    [
        [0.74636963, 0.87301979, 0.14951819, 0.45018703],
        [0.64471524, 0.95888822, 0.22731667, 0.93179853],
        [0.54371212, 0.97139524, 0.2648877, 0.74728867],
        [0.76782001, 0.01404621, 0.1735202, 0.56182687],
    ]
)
WEIGHTS = np.array(
    [
        [1, 0, 0, 0],
        [0.49319, 0.50681, 0, 0],
        [0.29569882, 0.37327924, 0.33102193, 0],
        [0.21312847, 0.25532945, 0.15932655, 0.37221554],
    ]
)
OUTPUT = np.array(
    [
        [0.74636963, 0.87301979, 0.14951819, 0.45018703],
        [0.69485017, 0.91653877, 0.18894724, 0.69427255],
        [0.64134007, 0.93763712, 0.21674859, 0.72830976],
        [0.69610971, 0.59089504, 0.19669778, 0.66204689],
    ]
)
LAST_DIGIT = 2e-8

SENTENCES = ("The black cat <end>", "I love Machine Learning", "I love NLP")


def token_table(mask: lowtri.Mask | str, sentence: str) -> list[list[str]]:
    """The words of each line of the table of tokens, ticks for what a token sees and crosses for the rest.

    >>> for line in token_table("causal", "I love NLP"):
    ...     print(*line)
    I love NLP
    I ✓ ✗ ✗
    love ✓ ✓ ✗
    NLP ✓ ✓ ✓
    """
    tokens = sentence.split()
    drawn = lowtri.mask(mask).draw(len(tokens), tokens=tokens, ticks=True)
    return [line.split() for line in drawn.splitlines()]


def causal_forms(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """The same causal attention in every form that notebooks show, by torch and by lowtri; q, k, v (B, H, N, D)."""
    n, scale = q.shape[2], 1 / math.sqrt(q.shape[3])
    visible = plain.create_causal_mask_bool(n, device="cpu")
    arrays = (q.numpy(), k.numpy(), v.numpy())
    finite = torch.from_numpy(plain.make_causal_mask(n)).float()
    added = plain.create_causal_mask(n, device="cpu")
    return {
        "plain, -1e9 added (NumPy)": lambda: plain.masked_self_attention(*arrays, plain.make_causal_mask(n))[0],
        "plain, -1e9 added": lambda: plain.masked_self_attention(q, k, v, finite)[0],
        "plain, -inf added": lambda: plain.masked_self_attention(q, k, v, added)[0],
        "plain, boolean, True = attend": lambda: plain.masked_attention_bool(q @ k.mT * scale, visible) @ v,
        "masked_fill": lambda: torch.softmax((q @ k.mT * scale).masked_fill(~visible, -torch.inf), dim=-1) @ v,
        "torch SDPA, boolean table": lambda: sdpa(q, k, v, attn_mask=visible),
        "torch SDPA, is_causal": lambda: sdpa(q, k, v, is_causal=True),
        'lowtri.attention(q, k, v, "causal")': lambda: lowtri.attention(q, k, v, "causal"),
        "lowtri, NumPy in and out": lambda: lowtri.attention(*arrays, "causal"),
        "lowtri with torch's signature": lambda: lowtri.scaled_dot_product_attention(q, k, v, is_causal=True),
        "lowtri, token by token with a cache": lambda: token_by_token(lowtri.KVCache("causal", capacity=n), q, k, v),
    }


def token_by_token(cache: lowtri.KVCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Outputs (B, H, N, D): each token joins the cache and attends to it."""
    outputs = [cache.attend(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1]) for t in range(q.shape[2])]
    return torch.cat(outputs, dim=2)


# Two pairs that are easily confused: a title, the two columns, and for each row a question with its two answers.
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
