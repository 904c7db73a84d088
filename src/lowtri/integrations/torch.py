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

import operator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtri.backends import BACKENDS
from lowtri.dispatch.attend import attention
from lowtri.errors import CallError, EngineError
from lowtri.integrations.dense_mask import join, read_table, top_left_positions
from lowtri.integrations.replaced_class import SwappedForward, replace_forward, restore_forward
from lowtri.masks.formulas import causal, full
from lowtri.masks.mask import Mask
from lowtri.masks.tile import check_flag, short_repr
from lowtri.ops.arguments import plain_array
from lowtri.ops.dense_tables import with_half_of_the_lowest

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
    closed = {reason for part in attentions if (reason := _why_not(part))}
    if closed or not (attentions or switched):
        reason = "; ".join(sorted(closed)) or f"{type(module).__name__} contains no nn.MultiheadAttention"
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


def _why_not(part: nn.Module) -> str | None:
    """Why a module cannot be switched, or None."""
    if type(part).forward is not nn.MultiheadAttention.forward:
        return f"{type(part).__name__} has a forward of its own, which may compute something else"
    return None


class _Multihead(SwappedForward):
    lowtri_engine: str

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As of ``nn.MultiheadAttention``, on lowtri's engines."""
        flags = {"is_causal": is_causal, "need_weights": need_weights, "average_attn_weights": average_attn_weights}
        for name, flag in flags.items():
            if type(flag) is not bool and not torch.compiler.is_compiling():
                flags[name] = check_flag(_NAME, name, flag, MultiheadError)
        is_causal, need_weights = flags["is_causal"], flags["need_weights"]
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        output, weights = _multi_head_attention(
            self, query, key, value, masks, is_causal=is_causal, return_weights=need_weights, engine=self.lowtri_engine
        )
        if weights is not None and flags["average_attn_weights"]:
            weights = weights.mean(-3)
        return output, weights


# The attention of a module: its projections, its masks, its options.


def _multi_head_attention(
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
    """The output and the weights of each head, (B, H, L, S), or (H, L, S) without a batch; None unless requested.

    The weights are those that the output was computed with, so under dropout some are 0, as in torch.
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
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        added += 1
    if added:  # neither True nor a number: every query sees them. The promise of is_causal does not hold for them.
        attn_mask, padding = (None if x is None else F.pad(x, (0, added)) for x in (attn_mask, padding))
    q, k, v = (x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in (q, k, v))  # (B, H, N, D)
    mask, bias, positions = _read_masks(attn_mask, padding, q, k, is_causal and not added)
    dropout = module.dropout if module.training else 0.0
    options: dict[str, Any] = {"bias": bias, "engine": engine, **positions}
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
    rows, heads = sizes[:2]
    nq, nk = sizes[2:]
    expected = {
        "attn_mask": ((nq, nk), (rows * heads, nq, nk)),
        "key_padding_mask": ((rows, nk),) if batched else ((nk,),),
    }
    checked: dict[str, Tensor | None] = {}
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
        checked[name] = x
    attn_mask, padding = checked["attn_mask"], checked["key_padding_mask"]
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unflatten(0, (rows, heads))
    return attn_mask, padding if padding is None or batched else padding[None]


def _read_masks(
    attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor, is_causal: bool
) -> tuple[Mask, Tensor | None, dict[str, Any]]:
    """The mask, the bias (B|1, H|1, L|1, S) and the positions."""
    mask: Mask = full()
    bias: Tensor | None = None
    positions: dict[str, Any] = {}
    nq, nk = q.shape[2], k.shape[2]
    if is_causal:
        mask, positions = causal(), top_left_positions(nq, nk)
    elif attn_mask is not None:
        name = _NAME, "attn_mask"
        mask, bias, positions = read_table(attn_mask, nq, nk, q.dtype, True, name, lowest_hides=padding is None)
    if padding is not None:
        name, alone = (_NAME, "key_padding_mask"), attn_mask is None and not is_causal
        valid, added, _ = read_table(padding[:, None, None], nq, nk, q.dtype, True, name, lowest_hides=alone)
        mask = join(mask, valid)
        # Two of the lowest numbers are less than one of them, and hide beside it.
        numbers = [with_half_of_the_lowest(x) for x in (bias, added) if x is not None]
        bias = sum(numbers[1:], numbers[0]) if numbers else None
    return mask, bias, positions
