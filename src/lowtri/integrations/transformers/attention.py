"""The attention function that transformers calls in every layer; it passes its arguments on to :func:`lowtri.attention`.

A program that torch.compile or torch.export traces can neither hold a lazy mask nor read values. In it, the mask is None if it is
causal and there is no padding, else a table as a tensor, and a layer's attention is one operator, ``lowtri::attention``. Calls that
the operator does not support run after a graph break under torch.compile, and raise under torch.export.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtri.compat.model_caches import is_ordinary
from lowtri.compat.torch_private import outside_graph
from lowtri.compat.transformers_private import collects_attentions
from lowtri.dispatch.attend import attention
from lowtri.errors import CallError
from lowtri.integrations.dense_mask import LazyMask, read_dense_mask, read_table, top_left_positions
from lowtri.integrations.transformers.lazy import LazyMaskTensor, TraceableMaskTensor
from lowtri.integrations.transformers.packing import TOLD, documents_in_graph, documents_of_layer
from lowtri.integrations.transformers.sharded import attend_sharded
from lowtri.integrations.transformers.traced_cache import TRACED, attend_traced
from lowtri.masks.formulas import causal, full
from lowtri.masks.mask import Mask
from lowtri.ops.call import CallOptions

# Arguments of some models that lowtri's attention does not support; None is accepted.
_UNSUPPORTED = ("head_mask", "layer_head_mask", "alibi", "alibi_slopes", "attn_bias")
# What continuous batching passes on to the layers, where its keys lie: in the cache itself, or (since transformers 5.24) in these.
_PAGED = ("read_index", "write_index", "block_table", "k_cache", "v_cache")
# Further arguments that change the result; what every layer is passed besides is ignored.
_OTHERS = {
    "sinks",
    "position_bias",
    "indices",
    "block_indices",
    "cache",
    "output_attentions",
    *_UNSUPPORTED,
    *_PAGED,
    *TOLD,
}
_NOT_IN_CACHE = {"position_bias", "sinks", "indices", "block_indices", "output_attentions", *_UNSUPPORTED}
_NO_OPERATOR = "dropout, weights, chosen keys, or a mask that was made outside of the program"


class _Options(NamedTuple):
    """The arguments of :func:`attend` besides tensors and the mask, and those that few models pass."""

    dropout: float
    scaling: float | None
    is_causal: bool | None
    softcap: float | None
    s_aux: Tensor | None
    engine: str
    sinks: Tensor | None = None  # (B, Hq, Nq, 1), one for each query
    # Added to the scores, broadcasts against (B, Hq, Nq, Nk); may require a gradient.
    position_bias: Tensor | None = None
    indices: Tensor | None = None  # (B, Nq, n), the keys that an indexer chose
    block_indices: Tensor | None = None  # the same in blocks of the module's size
    cache: Any = None
    output_attentions: bool | None = None  # whether to return the weights


_OF_FEW_MODELS = tuple(_Options._field_defaults)


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
    engine: str = "auto",
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of one layer; called by models of transformers.

    Args:
        module: the layer; its ``is_causal`` decides where no mask is passed.
        query: (B, Hq, Nq, D).  key: (B, Hkv, Nk, D).  value: (B, Hkv, Nk, Dv).
        attention_mask: what :func:`~lowtri.integrations.transformers.masks.make_mask` made, a table by hand, or None.
        dropout, scaling, softcap: as of :func:`lowtri.attention`.
        s_aux: (Hq,), a sink for each head.
        others: what few models pass, see :class:`_Options`.

    Returns:
        output (B, Nq, Hq, Dv), contiguous; weights (B, Hq, Nq, Nk), or None.

    Raises:
        CallError: for an argument that is not supported, none is ignored; while torch.export traces, for what an exported program
            cannot contain.
    """
    if isinstance(attention_mask, TraceableMaskTensor) and torch.compiler.is_dynamo_compiling():
        attention_mask = attention_mask._table  # which the program holds instead
    lazy = attention_mask.lazy if isinstance(attention_mask, LazyMaskTensor) else None
    cached: Any = None if lazy is None else lazy.cache
    traced = TRACED.layer is not None
    if traced or cached is not None:  # an EvictingCache has returned the keys
        # Weights are collected for a whole forward, so its first layer asks.
        if dropout or not _NOT_IN_CACHE.isdisjoint(others) or ((traced or cached.coming) and collects_attentions()):
            _reject_in_cache(module, dropout, others)
        if traced:
            sinks = None if s_aux is None else s_aux.reshape(-1)
            options = CallOptions(scaling, softcap, sinks=sinks, engine=engine)
            output = attend_traced(query, key, value, options)
        else:
            options = _options(scaling, softcap, engine)  # made once for all layers and tokens
            if s_aux is not None:
                options = options._replace(sinks=s_aux.reshape(-1))
            output = cached.attend(module, query, key, value, lazy, options)
        return output.transpose(1, 2).contiguous(), None
    rows, _, nq, _ = query.shape
    key_rows, _, nk, _ = key.shape
    has_others = attention_mask is not None or dropout or not _OTHERS.isdisjoint(others) or collects_attentions()
    if has_others or rows < key_rows or 1 < nq != nk:
        of_few = {name: others.pop(name) for name in _OF_FEW_MODELS if name in others}
        few = _Options(dropout, scaling, is_causal, softcap, s_aux, engine, **of_few)
        return _attend_with(module, query, key, value, attention_mask, few, others)
    # Each layer of each token runs this, so it has no further step. Without a mask, a layer is causal as under transformers' sdpa.
    is_causal_layer = nq > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    mask = "causal" if is_causal_layer else "full"
    sinks = None if s_aux is None else s_aux.reshape(-1)
    output = attention(query, key, value, mask, scale=scaling, softcap=softcap, sinks=sinks, engine=engine)
    return output.transpose(1, 2).contiguous(), None


@lru_cache
def _options(scaling: float | None, softcap: float | None, engine: str) -> CallOptions:
    return CallOptions(scaling, softcap, engine=engine)


def _reject_in_cache(module: Any, dropout: float, others: dict[str, Any]) -> None:
    """Reject what an EvictingCache does not compute."""
    given = [name for name in sorted(_NOT_IN_CACHE) if others.get(name) is not None and others[name] is not False]
    if dropout:
        given.append("dropout")
    if collects_attentions():
        given.append("attention weights")
    if given:
        raise CallError(
            f"EvictingCache: got {given[0]} in {type(module).__name__}, which it does not compute.\n"
            "Fix: model.eval() and output_attentions=False, or transformers.DynamicCache for this model."
        )


def _attend_with(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    options: _Options,
    others: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """:func:`attend` with a mask, or with arguments that few models pass."""
    _reject_unsupported(options.cache, others)
    if options.output_attentions is None:
        weighted = collects_attentions()
    else:
        weighted = bool(options.output_attentions)
    chosen = options.indices is not None or options.block_indices is not None
    traced = torch.compiler.is_compiling()
    if traced and (options.dropout or chosen or weighted or isinstance(attention_mask, LazyMaskTensor)):
        if not torch.compiler.is_dynamo_compiling():
            raise CallError(
                f"transformers: lowtri's attention with {_NO_OPERATOR} cannot be an operator of an exported program.\n"
                'Fix: model.eval() and output_attentions=False; or attn_implementation="sdpa" for the export.'
            )
        return _outside_graph(module, query, key, value, attention_mask, options, others)
    if query.shape[0] < key.shape[0]:  # learned queries, one set for the whole batch
        query = query.expand(key.shape[0], *query.shape[1:])
    nq = query.shape[-2]
    nk = key.shape[-2]
    _check_rows_and_heads(attention_mask, query)
    s_aux = None if options.s_aux is None else options.s_aux.reshape(-1)
    # A layer without a mask is causal from the top left, as under transformers' sdpa.
    is_causal = getattr(module, "is_causal", True) if options.is_causal is None else options.is_causal
    causal_layer = nq > 1 and bool(is_causal)
    mask: Mask | str
    bias: Tensor | None = None
    position_bias = options.position_bias
    positions: dict[str, Any] = {}
    if not traced:
        lazy, bias = _lazy_mask(attention_mask, causal_layer, query, nk)
        lazy = documents_of_layer(lazy, others)
        if lazy.context is not None:
            rejected = {
                "dropout": options.dropout or None,
                "position_bias": position_bias,
                "sinks of single queries": options.sinks,
                "indices": options.indices,
                "block_indices": options.block_indices,
                "output_attentions": weighted or None,
            }
            shared = {"scale": options.scaling, "softcap": options.softcap, "sinks": s_aux, "engine": options.engine}
            return attend_sharded(lazy, (query, key, value), shared, rejected), None
        if chosen:
            lazy = _chosen_keys(module, lazy, options, query, nk, others.get("position_ids"))
        if not weighted and lazy.trimmed is not lazy:
            first = lazy.trimmed.k0 - lazy.k0
            cut = slice(first, first + lazy.trimmed.nk)
            key = key[..., cut, :]
            value = value[..., cut, :]
            bias = _cut_bias(bias, cut)
            position_bias = _cut_bias(position_bias, cut)
            lazy = lazy.trimmed
        mask = lazy.mask
        positions = lazy.positions
    elif (packed := documents_in_graph(others, query.shape[0], nq)) is not None:
        table = _joined_in_graph(packed, attention_mask, causal_layer, nk)
        mask, bias, positions = read_table(table, nq, nk, query.dtype)
    elif attention_mask is not None:
        mask, bias, positions = read_table(attention_mask, nq, nk, query.dtype)
    else:
        mask = "causal" if causal_layer else "full"
        positions = top_left_positions(nq, nk, query.device)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    result: Any = attention(
        query,
        key,
        value,
        mask,
        scale=options.scaling,
        softcap=options.softcap,
        bias=bias,
        sinks=s_aux,
        dropout=options.dropout,
        return_weights=weighted,
        return_lse=options.sinks is not None,
        engine=options.engine,
        **positions,
    )
    output, *rest = result if weighted or options.sinks is not None else (result,)
    weights = rest[0] if weighted else None
    if options.sinks is not None:  # of single queries: applied afterwards, with the log-sum-exp
        share = torch.sigmoid(rest[-1][..., None] - options.sinks.to(rest[-1].dtype))  # (B, Hq, Nq, 1)
        output = (output * share).to(output.dtype)
        weights = None if weights is None else (weights * share).to(weights.dtype)
    return output.transpose(1, 2).contiguous(), weights


_outside_graph = outside_graph(
    _attend_with, f"lowtri's attention of a transformers model with {_NO_OPERATOR} runs outside of the program"
)


def _cut_bias(bias: Tensor | None, keys: slice) -> Tensor | None:
    """The bias of some keys; one number for all keys stays."""
    return bias if bias is None or bias.shape[-1] == 1 else bias[..., keys]


def _check_rows_and_heads(mask: Tensor | None, query: Tensor) -> None:
    """Raise for a table of other rows or heads, also where all of them are equal, so that one would do."""
    if mask is None or mask.ndim != 4 or isinstance(mask, LazyMaskTensor):
        return
    if any(n not in (1, size) for n, size in zip(mask.shape[:2], query.shape[:2], strict=True)):
        raise CallError(
            f"transformers: attention_mask is {tuple(mask.shape)}, but the layer has {query.shape[0]} rows and "
            f"{query.shape[1]} heads: expected (B, H, Nq, Nk), each size or 1."
        )


def _joined_in_graph(documents: Tensor, mask: Tensor | None, causal_layer: bool, nk: int) -> Tensor:
    """The table of documents (B, 1, N, N) and the mask of a layer, while a program is traced."""
    if documents.shape[-1] != nk:
        raise CallError(
            f"transformers: got the documents of {documents.shape[-1]} tokens and {nk} keys in a compiled program.\n"
            "Fix: use_cache=False; or no torch.compile, where caches remember documents."
        )
    if mask is None:
        return documents.tril() if causal_layer else documents
    if mask.dtype == torch.bool:
        return documents & mask
    return torch.where(documents, mask, torch.finfo(mask.dtype).min)


def _lazy_mask(mask: Tensor | None, causal_layer: bool, query: Tensor, nk: int) -> tuple[LazyMask, Tensor | None]:
    """The mask of a layer and the bias in it."""
    nq = query.shape[-2]
    if mask is None:
        return LazyMask(causal() if causal_layer else full(), 0, nq, 0, nk), None
    if isinstance(mask, LazyMaskTensor):
        if (mask.lazy.nq, mask.lazy.nk) == (nq, nk):
            return mask.lazy, None
        mask = mask.materialize()
    return read_dense_mask(mask, nq, nk, query.dtype)


def _chosen_keys(module: Any, lazy: LazyMask, options: _Options, query: Tensor, nk: int, position_ids: Any) -> LazyMask:
    """The keys of a mask that an indexer chose, query by query: a table, for the few models that do so."""
    rows = query.shape[0]
    nq = query.shape[-2]
    device = query.device
    visible = torch.from_numpy(lazy.table().copy()).to(device)  # (B|1, Hq|1, Nq, Nk)
    if options.block_indices is not None:
        positions = torch.arange(nk - nq, nk, device=device) if position_ids is None else position_ids
        positions = (positions if positions.ndim > 1 else positions[None]).expand(rows, -1)
        visible = module.indexer.build_block_mask(options.block_indices, visible, nk, query.dtype, device, positions)
        lazy, _ = read_dense_mask(visible, nq, nk, query.dtype)
        visible = torch.from_numpy(lazy.table().copy()).to(device)
    if options.indices is not None:
        chosen = torch.zeros((rows, nq, nk + 1), dtype=torch.bool, device=device)
        key_or_none = torch.where(options.indices < 0, nk, options.indices).long()
        chosen = chosen.scatter(-1, key_or_none, True)[:, None, :, :nk]
        lazy, _ = read_dense_mask(chosen & visible, nq, nk, query.dtype)
    return lazy


def _reject_unsupported(cache: Any, others: dict[str, Any]) -> None:
    """Reject arguments that would have to be ignored."""
    paged = any(others.get(name) is not None for name in _PAGED)
    if paged or (cache is not None and not is_ordinary(cache)):
        raise CallError(
            "transformers: got a paged cache (continuous batching), which lowtri's attention does not read.\n"
            'Fix: attn_implementation="sdpa" for continuous batching, or model.generate.'
        )
    for name in _UNSUPPORTED:
        if others.get(name) is not None:
            raise CallError(
                f"transformers: the model passes {name}, and lowtri would have to leave it out.\n"
                'Fix: attn_implementation="eager" for this model.'
            )
