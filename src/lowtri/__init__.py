"""lowtri: masked attention, key/value caches, audits and pictures from one definition of the mask.

The packages, in reading order; a package imports only packages above it:

    errors        the exception classes
    forks         locks in forked processes
    extras        what needs a package that lowtri itself does not need
    system        what differs between operating systems
    files         atomic writes
    progress      a line on stderr that says how far a long check is
    assets        data, no code: the style sheet that all pages share, and the sentences in four languages
    sentences     the sentences of the lesson, of explain and of the notebooks
    drawing       the table of the methods that draw, which pictures defines
    compat        every use of private APIs of torch, Numba and transformers
    masks         masks as formulas over positions, tile answers, plans
    plain_torch   what plain has in torch
    plain         the textbook formulas, under the names that notebooks use
    ops           the checked description of an attention call, biases over distances, dropout
    kernels       the CPU kernels
    backends      the implementations of attention, one of them the definition in float64
    dispatch      the choice of a backend, the cache of prepared calls, and `attention` itself
    generation    the key/value cache, sampling, and the generation loop
    nn            torch modules: MaskedSelfAttention, MultiHeadAttention, Decoder, RecurrentLM
    pretrained    finds trained models, and has transformers load them
    pictures      pictures of masks and caches as text and SVG; pages, and files
    showing       attention weights as pictures
    parallel      one sequence over many processes, split by what its mask shows
    auditing      the audit: whether a model depends on what its mask hides
    verifying     compares any attention function with the definition; names well-known mistakes
    explaining    every step of attention, with numbers
    benching      the timer, the limits of the CPU, and attention's speed beside torch's
    doctor        what this machine has, and what is missing
    integrations  transformers, torch.nn, FlexAttention, flash-attn
    lesson        masked self-attention as an interactive page, in four languages
    cli           the command `lowtri`, a function per verb

`import lowtri` gives every public name and loads each on first use; it imports neither torch nor Numba.
lowtri itself needs NumPy alone; what needs another package says which extra installs it.
"""

from __future__ import annotations

import os
import sys


def _is_the_command() -> bool:
    """Whether the program is the script ``lowtri``, or ``python -m lowtri``, which has not yet begun."""
    program = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    if program == "-m":
        return "lowtri" in sys.orig_argv[1:] and sys.orig_argv[sys.orig_argv.index("lowtri") - 1] == "-m"
    return program in ("lowtri", "lowtri.exe", "lowtri-script.py")


def _print_interrupt(kind: type[BaseException], *error: object) -> None:
    """The excepthook of the command: Ctrl-C is no traceback, even before the command can catch it."""
    if issubclass(kind, KeyboardInterrupt):
        print("lowtri: interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, *error)  # type: ignore[arg-type]


if _is_the_command():  # before anything else is imported
    sys.excepthook = _print_interrupt

import importlib  # noqa: E402

from lowtri._version import __version__  # noqa: E402

TYPE_CHECKING = False  # typing's own takes longer to import than all of this package
if TYPE_CHECKING:  # for type checkers and editors; at run time `__getattr__` imports the same names
    from typing import Any

    from lowtri import nn as nn, parallel as parallel, plain as plain
    from lowtri.auditing.adapter import Model as Model
    from lowtri.auditing.audit import assert_causal as assert_causal, audit as audit
    from lowtri.auditing.infer import InferredMask as InferredMask, infer_mask as infer_mask
    from lowtri.auditing.report import AuditReport as AuditReport
    from lowtri.generation.cache import KVCache as KVCache
    from lowtri.generation.generate import generate as generate
    from lowtri.dispatch.attend import attention as attention, merge as merge, which_engine as which_engine
    from lowtri.dispatch.backward import attention_backward as attention_backward
    from lowtri.dispatch.sdpa_compatible import scaled_dot_product_attention as scaled_dot_product_attention
    from lowtri.errors import CallError as CallError, DataError as DataError, EngineError as EngineError
    from lowtri.errors import ExtraError as ExtraError, LeakError as LeakError, LowtriError as LowtriError
    from lowtri.errors import MaskError as MaskError, RankError as RankError, UndecidedError as UndecidedError
    from lowtri.errors import VerifyError as VerifyError
    from lowtri.ops.distance_bias import DistanceBias as DistanceBias, alibi as alibi, distance_bias as distance_bias
    from lowtri.explaining.steps import explain as explain
    from lowtri.showing import show as show
    from lowtri.verifying.report import VerifyReport as VerifyReport
    from lowtri.verifying.verify import verify as verify
    from lowtri.masks import Mask as Mask, Tile as Tile, band as band, causal as causal, chunks as chunks
    from lowtri.masks import documents as documents, first as first, full as full, heads as heads, hidden as hidden
    from lowtri.masks import keys as keys, mask as mask, strided as strided, table as table, where as where
    from lowtri.masks import tree as tree, tree_depths as tree_depths
    from lowtri.masks import window as window

# Module -> its public names.
_NAMES = {
    "lowtri.masks": (
        *("Mask", "Tile", "mask", "causal", "full", "window", "band", "first", "documents", "chunks", "strided"),
        *("tree", "tree_depths"),
        *("keys", "table", "hidden", "where", "heads"),
    ),
    "lowtri.dispatch.attend": ("attention", "merge", "which_engine"),
    "lowtri.dispatch.backward": ("attention_backward",),
    "lowtri.ops.distance_bias": ("DistanceBias", "alibi", "distance_bias"),
    "lowtri.dispatch.sdpa_compatible": ("scaled_dot_product_attention",),
    "lowtri.generation.cache": ("KVCache",),
    "lowtri.generation.generate": ("generate",),
    "lowtri.auditing.adapter": ("Model",),
    "lowtri.auditing.audit": ("audit", "assert_causal"),
    "lowtri.auditing.infer": ("infer_mask", "InferredMask"),
    "lowtri.auditing.report": ("AuditReport",),
    "lowtri.verifying.report": ("VerifyReport",),
    "lowtri.verifying.verify": ("verify",),
    "lowtri.explaining.steps": ("explain",),
    "lowtri.showing": ("show",),
    "lowtri.errors": (
        *("LowtriError", "MaskError", "CallError", "EngineError", "ExtraError", "DataError", "LeakError", "RankError"),
        *("UndecidedError", "VerifyError"),
    ),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_PACKAGES = ("nn", "parallel", "plain")

__all__ = ["__version__", *_PACKAGES, *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


if not TYPE_CHECKING:  # otherwise type checkers would accept every misspelt name

    def __getattr__(name: str) -> Any:
        if name not in _HOME and name not in _PACKAGES:
            raise AttributeError(f"module 'lowtri' has no attribute {name!r}")
        try:
            module = importlib.import_module(_HOME.get(name, f"lowtri.{name}"))
        except ModuleNotFoundError as error:
            from lowtri.extras import require

            require(f"lowtri.{name}", error.name or "")
            raise
        value = getattr(module, name) if name in _HOME else module
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
