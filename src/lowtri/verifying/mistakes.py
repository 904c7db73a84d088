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

from lowtri.verifying.definition import Call

Changes = list[dict[str, Any]]

ROUNDINGS = ("probabilities in half precision", "sums in half precision")  # recognised by the size of errors
_TILES = (16, 32, 64, 128)  # keys in a tile of common kernels
_HALF = (torch.bfloat16, torch.float16)


def wrong_calls(name: str, call: Call) -> Iterator[Call]:
    """The calls with a mistake that differ from ``call``."""
    for changes in MISTAKES[name](call):
        if any(_differ(getattr(call, field), value) for field, value in changes.items()):
            yield replace(call, **changes)


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not torch.equal(one, other)
    return bool(one is not other and one != other)


def _top_left(call: Call) -> Changes:
    """The first query is aligned with the first key; right is the last query with the last key."""
    n = max(call.case.nq, call.case.nk)
    if 0 in (call.case.nq, call.case.nk):
        return []
    return [{"visible": replace(call.case, nq=n, nk=n).visible[:, :, : call.case.nq, : call.case.nk]}]


def _shifted(visible: Tensor, by: int) -> Tensor:
    """Each row moved by one key."""
    moved = torch.roll(visible, by, -1)
    moved[..., 0 if by > 0 else -1] = False
    return moved


def _too_wide(call: Call) -> Changes:
    if not call.case.nk:
        return []
    left, right = (_shifted(call.visible, by) for by in (-1, 1))
    return [{"visible": call.visible | more} for more in (left, right, left | right)]


def _too_narrow(call: Call) -> Changes:
    if not call.case.nk or call.case.text in ("causal", "full"):
        return []
    count = call.visible.sum(-1, keepdim=True)
    whole = count == count.max()  # rows whose window does not reach beyond the text
    oldest = whole & (call.visible.cumsum(-1) == 1)
    newest = whole & (call.visible.flip(-1).cumsum(-1) == 1).flip(-1)
    kept = (~oldest, ~newest, _shifted(call.visible, -1), _shifted(call.visible, 1))
    return [{"visible": call.visible & keys} for keys in kept]


def _forgets(*parts: str, leaving: str = "full") -> Callable[[Call], Changes]:
    """A mistake that forgets the parts of the mask that begin so."""

    def changes(call: Call) -> Changes:
        text = call.case.text
        terms = [text] if text.startswith("heads") else text.split(" & ")
        kept = [term for term in terms if not term.startswith(parts)]
        return [] if kept == terms else [{"visible": call.case.visible_under(" & ".join(kept) or leaving)}]

    return changes


def _bias_ignored(call: Call) -> Changes:
    """Also one that is used only where it is -inf."""
    if call.bias is None:
        return []
    return [{"bias": torch.zeros_like(call.bias)}, {"bias": torch.where(call.bias == -math.inf, call.bias, 0.0)}]


MISTAKES: dict[str, Callable[[Call], Changes]] = {  # of several that explain equally many calls, the first is named
    "NaN from hidden keys": lambda call: [{"contained": False}],  # a weight of 0 times NaN is NaN
    "top-left alignment": _top_left,
    "window one too wide": _too_wide,
    "window one too narrow": _too_narrow,
    # True means hidden in torch.nn.MultiheadAttention, and visible in scaled_dot_product_attention.
    "last key of each tile missing": lambda call: [
        {"visible": call.visible & (torch.arange(call.case.nk) % tile != tile - 1)} for tile in _TILES
    ],
    "keys after the last whole tile missing": lambda call: [
        {"visible": call.visible & (torch.arange(call.case.nk) < call.case.nk // tile * tile)} for tile in _TILES
    ],
    "mask inverted": lambda call: [{"visible": ~call.visible}],
    "mask ignored": lambda call: [{"visible": torch.ones_like(call.visible)}],
    "window missing": _forgets("window(", "band("),
    "documents leak": _forgets("documents("),
    "padding seen": _forgets("padding", leaving="causal"),
    "scale missing": lambda call: [{"scale": 1.0}, {"scale": 1 / math.sqrt(call.case.d)}],  # or scale= is ignored
    "scale applied twice": lambda call: [{"scale": call.scale**2}, {"scale": call.scale / math.sqrt(call.case.d)}],
    # Query head h reads key/value head h % Hkv; right is h // group.
    "grouped heads interleaved": lambda call: [{"kv_heads": torch.arange(call.case.hq) % call.case.hkv}],
    "sinks ignored": lambda call: [{"sinks": None}],
    "key/value heads in another order": lambda call: [
        {"kv_heads": heads} for heads in (call.kv_heads.flip(0), call.kv_heads.roll(1), call.kv_heads.roll(-1))
    ],
    "softcap missing": lambda call: [{"softcap": None}],
    "softcap before the scale": lambda call: [{"cap_of": "products"}] if call.softcap else [],
    "softcap after the mask's bias": lambda call: [{"cap_of": "sum"}] if call.softcap and call.bias is not None else [],
    # Hidden scores of -inf become -c, and exp(-c) is no weight of 0; with a bias, it is added after the cap or before it.
    "softcap after the mask": lambda call: (
        [{"hidden": "capped", "cap_of": what} for what in ("scores", "sum")] if call.softcap else []
    ),
    "bias ignored": _bias_ignored,
    "bias scaled": lambda call: [] if call.bias is None else [{"bias_scale": call.scale}],  # added before the scale
    # A query that sees nothing then sees everything, and scores below -1e9 are less than those of hidden keys.
    "hidden as -1e9": lambda call: [{"hidden": "replaced"}, {"hidden": "added"}],
    "empty rows not zero": lambda call: [{"empty": math.nan}],
    "probabilities in half precision": lambda call: [
        {"weights_in": dtype, "normalised": normalised} for dtype in _HALF for normalised in (True, False)
    ],
    "sums in half precision": lambda call: [{"sums_in": dtype} for dtype in _HALF],  # after each key
    "lse in base 2": lambda call: [{"lse_base": 2.0}],
    "lse of unscaled scores": lambda call: [{"lse_scaled": False}],
    "gradients not summed over groups": lambda call: (
        [{"group": group} for group in ("first", "last", "mean")] if call.case.hkv < call.case.hq else []
    ),
}
