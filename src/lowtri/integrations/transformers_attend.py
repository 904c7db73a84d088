"""The attention function that transformers calls in every layer; it passes its arguments on to :func:`lowtri.attention`."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from lowtri.compat.transformers_private import collects_attentions
from lowtri.dispatch.attend import attention
from lowtri.errors import CallError
from lowtri.integrations.transformers_dense import read_dense_mask
from lowtri.integrations.transformers_lazy import LazyMask
from lowtri.integrations.transformers_sharded import attend_sharded
from lowtri.masks.formulas import causal, full

__all__ = ["apply_sinks", "attend", "is_causal_layer", "reject_unsupported", "weights_requested"]

_log = logging.getLogger("lowtri.integrations.transformers")
_warned: set[str] = set()

# Arguments of some models that lowtri's attention does not support; None is accepted.
_REFUSED = ("head_mask", "layer_head_mask", "alibi", "alibi_slopes", "attn_bias")


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    cache: Any = None,
    output_attentions: bool | None = None,
    engine: str = "auto",
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of one layer; called by models of transformers.

    Args:
        module: the layer; its ``is_causal`` decides where no mask is passed.
        query: (B, Hq, Nq, D).  key: (B, Hkv, Nk, D).  value: (B, Hkv, Nk, Dv).
        attention_mask: what :func:`~lowtri.integrations.transformers_masks.make_mask` made, a table by hand, or None.
        dropout, scaling, softcap: as of :func:`lowtri.attention`.
        s_aux: (Hq,), a sink for each head.  sinks: (B, Hq, Nq, 1), one for each query.
        position_bias: added to the scores, broadcasting against (B, Hq, Nq, Nk); may require a gradient.
        indices: (B, Nq, n), the keys that an indexer chose.  block_indices: the same in blocks of the module's size.
        output_attentions: whether to return the weights.

    Returns:
        output (B, Nq, Hq, Dv), contiguous; weights (B, Hq, Nq, Nk), or None.

    Raises:
        CallError: for an argument that is not supported; none is ignored.
    """
    reject_unsupported(cache, others)
    if query.shape[0] < key.shape[0]:  # learned queries, one set for the whole batch
        query = query.expand(key.shape[0], *query.shape[1:])
    nq, nk = query.shape[-2], key.shape[-2]
    bias: Tensor | None = None
    if attention_mask is None:
        lazy = LazyMask(causal() if is_causal_layer(module, is_causal, nq) else full(), 0, nq, 0, nk)
    else:
        lazy, bias = read_dense_mask(attention_mask, nq, nk, query.dtype)
    weighted = weights_requested(output_attentions)
    if lazy.context is not None:
        refused = {"dropout": dropout or None, "position_bias": position_bias, "sinks of single queries": sinks}
        refused |= {"indices": indices, "block_indices": block_indices, "output_attentions": weighted or None}
        return attend_sharded(lazy, (query, key, value), scaling, softcap, s_aux, engine, refused), None
    if block_indices is not None:
        position_ids = _position_ids(others, nq, nk, query)
        visible = _dense_table(lazy, query.device)
        visible = module.indexer.build_block_mask(block_indices, visible, nk, query.dtype, query.device, position_ids)
        lazy, _ = read_dense_mask(visible, nq, nk, query.dtype)
    if indices is not None:
        chosen = torch.zeros((query.shape[0], nq, nk + 1), dtype=torch.bool, device=query.device)
        chosen = chosen.scatter(-1, torch.where(indices < 0, nk, indices).long(), True)[:, None, :, :nk]
        lazy, _ = read_dense_mask(chosen & _dense_table(lazy, query.device), nq, nk, query.dtype)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    if not weighted and lazy.trimmed is not lazy:
        cut = slice(lazy.trimmed.k0 - lazy.k0, lazy.trimmed.k0 - lazy.k0 + lazy.trimmed.nk)
        key, value = key[..., cut, :], value[..., cut, :]
        bias = bias[..., cut] if bias is not None and bias.shape[-1] > 1 else bias
        lazy = lazy.trimmed
    if dropout:
        _warn_once(
            "dropout: the kernels do not drop weights, so training with dropout runs on torch's attention or the formula."
        )
    result = attention(
        query,
        key,
        value,
        lazy.mask,
        scale=scaling,
        softcap=softcap,
        bias=bias,
        sinks=None if s_aux is None else s_aux.reshape(-1),
        dropout=dropout,
        return_weights=weighted,
        return_lse=sinks is not None,
        engine=engine,
        **lazy.positions,
    )
    output, weights = apply_sinks(result, weighted, sinks)
    return output.transpose(1, 2).contiguous(), weights


def is_causal_layer(module: Any, is_causal: bool | None, nq: int) -> bool:
    """Whether a layer without a mask is causal, from the top left, as under transformers' sdpa."""
    return nq > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _dense_table(lazy: LazyMask, device: Any) -> Tensor:
    """The table of pairs, (B|1, Hq|1, Nq, Nk), for the few models that choose keys query by query."""
    return torch.from_numpy(lazy.table().copy()).to(device)


def _position_ids(others: dict[str, Any], nq: int, nk: int, query: Tensor) -> Tensor:
    positions = others.get("position_ids")
    if positions is None:
        positions = torch.arange(nk - nq, nk, device=query.device)
    return (positions if positions.ndim > 1 else positions[None]).expand(query.shape[0], -1)


def apply_sinks(result: Any, weighted: bool, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Output and weights; sinks of single queries are applied afterwards, with the log-sum-exp."""
    if not weighted and sinks is None:
        return result, None
    output, *rest = result
    weights = rest[0] if weighted else None
    if sinks is not None:
        share = torch.sigmoid(rest[-1][..., None] - sinks.to(rest[-1].dtype))  # (B, Hq, Nq, 1)
        output = (output * share).to(output.dtype)
        weights = None if weights is None else (weights * share).to(weights.dtype)
    return output, weights


def weights_requested(output_attentions: bool | None) -> bool:
    """Whether weights are requested: by the model, or by transformers, which collects them from the layers."""
    if output_attentions is not None:
        return bool(output_attentions)
    return collects_attentions()


def reject_unsupported(cache: Any, others: dict[str, Any]) -> None:
    """Reject arguments that would have to be ignored."""
    if cache is not None:
        raise CallError(
            "transformers: a paged cache came (continuous batching), which lowtri's attention does not read.\n"
            'Fix: attn_implementation="sdpa" for continuous batching, or model.generate.'
        )
    for name in _REFUSED:
        if others.get(name) is not None:
            raise CallError(
                f"transformers: the model passes {name}, and lowtri would have to leave it out.\n"
                'Fix: attn_implementation="eager" for this model.'
            )


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _log.warning(message)
