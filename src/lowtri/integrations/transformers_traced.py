"""The attention of a transformers model under torch.compile and torch.export.

A traced program can neither hold a lazy mask nor read values. In it, the mask is None if it is causal and there is no padding, else a
table as a tensor, and a layer's attention is one operator, ``lowtri::attention``. Calls that the operator does not support run after
a graph break under torch.compile, and raise under torch.export.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtri.dispatch.attend import attention
from lowtri.errors import CallError
from lowtri.integrations.transformers_attend import (
    apply_sinks,
    attend,
    is_causal_layer,
    reject_unsupported,
    weights_requested,
)
from lowtri.integrations.transformers_dense import hidden_threshold, mask_shape
from lowtri.integrations.transformers_lazy import LazyMaskTensor
from lowtri.masks.array_masks import table
from lowtri.masks.mask import Mask

__all__ = ["attend_or_trace", "can_omit_mask"]


def can_omit_mask(q_length: Any, kv_length: Any, q_offset: Any, kv_offset: Any) -> bool:
    """Whether None means the same causal mask to a layer: for queries from position 0 on, or for the newest one alone.

    Sizes may be symbolic; the value of a tensor (the position in a static cache) is not known while tracing.
    """
    if any(isinstance(offset, Tensor) for offset in (q_offset, kv_offset)) or kv_offset != 0:
        return False
    return bool(kv_length == q_length + q_offset and (q_offset == 0 or q_length == 1))


def attend_or_trace(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls in every layer: :func:`~lowtri.integrations.transformers_attend.attend`, or its traceable form.

    Raises:
        CallError: while torch.export traces, for what an exported program cannot contain.
    """
    arguments = (module, query, key, value, attention_mask)
    if not torch.compiler.is_compiling():
        return attend(*arguments, dropout, scaling, **options)
    reject_unsupported(options.pop("cache", None), options)
    selects_keys = options.get("indices") is not None or options.get("block_indices") is not None
    weighted = weights_requested(options.get("output_attentions"))
    if not (dropout or selects_keys or weighted or isinstance(attention_mask, LazyMaskTensor)):
        return _traced(*arguments, scaling, **options)
    if torch.compiler.is_dynamo_compiling():
        return _graph_break(*arguments, dropout, scaling, **options)
    raise CallError(
        f"transformers: lowtri's attention with {_NO_OPERATOR} cannot be an operator of an exported program.\n"
        'Fix: model.eval() and output_attentions=False; or attn_implementation="sdpa" for the export.'
    )


_NO_OPERATOR = "dropout, weights, chosen keys, or a mask that was made outside of the program"
_REASON = {"reason": f"lowtri's attention of a transformers model with {_NO_OPERATOR} runs outside of the program"}
_HAS_REASON = "reason" in inspect.signature(torch.compiler.disable).parameters  # torch 2.6 and 2.7 do not
_graph_break: Callable[..., Any] = torch.compiler.disable(attend, **(_REASON if _HAS_REASON else {}))


def _traced(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    engine: str = "auto",
    **others: Any,
) -> tuple[Tensor, None]:
    if query.shape[0] < key.shape[0]:  # learned queries, one set for the whole batch
        query = query.expand(key.shape[0], *query.shape[1:])
    nq, nk = query.shape[-2], key.shape[-2]
    mask: Mask | str
    bias = position_bias
    if attention_mask is None:
        mask = "causal" if is_causal_layer(module, is_causal, nq) else "full"
    else:
        visible, added = _table(attention_mask, query, nq, nk)
        mask = table(visible)
        if added is not None:
            bias = added if bias is None else bias + added
    # No mask means causal from the top left; a table has its first query there where there are more queries than keys.
    top_left = nq > nk or (attention_mask is None and nq != nk)
    result = attention(
        query,
        key,
        value,
        mask,
        scale=scaling,
        softcap=softcap,
        bias=bias,
        sinks=None if s_aux is None else s_aux.reshape(-1),
        q_positions=torch.arange(nq, device=query.device) if top_left else None,
        return_lse=sinks is not None,
        engine=engine,
    )
    output, _ = apply_sinks(result, False, sinks)
    return output.transpose(1, 2).contiguous(), None


def _table(mask: Tensor, query: Tensor, nq: int, nk: int) -> tuple[Tensor, Tensor | None]:
    """The visible pairs, (Nq, Nk) or with (B,) or (B, H) in front, and the bias, four dimensions or None."""
    mask = mask.reshape(mask_shape(mask, nq, nk))
    visible = mask if mask.dtype == torch.bool else mask > hidden_threshold(mask.dtype, query.dtype)
    visible = visible.expand(*visible.shape[:2], nq, nk)
    if visible.shape[1] == 1:
        visible = visible[0, 0] if visible.shape[0] == 1 else visible[:, 0]
    return visible, None if mask.dtype == torch.bool else mask
