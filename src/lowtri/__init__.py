"""lowtri: masked attention. A mask is written once; attention, the key/value cache, the audit and pictures follow from it.

The packages, in the order of reading (each imports only from those above it):

    errors        the exceptions
    files         atomic writes
    masks         which query may see which key: formulas over positions, answers for tiles, plans, pictures
    plain         attention as it is taught, under the names of notebooks
    ops           one checked call of attention, and its definition in float64
    kernels       the CPU kernels
    backends      ways to run a call
    dispatch      the choice of a backend, the cache of prepared calls, and `attention` itself
    generation    the key/value cache, sampling, and the generation loop
    nn            modules: MaskedSelfAttention, MultiHeadAttention, Decoder
    training      from text files to a folder that transformers can load
    auditing      does an output depend on positions that the mask hides?
    explaining    every step of attention, with numbers
    benching      how fast attention is on this machine, and how near to its limits
    integrations  other libraries' formats and entry points
    cli           the command `lowtri`, one file for each subcommand

All public names are here and are loaded on first use: `import lowtri` imports neither torch nor Numba.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lowtri._version import __version__

if TYPE_CHECKING:  # what type checkers and editors read; at run time `__getattr__` imports the same names
    from lowtri import nn as nn, plain as plain
    from lowtri.auditing.audit import assert_causal as assert_causal, audit as audit
    from lowtri.auditing.report import AuditReport as AuditReport
    from lowtri.generation.cache import KVCache as KVCache
    from lowtri.generation.generate import generate as generate
    from lowtri.dispatch.attend import attention as attention, which_engine as which_engine
    from lowtri.dispatch.merge import merge as merge
    from lowtri.dispatch.sdpa_compatible import scaled_dot_product_attention as scaled_dot_product_attention
    from lowtri.errors import (
        CallError as CallError,
        DataError as DataError,
        EngineError as EngineError,
        LeakError as LeakError,
        LowtriError as LowtriError,
        MaskError as MaskError,
        UndecidedError as UndecidedError,
    )
    from lowtri.explaining.steps import explain as explain
    from lowtri.masks import (
        Mask as Mask,
        Tile as Tile,
        band as band,
        causal as causal,
        chunks as chunks,
        documents as documents,
        first as first,
        full as full,
        heads as heads,
        hidden as hidden,
        keys as keys,
        mask as mask,
        strided as strided,
        table as table,
        where as where,
        window as window,
    )

# Module -> the public names it holds.
_NAMES = {
    "lowtri.masks": (
        *("Mask", "Tile", "mask", "causal", "full", "window", "band", "first", "documents", "chunks", "strided"),
        *("keys", "table", "hidden", "where", "heads"),
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
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_PACKAGES = ("nn", "plain")

__all__ = ["__version__", *_PACKAGES, *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


if not TYPE_CHECKING:  # else every misspelt name would pass

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
