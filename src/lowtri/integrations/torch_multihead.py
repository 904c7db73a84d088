"""The attention of an ``nn.MultiheadAttention``: its projections, its masks as lowtri masks, and its options.

torch's meanings, which this file translates:

    attn_mask           (L, S) or (B * H, L, S). Bools: True hides. Floats are added to the scores, and -inf hides
    key_padding_mask    (B, S), or (S,) without a batch: the same two kinds
    is_causal           a promise that attn_mask is causal, from the top left: the mask is then not read
    bias_k, bias_v, add_zero_attn    keys after the last one, which every query sees
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtri.dispatch.attend import attention
from lowtri.errors import CallError
from lowtri.integrations.dense_mask import read_dense_mask
from lowtri.masks.array_masks import keys, table
from lowtri.masks.formulas import causal, full
from lowtri.masks.mask import Mask
from lowtri.ops.arguments import plain_array

__all__ = ["MultiheadError", "multi_head_attention"]

_NAME = "nn.MultiheadAttention"


class MultiheadError(CallError, AssertionError):
    """Arguments of an ``nn.MultiheadAttention`` that do not fit; torch raises an AssertionError or a RuntimeError for them."""


def multi_head_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: dict[str, Tensor | None],
    *,
    is_causal: bool,
    return_weights: bool,
    engine: str,
) -> tuple[Tensor, Tensor | None]:
    """The output and the weights of each head.

    Args:
        module: the ``nn.MultiheadAttention``.
        query: (L, B, E), or (B, L, E) with ``batch_first``, or (L, E).  key, value: the same with S and their own sizes.
        masks: ``attn_mask`` and ``key_padding_mask``.

    Returns:
        output like query; weights (B, H, L, S), or (H, L, S) without a batch; None unless requested. They are those that the
        output was computed with, so under dropout some are 0, as in torch.

    Raises:
        MultiheadError: for nested tensors, and where torch raises.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise MultiheadError(f"{_NAME}: {name} is {type(x).__name__}. Fix: a torch tensor.")
        if x.is_nested:
            raise MultiheadError(
                f"{_NAME}: {name} is a nested tensor, and lowtri takes padded ones.\n"
                f"Fix: {name}.to_padded_tensor(0.0), and key_padding_mask= with True at the padding."
            )
    if is_causal and masks["attn_mask"] is None:
        raise MultiheadError(
            f"{_NAME}: is_causal=True without attn_mask, which torch requires with it. Fix: attn_mask=."
        )
    batched = query.ndim == 3
    if query.ndim not in (2, 3) or not query.ndim == key.ndim == value.ndim:
        raise MultiheadError(f"{_NAME}: {_shapes(query, key, value)}; all have 3 dimensions, or 2 without a batch.")
    sizes = {"query": module.embed_dim, "key": module.kdim, "value": module.vdim}
    for (name, size), x in zip(sizes.items(), (query, key, value), strict=True):
        if x.shape[-1] != size:
            raise MultiheadError(
                f"{_NAME}: {name} is {tuple(x.shape)}. Fix: a last dimension of {size}, the module's size."
            )
    rows = 0 if module.batch_first else 1  # the batch's dimension
    if key.shape[:-1] != value.shape[:-1] or (batched and query.shape[rows] != key.shape[rows]):
        raise MultiheadError(f"{_NAME}: {_shapes(query, key, value)}. Fix: as many rows, and a value for each key.")
    same, shared = key is value, query is key
    if not batched or not module.batch_first:  # to (B, N, E)
        query, key, value = (x.transpose(0, 1) if batched else x[None] for x in (query, key, value))
    q, k, v = _project(module, query, key, value, same and shared, same)
    attn_mask, padding = _checked(masks, (q.shape[0], module.num_heads, q.shape[1], k.shape[1]), batched, q.dtype)
    added = 0
    if module.bias_k is not None:
        k, v = (torch.cat([x, b.expand(len(x), 1, -1)], 1) for x, b in ((k, module.bias_k), (v, module.bias_v)))
        added += 1
    if module.add_zero_attn:
        k, v, added = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), added + 1
    if added:  # neither True nor a number: every query sees them. The promise of is_causal does not hold for them.
        attn_mask, padding = (None if x is None else F.pad(x, (0, added)) for x in (attn_mask, padding))
    q, k, v = (x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in (q, k, v))  # (B, H, N, D)
    mask, bias, positions = _read(attn_mask, padding, q, k, is_causal and not added)
    dropout = module.dropout if module.training else 0.0
    options: dict[str, Any] = {"bias": bias, "q_positions": positions, "engine": engine}
    if not return_weights:
        output, weights = attention(q, k, v, mask, dropout=dropout, **options), None
    else:
        output, weights = attention(q, k, v, mask, return_weights=True, **options)
        if dropout:  # torch returns the weights after dropout
            weights = F.dropout(weights, dropout)
            output = weights @ v
    output = output.transpose(1, 2).flatten(2)  # (B, L, E)
    output = F.linear(output, module.out_proj.weight, module.out_proj.bias)
    if not batched:
        return output[0], None if weights is None else weights[0]
    return output if module.batch_first else output.transpose(0, 1), weights


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def _project(module: Any, query: Tensor, key: Tensor, value: Tensor, all_same: bool, same: bool) -> list[Tensor]:
    """Queries, keys and values of all heads, (B, N, E); one product where they are the same tensor."""
    joint, bias = module.in_proj_weight, module.in_proj_bias
    if joint is not None and all_same:
        return list(F.linear(query, joint, bias).chunk(3, -1))
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight) if joint is None else joint.chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    if joint is not None and same:
        size = module.embed_dim
        both = F.linear(key, joint[size:], None if bias is None else bias[size:])
        return [F.linear(query, weights[0], biases[0]), *both.chunk(2, -1)]
    return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]


def _checked(
    masks: dict[str, Tensor | None], sizes: tuple[int, int, int, int], batched: bool, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """attn_mask, (L, S) or (B, H, L, S), and key_padding_mask, (B, S)."""
    rows, heads, nq, nk = sizes
    expected = {
        "attn_mask": ((nq, nk), (rows * heads, nq, nk)),
        "key_padding_mask": ((rows, nk),) if batched else ((nk,),),
    }
    found: dict[str, Tensor | None] = {}
    for name, shapes in expected.items():
        x = masks[name]
        if x is not None:
            if not isinstance(x, Tensor):
                raise MultiheadError(
                    f"{_NAME}: {name} is {type(x).__name__}. Fix: a torch tensor, True = hidden; the lowtri mask goes to "
                    "lowtri.nn.MultiHeadAttention."
                )
            if not torch.compiler.is_compiling():
                x = plain_array(name, x, _NAME)
            if x.dtype != torch.bool and not x.is_floating_point():
                raise MultiheadError(
                    f"{_NAME}: {name} is {x.dtype}. Fix: bools, True = hidden, or floats to add to the scores."
                )
            if not any(len(shape) == x.ndim and all(map(operator.eq, shape, x.shape)) for shape in shapes):
                wanted = " or ".join(map(str, shapes))
                raise MultiheadError(f"{_NAME}: {name} is {tuple(x.shape)}; expected {wanted}.")
            x = x if x.dtype == torch.bool else x.to(dtype)
        found[name] = x
    attn_mask, padding = found["attn_mask"], found["key_padding_mask"]
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unflatten(0, (rows, heads))
    return attn_mask, padding if padding is None or batched else padding[None]


def _read(
    attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor, is_causal: bool
) -> tuple[Mask, Tensor | None, Any]:
    """The mask, the bias (B|1, H|1, L|1, S) and the positions of the queries."""
    mask, bias, positions = full(), None, None
    nq, nk = q.shape[2], k.shape[2]
    traced = torch.compiler.is_compiling()
    if is_causal:
        mask = causal()
        if nq != nk:  # torch aligns query 0 with key 0
            positions = torch.arange(nq) if traced else np.arange(nq)
    elif attn_mask is not None and traced:
        visible = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask > -torch.inf
        mask = table(visible)
        bias = None if attn_mask.dtype == torch.bool else attn_mask
        positions = torch.arange(nq) if nq > nk else None
    elif attn_mask is not None:
        lazy, bias = read_dense_mask(attn_mask, nq, nk, q.dtype, true_hides=True)
        mask, positions = lazy.mask, lazy.positions.get("q_positions")
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape))
    if padding is not None:
        visible = ~padding if padding.dtype == torch.bool else padding > -torch.inf
        if traced:
            mask = mask & keys(visible)
        elif not bool(visible.all()):
            shown = keys(visible.detach().cpu().numpy())
            mask = shown if mask == full() else mask & shown
        if padding.dtype != torch.bool and (traced or bool(((padding != 0) & visible).any())):
            bias = padding[:, None, None] if bias is None else bias + padding[:, None, None]
    return mask, bias, positions
