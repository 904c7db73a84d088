"""Attention of a rank's queries over the whole sequence, with gradients.

The forward keeps q, k, v, the output and its log-sum-exp of this rank's own tokens. The backward fetches the keys and values of other
ranks again, and starts from the known output and log-sum-exp (:func:`lowtri.attention_backward`).

With ``overlap`` the own keys are attended while those of others arrive, and the two results are merged by their log-sum-exp; without it
all keys are joined in one tensor and attended in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtri.dispatch.attend import attention
from lowtri.dispatch.backward import attention_backward
from lowtri.dispatch.merge import merge
from lowtri.errors import CallError
from lowtri.masks import Mask
from lowtri.parallel.exchange import Exchange, Pending
from lowtri.parallel.runs import Ints

Bias = Callable[[Tensor, Tensor], Tensor]


def take(x: Tensor, dim: int, positions: Ints, n: int) -> Tensor:
    """The tokens at ``positions`` of ``x``, whose dimension ``dim`` is a whole sequence of ``n`` tokens."""
    if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim or x.shape[dim] != n:
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise CallError(f"shard: x is {shape}, but its dimension {dim} must be the {n} tokens of the plan.")
    return x.index_select(dim, torch.from_numpy(positions).to(x.device))


def module_options(function: str, options: dict[str, Any], positions: Ints) -> dict[str, Any]:
    """The options of a module's call of attention, without the positions, which must be those of this rank's tokens.

    Raises:
        CallError: if they are not, or the module asks for weights or dropout.
    """
    options, variable = dict(options), _variable(function)
    for which in ("q_positions", "k_positions"):
        given = options.pop(which, None)
        if given is None or not np.array_equal(np.ravel(given), positions):
            raise CallError(
                f"{function}: {which} are not the positions of this rank's tokens.\n"
                f"Fix: model(ids, positions={variable}.positions, attend={variable}.attend), without a cache."
            )
    if options.pop("return_weights", False) or options.pop("dropout", 0):
        raise CallError(f"{function}: no rank holds a whole row of weights. Fix: neither weights nor dropout.")
    return options


def wrong_tensors(function: str, tokens: int, q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> str | None:
    """What is wrong with the tensors of a call by one that holds ``tokens`` tokens, or None."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 4 or x.shape[2] != tokens:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            return (
                f"{function}: {name} is {shape}, but this rank holds {tokens} tokens: (B, H, {tokens}, D).\n"
                f"Fix: {_variable(function)}.shard(x)."
            )
    if bias is not None and (isinstance(bias, Tensor) or not callable(bias)):
        return (
            f"{function}: bias is {type(bias).__name__}, but no rank holds all pairs; it takes a function of "
            "positions.\nFix: bias=lambda q, k: table[(q - k).clamp(min=0)], for instance."
        )
    if sinks is not None and not isinstance(sinks, Tensor):
        return f"{function}: sinks is {type(sinks).__name__}; it takes a tensor (Hq,)."
    return None


def bias_of_positions(bias: Bias | None, q_positions: Ints, k_positions: Ints, device: torch.device) -> Tensor | None:
    """The bias of some queries and keys; -1, the position of no token, counts as 0."""
    if bias is None:
        return None
    q, k = (torch.from_numpy(np.maximum(x, 0)).to(device) for x in (q_positions, k_positions))
    return bias(q[:, None], k[None, :])


def _variable(function: str) -> str:
    """What the documentation calls an instance of the class in ``function``."""
    return "context" if function.startswith("ContextParallel") else "shards"


@dataclass(frozen=True, eq=False)
class Setting:
    """Everything about a call but its tensors."""

    exchange: Exchange
    mask: Mask
    positions: Ints  # of the queries
    bias: Bias | None
    options: dict[str, Any]  # scale, softcap, engine
    overlap: bool
    keep: bool  # keep what was fetched for the backward

    def options_of(self, q: Tensor, k: Tensor) -> dict[str, Any]:
        """The options of one call; an engine that was given by name is not asked where a rank has no queries or no keys."""
        return self.options if q.numel() and k.numel() else {**self.options, "engine": "auto"}

    def parts(self) -> list[Ints]:
        """The positions of the keys of each part."""
        if not self.overlap:
            return [self.exchange.whole]
        return [self.positions, self.exchange.others] if len(self.exchange.others) else [self.positions]

    def bias_of(self, keys: Ints, device: torch.device) -> Tensor | None:
        """The bias of this rank's queries and some keys."""
        return bias_of_positions(self.bias, self.positions, keys, device)


class _Part(NamedTuple):
    """Some keys and values, with their positions."""

    k: Tensor  # (B, Hkv, Nk, D)
    v: Tensor  # (B, Hkv, Nk, Dv)
    positions: Ints
    bias: Tensor | None
    sinks: Tensor | None  # they take part in the softmax once


def _options(setting: Setting, q: Tensor, part: _Part) -> dict[str, Any]:
    """The options of attention over one part, the same forward and backward."""
    positions = {"q_positions": setting.positions, "k_positions": part.positions}
    return {"bias": part.bias, "sinks": part.sinks, **positions, **setting.options_of(q, part.k)}


def attend(setting: Setting, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output (B, Hq, my tokens, Dv) and log-sum-exp (B, Hq, my tokens)."""
    biases: list[Tensor | None] = []
    if setting.bias is not None and torch.is_grad_enabled():
        biases = [setting.bias_of(keys, q.device) for keys in setting.parts()]
        if not any(bias is not None and bias.requires_grad for bias in biases):
            biases = []  # computed again when it is needed, since it has a number for each pair
    output, lse = _Attend.apply(setting, q, k, v, sinks, *biases)
    return output, lse


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, setting: Setting, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *biases: Tensor | None
    ) -> Any:
        pending = setting.exchange.fetch(_rows(k, v))
        results = [
            attention(
                q,
                part.k,
                part.v,
                setting.mask,
                return_lse=True,
                **_options(setting, q, part),
            )
            for part in _parts(setting, k, v, pending, sinks, biases)
        ]
        output, lse = results[0] if len(results) == 1 else merge(*zip(*results, strict=True))
        ctx.set_materialize_grads(False)
        ctx.setting, ctx.biases = setting, len(biases)
        kept = [pending.wait()] if setting.keep else []
        ctx.save_for_backward(q, k, v, sinks, output, lse, *biases, *kept)
        return output, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_output: Tensor | None, d_lse: Tensor | None) -> Any:
        setting: Setting = ctx.setting
        q, k, v, sinks, output, lse, *rest = ctx.saved_tensors
        biases, kept = rest[: ctx.biases], rest[ctx.biases :]
        exchange, size = setting.exchange, k.shape[3]
        pending = Pending(None, kept[0], None, "") if kept else exchange.fetch(_rows(k, v))
        if d_output is None:
            d_output = torch.zeros_like(output)
        gradients = [
            attention_backward(
                d_output,
                d_lse,
                output,
                lse,
                q,
                part.k,
                part.v,
                setting.mask,
                wide=True,
                **_options(setting, q, part),
            )
            for part in _parts(setting, k, v, pending, sinks, biases)
        ]
        d_rows = [torch.cat([part.k, part.v], -1).permute(2, 0, 1, 3) for part in gradients]
        if not setting.overlap:
            d_rows = list(exchange.split(d_rows[0]))
        elif len(d_rows) == 1:  # this rank fetched nothing; others may return gradients to it
            d_rows.append(d_rows[0].new_empty((0, *d_rows[0].shape[1:])))
        d_own, d_fetched = d_rows
        returned = exchange.give_back(d_fetched)
        d_q = sum((part.q for part in gradients[1:]), gradients[0].q).to(q.dtype)
        d_biases = [
            None if part.bias is None else part.bias.to(bias.dtype)
            for part, bias in zip(gradients, biases, strict=False)
        ]
        d_k, d_v = _keys_and_values(exchange.add(d_own, returned.wait()), size)
        d_sinks = None if gradients[0].sinks is None else gradients[0].sinks.to(sinks.dtype)
        return None, d_q, d_k.to(k.dtype), d_v.to(v.dtype), d_sinks, *d_biases


def _parts(
    setting: Setting,
    k: Tensor,
    v: Tensor,
    pending: Pending,
    sinks: Tensor | None,
    biases: tuple[Tensor | None, ...] | list[Tensor | None],
) -> Iterator[_Part]:
    """The parts of the keys, each when it has arrived: this rank's own, then those of others; or all of them at once."""
    for number, positions in enumerate(setting.parts()):
        if not setting.overlap:
            rows = setting.exchange.join(_rows(k, v), pending.wait())
        elif number == 1:
            rows = pending.wait()
        keys, values = (k, v) if setting.overlap and number == 0 else _keys_and_values(rows, k.shape[3])
        bias = biases[number] if biases else setting.bias_of(positions, k.device)
        yield _Part(keys, values, positions, bias, sinks if number == 0 else None)


def _rows(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k, v], -1).permute(2, 0, 1, 3)  # (tokens, B, Hkv, D + Dv)


def _keys_and_values(rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
    columns = rows.permute(1, 2, 0, 3)  # (B, Hkv, tokens, D + Dv)
    return columns[..., :size], columns[..., size:]
