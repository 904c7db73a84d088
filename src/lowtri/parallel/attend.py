"""What a model sees of a split sequence: the tokens of one shard, and attention over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtri.errors import CallError
from lowtri.masks import Mask, as_mask
from lowtri.parallel.shards import Ints, ShardPlan

Bias = Callable[[Tensor, Tensor], Tensor]


class ShardedSequence:
    """A sequence that is split by a plan, and the shard whose tokens a model computes now."""

    plan: ShardPlan
    attention: Callable[..., Any]  # lowtri.attention of the shard's queries over the whole sequence
    _positions: Ints
    _variable: str  # what the documentation calls an instance

    @property
    def positions(self) -> Ints:
        """The positions of the shard's tokens in the sequence, increasing."""
        return self._positions

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The shard's tokens of ``x``, whose dimension ``dim`` is the whole sequence; every process passes the same ``x``."""
        if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim or x.shape[dim] != self.plan.n:
            raise CallError(
                f"shard: x is {_shape(x)}, but its dimension {dim} must be the {self.plan.n} tokens of the plan."
            )
        return x.index_select(dim, torch.from_numpy(self.positions).to(x.device))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | str, **options: Any) -> Any:
        """:meth:`attention` with the arguments of :func:`lowtri.attention`, for modules that take a function in its place.

        Raises:
            CallError: if the module asks for weights or dropout, or its positions are not those of the shard.
        """
        function = f"{type(self).__name__}.attend"
        for which in ("q_positions", "k_positions"):
            given = options.pop(which, None)
            if given is None or not np.array_equal(np.ravel(given), self.positions):
                raise CallError(
                    f"{function}: {which} are not the positions of this rank's tokens.\n"
                    f"Fix: model(ids, positions={self._variable}.positions, attend={self._variable}.attend), without a cache."
                )
        if options.pop("return_weights", False) or options.pop("dropout", 0):
            raise CallError(f"{function}: no rank holds a whole row of weights. Fix: neither weights nor dropout.")
        return self.attention(q, k, v, mask, **options)

    def _mask_index(self, q: Any, k: Any, v: Any, mask: Any, bias: Any, sinks: Any) -> int:
        """The index of a call's mask in the plan.

        Raises:
            CallError: if the plan does not have it, or the tensors do not hold the shard's tokens.
        """
        function = f"{type(self).__name__}.attention"
        tokens = len(self.positions)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, Tensor) or x.ndim != 4 or x.shape[2] != tokens:
                raise CallError(
                    f"{function}: {name} is {_shape(x)}, but this rank holds {tokens} tokens: (B, H, {tokens}, D).\n"
                    f"Fix: {self._variable}.shard(x)."
                )
        if bias is not None and (isinstance(bias, Tensor) or not callable(bias)):
            raise CallError(
                f"{function}: bias is {type(bias).__name__}, but no rank holds all pairs; it takes a function of "
                "positions.\nFix: bias=lambda q, k: table[(q - k).clamp(min=0)], for instance."
            )
        if sinks is not None and not isinstance(sinks, Tensor):
            raise CallError(f"{function}: sinks is {type(sinks).__name__}; it takes a tensor (Hq,).")
        return self.plan.index(None if mask is None else as_mask(mask, f"{function}: mask"))


def bias_of_positions(bias: Bias | None, q_positions: Ints, k_positions: Ints, device: torch.device) -> Tensor | None:
    """The bias of some queries and keys; -1, the position of no token, counts as 0."""
    if bias is None:
        return None
    q, k = (torch.from_numpy(np.maximum(x, 0)).to(device) for x in (q_positions, k_positions))
    return bias(q[:, None], k[None, :])


def _shape(x: Any) -> Any:
    return tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
