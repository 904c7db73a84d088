"""FlexAttention's published examples of masks and scores, forward and backward, against torch's formula in float64.

Written from their descriptions. One of them, stick-breaking, is no ``score_mod``: its weights need the sums of other keys' scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from integrations.test_flex import GATE, SLOPES, B, H, N, agree, numbers
from lowtri.integrations.flex.scores import read_score_mod

WIDTH = 15  # of an image of 10 x 15 pixels
LENGTHS = torch.tensor([40, 60, 50])
DOCUMENT = torch.repeat_interleave(torch.arange(3), LENGTHS)
START = (LENGTHS.cumsum(0) - LENGTHS)[DOCUMENT]  # of a token's document
GLOBAL = torch.zeros(N, dtype=torch.bool).index_fill(0, torch.tensor([0, 70]), True)
IMAGE_OF_TOKEN = torch.arange(N) // 50
PAGE = torch.randperm(10, generator=torch.Generator().manual_seed(0))  # logical page of each physical page of 15 slots
ROWS, COLUMNS = numbers(2 * 10), numbers(2 * WIDTH)


def document(b: Any, h: Any, q: Any, k: Any) -> Any:
    return DOCUMENT[q] == DOCUMENT[k]


def prefix_within_documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Positions count from the start of each document."""
    return document(b, h, q, k) & ((q - START[q] >= k - START[k]) | (k - START[k] < 10))


def near_in_an_image(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Neighbourhood attention: a square of 5 x 5 pixels around the query, moved inwards at the borders."""
    row = (q // WIDTH).clamp(2, 10 - 3)
    column = (q % WIDTH).clamp(2, WIDTH - 3)
    return ((row - k // WIDTH).abs() <= 2) & ((column - k % WIDTH).abs() <= 2)


MASKS: dict[str, Callable[..., Any]] = {
    "prefix LM in documents": prefix_within_documents,
    "neighbourhood in two dimensions": near_in_an_image,
    "dilated window": lambda b, h, q, k: (q >= k) & (q - k < 40) & ((q - k) % 4 == 0),
    "sinks and a window": lambda b, h, q, k: (q >= k) & ((q - k < 20) | (k < 4)),
    "global tokens": lambda b, h, q, k: ((q - k).abs() < 12) | GLOBAL[q] | GLOBAL[k],
    "text to its image": lambda b, h, q, k: IMAGE_OF_TOKEN[q] == k // 50,
    "pages": lambda b, h, q, k: q >= PAGE[k // 15] * 15 + k % 15,  # keys lie in pages, in any order
    "halves by row": lambda b, h, q, k: torch.where(b == 0, q // 75 == k // 75, q >= k),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    agree(None, MASKS[name], [])


def checkerboard(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where((q - k).abs() % 2 == 1, s * 0.5, s)


def of_pixels(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Relative positions in two dimensions, one table for each."""
    return s + ROWS[q // WIDTH - k // WIDTH + 10] + COLUMNS[q % WIDTH - k % WIDTH + WIDTH]


SCORES: dict[
    str, tuple[Callable[..., Any], list[Tensor], bool]
] = {  # with captured parameters, and whether kernels run it
    "soft cap and alibi": (lambda s, b, h, q, k: 30 * torch.tanh(s / 30) - SLOPES[h] * (q - k).abs(), [SLOPES], True),
    "temperature": (lambda s, b, h, q, k: s / GATE[0].exp(), [GATE], False),
    "checkerboard": (checkerboard, [], False),
    "two dimensions": (of_pixels, [ROWS, COLUMNS], False),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    score_mod, captured, in_kernel = SCORES[name]
    assert read_score_mod(score_mod, (B, H, N, N), "cpu", torch.float64).in_kernel == in_kernel
    agree(score_mod, MASKS["prefix LM in documents"], captured)
