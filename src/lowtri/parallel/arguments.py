"""The arguments of attention over a sequence of which a caller holds some tokens: checked, and taken from the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtri.errors import CallError
from lowtri.parallel.runs import Ints

__all__ = ["Bias", "bias_of_positions", "module_options", "take", "wrong_tensors"]

Bias = Callable[[Tensor, Tensor], Tensor]


def take(x: Tensor, dim: int, positions: Ints, n: int) -> Tensor:
    """The tokens at ``positions`` of ``x``, whose dimension ``dim`` is a whole sequence of ``n`` tokens."""
    if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim or x.shape[dim] != n:
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise CallError(f"shard: x is {shape}, but its dimension {dim} must be the {n} tokens of the plan.")
    return x.index_select(dim, torch.from_numpy(positions).to(x.device))


def module_options(who: str, options: dict[str, Any], positions: Ints) -> dict[str, Any]:
    """The options of a module's call of attention, without the positions, which must be those of this rank's tokens.

    Raises:
        CallError: if they are not, or the module asks for weights or dropout.
    """
    options, variable = dict(options), _variable(who)
    for which in ("q_positions", "k_positions"):
        given = options.pop(which, None)
        if given is None or not np.array_equal(np.ravel(given), positions):
            raise CallError(
                f"{who}: {which} are not the positions of this rank's tokens.\n"
                f"Fix: model(ids, positions={variable}.positions, attend={variable}.attend), without a cache."
            )
    if options.pop("return_weights", False) or options.pop("dropout", 0):
        raise CallError(f"{who}: no rank holds a whole row of weights. Fix: neither weights nor dropout.")
    return options


def wrong_tensors(who: str, tokens: int, q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> str | None:
    """What is wrong with the tensors of a call by one that holds ``tokens`` tokens, or None."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 4 or x.shape[2] != tokens:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            return (
                f"{who}: {name} is {shape}, but this rank holds {tokens} tokens: (B, H, {tokens}, D).\n"
                f"Fix: {_variable(who)}.shard(x)."
            )
    if bias is not None and (isinstance(bias, Tensor) or not callable(bias)):
        return (
            f"{who}: bias is {type(bias).__name__}, but no rank holds all pairs; it takes a function of "
            "positions.\nFix: bias=lambda q, k: table[(q - k).clamp(min=0)], for instance."
        )
    if sinks is not None and not isinstance(sinks, Tensor):
        return f"{who}: sinks is {type(sinks).__name__}; it takes a tensor (Hq,)."
    return None


def bias_of_positions(bias: Bias | None, q_positions: Ints, k_positions: Ints, device: torch.device) -> Tensor | None:
    """The bias of some queries and keys; -1, the position of no token, counts as 0."""
    if bias is None:
        return None
    q, k = (torch.from_numpy(np.maximum(x, 0)).to(device) for x in (q_positions, k_positions))
    return bias(q[:, None], k[None, :])


def _variable(who: str) -> str:
    """What the documentation calls an instance of the class in ``who``."""
    return "context" if who.startswith("ContextParallel") else "shards"
