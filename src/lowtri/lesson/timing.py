"""The times of the four ways to write causal attention, on this machine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

HEADS, TOKENS, SIZE = 8, 512, 64


def times(tokens: int = TOKENS, rounds: int = 9) -> tuple[dict[str, float], float]:
    """Median milliseconds of each form, forward, float32, and the greatest difference between their outputs.

    The forms run by turns, so that other programs disturb all of them alike.

    >>> sorted(times(tokens=16, rounds=1)[0])
    ['additive', 'boolean', 'fused', 'lowtri']
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from lowtri.benching.timing import in_turns, seconds_of
    from lowtri.dispatch.attend import attention

    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, tokens, SIZE, generator=generator)  # (1, H, N, D) each
    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    added = torch.zeros(tokens, tokens).masked_fill(~visible, -math.inf)
    scale = SIZE**-0.5
    forms: dict[str, Callable[[], Tensor]] = {
        "additive": lambda: torch.softmax(q @ k.mT * scale + added, -1) @ v,
        "boolean": lambda: torch.softmax((q @ k.mT * scale).masked_fill(~visible, -math.inf), -1) @ v,
        "fused": lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
        "lowtri": lambda: attention(q, k, v, "causal"),
    }
    with torch.no_grad():
        outputs = [form() for form in forms.values()]  # the first call of lowtri may compile
        seconds = in_turns({name: partial(seconds_of, form) for name, form in forms.items()}, rounds, 0)
    difference = max(float((output - outputs[0]).abs().max()) for output in outputs[1:])
    return {name: 1000 * statistics.median(values) for name, values in seconds.items()}, difference
