"""``nn.MultiheadAttention`` on lowtri's engines, in every module that uses it.

    from lowtri.integrations.torch import switch

    switch(model)             # every nn.MultiheadAttention inside, so nn.Transformer and its encoder and decoder layers, too
    switch(model, back=True)  # as it was

Weights, names of parameters and checkpoints stay as they are. torch's fused inference kernels, which compute whole encoder layers, are
off in a switched module. torch's meanings of arguments stay, too; this file translates them:

    attn_mask           (L, S) or (B * H, L, S). Bools: True hides. Floats are added to the scores, and -inf hides
    key_padding_mask    (B, S), or (S,) without a batch: the same two kinds
    is_causal           a promise that attn_mask is causal, from the top left: the mask is then not read
    bias_k, bias_v, add_zero_attn    keys after the last one, which every query sees
"""

from __future__ import annotations

from lowtri.extras import require

require("lowtri.integrations.torch", "torch")

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtri.backends import BACKENDS
from lowtri.dispatch.attend import attention
from lowtri.dispatch.dense_tables import with_half_of_the_lowest
from lowtri.errors import CallError, EngineError
from lowtri.integrations.dense_mask import join, read_pairs, top_left_positions
from lowtri.integrations.replaced_class import SwappedForward, replace_forward, restore_forward
from lowtri.masks.formulas import causal, full
from lowtri.masks.mask import Mask
from lowtri.masks.tile import check_flag, short_repr
from lowtri.ops.arguments import plain_array

__all__ = ["MultiheadError", "switch"]

M = TypeVar("M", bound=nn.Module)

_NAME = "nn.MultiheadAttention"


class MultiheadError(CallError, AssertionError):
    """Arguments of an ``nn.MultiheadAttention`` that do not fit; torch raises an AssertionError or a RuntimeError for them."""


def switch(module: M, *, back: bool = False, engine: str = "auto") -> M:
    """Switch every ``nn.MultiheadAttention`` in a model to lowtri, in place.

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> x, future = torch.randn(1, 5, 8), torch.ones(5, 5, dtype=torch.bool).triu(1)
    >>> before = layer(x, src_mask=future)  # True hides
    >>> bool(torch.allclose(switch(layer)(x, src_mask=future), before, atol=1e-5))
    True

    Args:
        module: a model, or an attention module itself.
        back: whether to undo the switch instead.
        engine: as in :func:`lowtri.attention`.

    Returns:
        the module. Outputs and gradients are equal, with two exceptions: a query that sees no key gives the bias of the output
        projection alone, never NaN; and an ``nn.TransformerEncoder`` computes padded positions, where torch's inference kernels
        give 0. Arguments that torch rejects raise an error that is a CallError, and an AssertionError and a RuntimeError as in torch.

    Raises:
        EngineError: if no attention in the module can be switched, one has a ``forward`` of its own, or there is no such engine;
            nothing is switched then.

    Source: the documentation of torch.nn.MultiheadAttention.
    """
    if not isinstance(module, nn.Module):
        raise EngineError(f"switch: the model is {module!r:.60}, but it takes an nn.Module. Fix: an instance of one.")
    if not isinstance(engine, str) or engine not in ("auto", *BACKENDS):
        raise EngineError(f"switch: there is no engine {short_repr(engine)}. There are: auto, {', '.join(BACKENDS)}.")
    parts: list[Any] = list(module.modules())
    switched: list[Any] = [x for x in parts if isinstance(x, SwappedForward) and hasattr(x, "lowtri_engine")]
    if back:
        _switch_back(parts, switched)
        return module
    attentions: list[Any] = [x for x in parts if isinstance(x, nn.MultiheadAttention) and x not in switched]
    closed = {type(x).__name__ for x in attentions if type(x).forward is not nn.MultiheadAttention.forward}
    if closed or not (attentions or switched):
        reason = f"{type(module).__name__} contains no nn.MultiheadAttention"
        if closed:
            reason = f"{', '.join(sorted(closed))} has a forward of its own, which may compute something else"
        raise EngineError(
            f"switch: {reason}.\nFix: leave this model to torch. For a model of transformers: lowtri.integrations.transformers.switch."
        )
    for part in attentions:
        replace_forward(part, _Multihead)
        # An encoder layer whose parts have hooks calls them, instead of torch's fused kernel.
        part.lowtri_hook = part.register_forward_pre_hook(_unchanged)
    for part in (*switched, *attentions):
        part.lowtri_engine = engine
    for part in _encoders(parts):
        if not hasattr(part, "lowtri_nested"):
            part.lowtri_nested, part.use_nested_tensor = part.use_nested_tensor, False
    return module


def _switch_back(parts: list[Any], switched: list[Any]) -> None:
    for part in switched:
        restore_forward(part)
        part.lowtri_hook.remove()
        del part.lowtri_hook, part.lowtri_engine
    for part in _encoders(parts):
        if hasattr(part, "lowtri_nested"):
            part.use_nested_tensor = part.lowtri_nested
            del part.lowtri_nested


def _encoders(parts: list[Any]) -> list[Any]:
    """The modules that pass nested tensors to their layers."""
    return [part for part in parts if isinstance(part, nn.TransformerEncoder)]


def _unchanged(module: nn.Module, arguments: Any) -> None:
    """A hook that changes nothing."""


class _Multihead(SwappedForward):
    lowtri_engine: str

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As of ``nn.MultiheadAttention``, on lowtri's engines. The weights are (B, L, S), of each head (B, H, L, S).

        They are those that the output was computed with, so under dropout some are 0, as in torch.
        """
        if not torch.compiler.is_compiling():
            is_causal = check_flag(_NAME, "is_causal", is_causal, MultiheadError)
            need_weights = check_flag(_NAME, "need_weights", need_weights, MultiheadError)
            average_attn_weights = check_flag(_NAME, "average_attn_weights", average_attn_weights, MultiheadError)
        _check_inputs(self, query, key, value)
        if is_causal and attn_mask is None:
            raise MultiheadError(
                f"{_NAME}: is_causal=True without attn_mask, which torch requires with it. Fix: attn_mask=."
            )
        batched = query.ndim == 3
        same, shared = key is value, query is key
        if not batched or not self.batch_first:  # to (B, N, E)
            query, key, value = (x.transpose(0, 1) if batched else x[None] for x in (query, key, value))
        q, k, v = _project(self, query, key, value, same and shared, same)
        rows, nq = q.shape[:2]
        nk, heads = k.shape[1], self.num_heads
        pairs = _checked("attn_mask", attn_mask, ((nq, nk), (rows * heads, nq, nk)), q.dtype)
        if pairs is not None:
            pairs = pairs.reshape(1, 1, nq, nk) if pairs.ndim == 2 else pairs.reshape(rows, heads, nq, nk)
        padding = _checked("key_padding_mask", key_padding_mask, ((rows, nk) if batched else (nk,),), q.dtype)
        if padding is not None:
            padding = padding[:, None, None] if batched else padding[None, None, None]
        if self.bias_k is not None:
            k, v = (torch.cat([x, b.expand(rows, 1, -1)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        if added := k.shape[1] - nk:
            # Neither True nor a number: every query sees them. The promise of is_causal does not hold for them.
            pairs, padding = (None if x is None else F.pad(x, (0, added)) for x in (pairs, padding))
            is_causal = False
        q, k, v = (x.view(rows, x.shape[1], heads, -1).transpose(1, 2) for x in (q, k, v))  # (B, H, N, D)
        mask, bias, positions = _read_masks(pairs, padding, q, k, is_causal)
        dropout = self.dropout if self.training else 0.0
        options: dict[str, Any] = {"bias": bias, "engine": self.lowtri_engine, **positions}
        weights = None
        if not need_weights:
            output = attention(q, k, v, mask, dropout=dropout, **options)
        else:
            output, weights = attention(q, k, v, mask, return_weights=True, **options)
            if dropout:  # torch returns the weights after dropout
                weights = F.dropout(weights, dropout)
                output = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        output = F.linear(output.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)  # (B, L, E)
        if not batched:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.transpose(0, 1), weights


def _check_inputs(module: Any, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless the inputs of a module fit together."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise MultiheadError(f"{_NAME}: {name} is {type(x).__name__}. Fix: a torch tensor.")
        if x.is_nested:
            raise MultiheadError(
                f"{_NAME}: {name} is a nested tensor, and lowtri takes padded ones.\n"
                f"Fix: {name}.to_padded_tensor(0.0), and key_padding_mask= with True at the padding."
            )
    if query.ndim not in (2, 3) or not query.ndim == key.ndim == value.ndim:
        raise MultiheadError(f"{_NAME}: {_shapes(query, key, value)}; all have 3 dimensions, or 2 without a batch.")
    for name, x, size in (("query", query, module.embed_dim), ("key", key, module.kdim), ("value", value, module.vdim)):
        if x.shape[-1] != size:
            raise MultiheadError(
                f"{_NAME}: {name} is {tuple(x.shape)}. Fix: a last dimension of {size}, the module's size."
            )
    rows = 0 if module.batch_first else 1  # the batch's dimension
    if key.shape[:-1] != value.shape[:-1] or (query.ndim == 3 and query.shape[rows] != key.shape[rows]):
        raise MultiheadError(f"{_NAME}: {_shapes(query, key, value)}. Fix: as many rows, and a value for each key.")


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


def _checked(name: str, mask: Tensor | None, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> Tensor | None:
    """A mask of one of these shapes: bools, or numbers in the dtype of the queries."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise MultiheadError(
            f"{_NAME}: {name} is {type(mask).__name__}. Fix: a torch tensor, True = hidden; the lowtri mask goes to "
            "lowtri.nn.MultiHeadAttention."
        )
    if not torch.compiler.is_compiling():
        mask = plain_array(name, mask, _NAME)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise MultiheadError(
            f"{_NAME}: {name} is {mask.dtype}. Fix: bools, True = hidden, or floats to add to the scores."
        )
    if not any(mask.shape == shape for shape in shapes):  # torch.compile does not follow `in`
        wanted = " or ".join(map(str, shapes))
        raise MultiheadError(f"{_NAME}: {name} is {tuple(mask.shape)}; expected {wanted}.")
    return mask if mask.dtype == torch.bool else mask.to(dtype)


def _read_masks(
    pairs: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor, is_causal: bool
) -> tuple[Mask, Tensor | None, dict[str, Any]]:
    """The mask, the bias (B|1, H|1, L|1, S) and the positions in attn_mask, (B|1, H|1, L, S), and in the padding, (B, 1, 1, S)."""
    mask: Mask = full()
    bias: Tensor | None = None
    positions: dict[str, Any] = {}
    nq, nk = q.shape[2], k.shape[2]
    if is_causal:
        mask, positions = causal(), top_left_positions(nq, nk)
    elif pairs is not None:
        mask, bias, positions = read_pairs(pairs, nq, nk, q.dtype, (_NAME, "attn_mask"), True, padding is None)
    if padding is not None:
        alone = pairs is None and not is_causal
        valid, added, _ = read_pairs(padding, nq, nk, q.dtype, (_NAME, "key_padding_mask"), True, alone)
        mask = join(mask, valid)
        # Two of the lowest numbers are less than one of them, and hide beside it.
        numbers = [with_half_of_the_lowest(x) for x in (bias, added) if x is not None]
        bias = sum(numbers[1:], numbers[0]) if numbers else None
    return mask, bias, positions
