"""Builds a checked :class:`~lowtri.ops.call.Call`, and its arrays in four dimensions, from a user's arguments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lowtri.masks.label_masks import check_row_lengths
from lowtri.masks.mask import default_positions
from lowtri.masks.text import as_mask
from lowtri.ops.arguments import (
    bias_in_four,
    check_arrays,
    check_batch,
    check_bias,
    check_numbers,
    check_positions,
    check_recorded,
    check_sinks,
    check_weights,
    dtype_name,
    packed,
    plain_array,
)
from lowtri.ops.call import ArrayInfo, Call, CallOptions, Inputs, positions_of
from lowtri.ops.distance_bias import DistanceBias, distances_of
from lowtri.ops.threads import thread_count

_DEFAULTS = CallOptions()


def describe(q: Any, k: Any, v: Any, mask: Any, options: CallOptions = _DEFAULTS) -> tuple[Call, Inputs]:
    """Check the arguments of a call; returns its description and its arrays in four dimensions.

    Raises:
        CallError: where they do not fit together, or the weights do not fit into memory; the message names the argument,
            what it got, and the fix.
        MaskError: where ``mask`` is not a mask.
    """
    scale, softcap, bias, sinks, dropout, q_positions, k_positions, return_weights, return_lse, _ = options
    mask = as_mask(mask, "attention: mask")
    q, k, v = plain_array("q", q), plain_array("k", k), plain_array("v", v)
    rank, lead = check_arrays(q, k, v)
    q, k, v = (_as_rows(x, rank, lead) for x in (q, k, v))
    (rows, heads, nq, size), nk = q.shape, k.shape[2]
    check_batch(mask, rank, rows, heads)
    by_distance = isinstance(bias, DistanceBias)
    if bias is not None and not by_distance:
        bias = check_bias(plain_array("bias", bias), q, (rows, heads, nq, nk), lead)
    if sinks is not None:
        sinks = check_sinks(plain_array("sinks", sinks), q, heads)
    check_numbers(scale, softcap, dropout)
    if return_weights and (isinstance(q, np.ndarray) or q.is_cpu):
        check_weights((rows, heads, nq, nk), q.dtype.itemsize, dtype_name(q.dtype))
    given = q_positions is not None or k_positions is not None
    if k_positions is not None:
        k_positions = check_positions("k_positions", k_positions, rows, nk)
    if q_positions is not None:
        q_positions = check_positions("q_positions", q_positions, rows, nq)
    elif nq > nk and mask.depends_on_query:
        default_positions(mask, nq, nk)  # raises with the fix
    queries, keys = positions_of(mask, nq, nk, q_positions, k_positions)
    if mask.row_lengths:
        end = 1 + max((int(x.max()) for x in (queries, keys) if x.size), default=-1)
        check_row_lengths("attention", mask, end, whole=not given)
    distance_low = None
    if by_distance:
        distance_low, bias = distances_of(bias, queries, keys)
        bias = check_bias(plain_array("bias", bias), q, (rows, heads, 1, bias.shape[3]), ())
    is_numpy = isinstance(q, np.ndarray)
    inputs = Inputs(q, k, v, bias, sinks)
    records = not is_numpy and _records_gradients()
    if records:
        check_recorded(inputs._asdict())
    call = Call(
        q=_info(q, records),
        k=_info(k, records),
        v=_info(v, records),
        bias=None if bias is None else _info(bias, records),
        sinks=None if sinks is None else _info(sinks, records),
        is_numpy=is_numpy,
        device="cpu" if is_numpy or q.is_cpu else str(q.device.type),
        mask=mask,
        scale=1 / math.sqrt(size) if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
        dropout=float(dropout),
        q_positions=queries,
        k_positions=keys,
        positions_given=given,
        return_weights=return_weights,
        return_lse=return_lse,
        threads=thread_count(is_numpy),
        opaque=None if is_numpy else _opaque(inputs),
        transformation=None if is_numpy else _transformation(),
        lead=lead,
        rank=rank,
        distance_low=distance_low,
    )
    return call, inputs


def arrange(call: Call, q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Inputs:
    """The arrays of another call with the same signature, in four dimensions."""
    rank, lead = call.rank, call.lead
    if rank != 4:
        q, k, v = (_as_rows(x, rank, lead) for x in (q, k, v))
    if isinstance(bias, DistanceBias):
        assert call.bias is not None and call.distance_low is not None
        bias = bias.along(call.distance_low, call.bias.shape[3])
    else:
        bias = None if bias is None else bias_in_four(bias, lead)
    return Inputs(q, k, v, bias, None if sinks is None else packed(sinks))


def _as_rows(x: Any, rank: int, lead: tuple[int, ...]) -> Any:
    """(..., H, N, D), (H, N, D) or (N, D) as (B, H, N, D)."""
    if rank == 4:
        return x
    return x[None, None] if rank == 2 else x.reshape(math.prod(lead), *x.shape[-3:])


def _records_gradients() -> bool:
    import torch

    return torch.is_grad_enabled()


def _info(x: Any, records: bool) -> ArrayInfo:
    if isinstance(x, np.ndarray):
        return ArrayInfo(x.shape, tuple(n // x.itemsize for n in x.strides), dtype_name(x.dtype), False)
    return ArrayInfo(tuple(x.shape), tuple(x.stride()), dtype_name(x.dtype), records and x.requires_grad)


def _transformation() -> str | None:
    from lowtri.ops.guards import transformation

    return transformation()


def _opaque(inputs: Inputs) -> str | None:
    """Why a kernel may not read the tensors' memory by itself, or None."""
    from lowtri.compat.torch_private import why_unreadable
    from lowtri.ops.guards import active_mode, is_plain

    if why_unreadable is not None:
        return why_unreadable
    for name, x in zip(inputs._fields, inputs, strict=True):
        if x is not None and not is_plain(x):
            return f"{name} is a {type(x).__name__} or a view whose data does not lie in memory as it is"
    return active_mode()
