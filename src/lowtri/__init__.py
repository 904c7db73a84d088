"""lowtri: say once who may see whom, and get the attention, the cache, the check and the picture that follow.

The rooms, in the order of reading (imports run upward in this list only):

    errors        the family of errors
    masks         who may see whom: formulas over positions, the three-answer tile question, plans, pictures
    plain         attention as it is taught, under the names that notebooks use
    ops           what attention is: one checked call, and its float64 definition
    kernels       the CPU kernels
    backends      ways to run a call
    dispatch      the choice of a backend, the cache of prepared calls, and `attention` itself
    generation    the key/value cache, sampling, and the generation loop
    nn            modules: MaskedSelfAttention, MultiHeadAttention, Decoder
    training      from text files to a folder that transformers can load
    auditing      does a model peek?
    explaining    every step of attention, with numbers
    benching      how fast attention is on this machine, and how near to what the machine can do
    integrations  other libraries' formats and doors
    cli           the command `lowtri`, one file a verb

Everything public is found here. Nothing is loaded before it is used: neither torch nor numba comes with `import lowtri`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lowtri._version import __version__

if TYPE_CHECKING:
    from lowtri import nn as nn
    from lowtri import plain as plain

# Public name -> the room that holds it.
_ROOMS = {
    "lowtri.masks": (
        *("Mask", "Tile", "EMPTY", "PARTIAL", "FULL", "END", "mask"),
        *("causal", "full", "window", "band", "first", "documents", "chunks", "strided", "keys", "table", "hidden"),
        *("where", "heads"),
    ),
    "lowtri.dispatch.attend": ("attention", "which_engine"),
    "lowtri.dispatch.merge": ("merge",),
    "lowtri.dispatch.sdpa_compatible": ("scaled_dot_product_attention",),
    "lowtri.generation.cache": ("KVCache",),
    "lowtri.generation.generate": ("generate",),
    "lowtri.auditing.audit": ("audit", "assert_causal"),
    "lowtri.auditing.report": ("AuditReport",),
    "lowtri.explaining.steps": ("explain",),
    "lowtri.errors": (
        *("LowtriError", "MaskError", "CallError", "EngineError", "DataError", "LeakError", "UndecidedError"),
    ),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}
_PACKAGES = ("nn", "plain")

__all__ = ["__version__", *_PACKAGES, *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _PACKAGES:
        value = importlib.import_module(f"lowtri.{name}")
    else:
        raise AttributeError(f"module 'lowtri' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
