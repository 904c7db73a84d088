"""Well-known mistakes of attention kernels: each gives the changes of a right call, field by field, that make it wrong.

A mistake that can be made in several ways has several entries; one that a call cannot show changes nothing or gives none. To add
one, write a line here: its name is what :func:`lowtri.verify` prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowtri.verifying.definition import Problem

Changes = list[dict[str, Any]]

ROUNDINGS = ("probabilities in half precision", "sums in half precision")  # recognised by the size of errors
_TILES = (16, 32, 64, 128)  # keys in a tile of common kernels
_HALF = (torch.bfloat16, torch.float16)


def wrong_problems(name: str, problem: Problem) -> Iterator[Problem]:
    """The problems with a mistake that differ from ``problem``."""
    for changes in MISTAKES[name](problem):
        if any(_differ(getattr(problem, field), value) for field, value in changes.items()):
            yield replace(problem, **changes)


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not torch.equal(one, other)
    return bool(one is not other and one != other)


def _top_left(problem: Problem) -> Changes:
    """The first query is aligned with the first key; right is the last query with the last key."""
    n = max(problem.case.nq, problem.case.nk)
    if 0 in (problem.case.nq, problem.case.nk):
        return []
    return [{"visible": replace(problem.case, nq=n, nk=n).visible[:, :, : problem.case.nq, : problem.case.nk]}]


def _shifted(visible: Tensor, by: int) -> Tensor:
    """Each row moved by one key."""
    moved = torch.roll(visible, by, -1)
    moved[..., 0 if by > 0 else -1] = False
    return moved


def _too_wide(problem: Problem) -> Changes:
    if not problem.case.nk:
        return []
    left, right = (_shifted(problem.visible, by) for by in (-1, 1))
    return [{"visible": problem.visible | more} for more in (left, right, left | right)]


def _too_narrow(problem: Problem) -> Changes:
    if not problem.case.nk or problem.case.text in ("causal", "full"):
        return []
    count = problem.visible.sum(-1, keepdim=True)
    whole = count == count.max()  # rows whose window does not reach beyond the text
    oldest = whole & (problem.visible.cumsum(-1) == 1)
    newest = whole & (problem.visible.flip(-1).cumsum(-1) == 1).flip(-1)
    kept = (~oldest, ~newest, _shifted(problem.visible, -1), _shifted(problem.visible, 1))
    return [{"visible": problem.visible & keys} for keys in kept]


def _forgets(*parts: str, leaving: str = "full") -> Callable[[Problem], Changes]:
    """A mistake that forgets the parts of the mask that begin so."""

    def changes(problem: Problem) -> Changes:
        text = problem.case.text
        terms = [text] if text.startswith("heads") else text.split(" & ")
        kept = [term for term in terms if not term.startswith(parts)]
        return [] if kept == terms else [{"visible": problem.case.visible_under(" & ".join(kept) or leaving)}]

    return changes


def _bias_ignored(problem: Problem) -> Changes:
    """Also one that is used only where it is -inf."""
    if problem.bias is None:
        return []
    return [
        {"bias": torch.zeros_like(problem.bias)},
        {"bias": torch.where(problem.bias == -math.inf, problem.bias, 0.0)},
    ]


MISTAKES: dict[str, Callable[[Problem], Changes]] = {  # of several that explain equally many calls, the first is named
    "NaN from hidden keys": lambda problem: [{"contained": False}],  # a weight of 0 times NaN is NaN
    "top-left alignment": _top_left,
    "window one too wide": _too_wide,
    "window one too narrow": _too_narrow,
    "last key of each tile missing": lambda problem: [
        {"visible": problem.visible & (torch.arange(problem.case.nk) % tile != tile - 1)} for tile in _TILES
    ],
    "keys after the last whole tile missing": lambda problem: [
        {"visible": problem.visible & (torch.arange(problem.case.nk) < problem.case.nk // tile * tile)}
        for tile in _TILES
    ],
    # True means hidden in torch.nn.MultiheadAttention, and visible in scaled_dot_product_attention.
    "mask inverted": lambda problem: [{"visible": ~problem.visible}],
    "mask ignored": lambda problem: [{"visible": torch.ones_like(problem.visible)}],
    "window missing": _forgets("window(", "band("),
    "documents leak": _forgets("documents("),
    "padding seen": _forgets("padding", leaving="causal"),
    "scale missing": lambda problem: [{"scale": 1.0}, {"scale": 1 / math.sqrt(problem.case.d)}],  # or scale= is ignored
    "scale applied twice": lambda problem: [
        {"scale": problem.scale**2},
        {"scale": problem.scale / math.sqrt(problem.case.d)},
    ],
    # Query head h reads key/value head h % Hkv; right is h // group.
    "grouped heads interleaved": lambda problem: [{"kv_heads": torch.arange(problem.case.hq) % problem.case.hkv}],
    "sinks ignored": lambda problem: [{"sinks": None}],
    "key/value heads in another order": lambda problem: [
        {"kv_heads": heads} for heads in (problem.kv_heads.flip(0), problem.kv_heads.roll(1), problem.kv_heads.roll(-1))
    ],
    "softcap missing": lambda problem: [{"softcap": None}],
    "softcap before the scale": lambda problem: [{"cap_of": "products"}] if problem.softcap else [],
    "softcap after the mask's bias": lambda problem: (
        [{"cap_of": "sum"}] if problem.softcap and problem.bias is not None else []
    ),
    # Hidden scores of -inf become -c, and exp(-c) is no weight of 0; with a bias, it is added after the cap or before it.
    "softcap after the mask": lambda problem: (
        [{"hidden": "capped", "cap_of": what} for what in ("scores", "sum")] if problem.softcap else []
    ),
    "bias ignored": _bias_ignored,
    # Added before the scale.
    "bias scaled": lambda problem: [] if problem.bias is None else [{"bias_scale": problem.scale}],
    # A query that sees nothing then sees everything, and scores below -1e9 are less than those of hidden keys.
    "hidden as -1e9": lambda problem: [{"hidden": "replaced"}, {"hidden": "added"}],
    "empty rows not zero": lambda problem: [{"empty": math.nan}],
    "probabilities in half precision": lambda problem: [
        {"weights_in": dtype, "normalised": normalised} for dtype in _HALF for normalised in (True, False)
    ],
    "sums in half precision": lambda problem: [{"sums_in": dtype} for dtype in _HALF],  # after each key
    "lse in base 2": lambda problem: [{"lse_base": 2.0}],
    "lse of unscaled scores": lambda problem: [{"lse_scaled": False}],
    "gradients not summed over groups": lambda problem: (
        [{"group": group} for group in ("first", "last", "mean")] if problem.case.hkv < problem.case.hq else []
    ),
}
