"""torch's ``flex_attention`` on CPU, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lowtri.backends.formula import FormulaCall
from lowtri.compat.torch_private import outside_graph
from lowtri.dispatch.attend import attention
from lowtri.dispatch.prepared import cast_for_autocast, without_autocast
from lowtri.errors import CallError
from lowtri.integrations.dense_mask import top_left_positions
from lowtri.integrations.flex.masks import check_function, mask_of
from lowtri.integrations.flex.scores import read_score_mod, tile_function
from lowtri.masks.formulas import full
from lowtri.masks.mask import Mask
from lowtri.masks.tile import check_flag
from lowtri.ops.arguments import describe
from lowtri.ops.call import CallOptions

_NAME = "flex_attention"


@outside_graph
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """torch's ``flex_attention`` with torch's arguments and meanings, with gradients on CPU.

    >>> from lowtri.integrations.flex import create_block_mask
    >>> q = torch.randn(1, 2, 300, 16, requires_grad=True)
    >>> slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    >>> blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, 300, 300, device="cpu")
    >>> output = flex_attention(q, q, q, lambda score, b, h, q, k: score + slopes[h] * (k - q), blocks)
    >>> output.square().sum().backward()
    >>> q.grad.shape, slopes.grad.shape
    (torch.Size([1, 2, 300, 16]), torch.Size([2]))

    Args:
        query: (B, Hq, L, E).  key: (B, Hkv, S, E).  value: (B, Hkv, S, Ev).
        score_mod: ``score_mod(score, b, h, q, k)``, the new score. Factors, a soft cap, conditions that give -inf, and biases that
            depend on q - k, on q or on k alone, or are a captured table of pairs, run in the kernels. Any other function is applied
            in torch, one tile of scores at a time. Tensors that it captures get gradients.
        block_mask: torch's BlockMask, from either create_block_mask, from :func:`block_mask`, or from ``BlockMask.from_kv_blocks``.
        scale: factor on the scores; 1 / sqrt(E) by default.
        enable_gqa: whether neighbouring query heads may share a key/value head.
        return_lse: also return the log-sum-exp (B, Hq, L).
        kernel_options: ignored; they set up torch's GPU kernels.
        return_aux: torch's ``AuxRequest``; on CPU ``lse`` alone, as in torch.

    Returns:
        the output (B, Hq, L, Ev); with ``return_lse`` a tuple of output and log-sum-exp, with ``return_aux`` of output and
        ``AuxOutput``. A query that sees no key gives 0, and -inf as log-sum-exp.

    Tensors on an accelerator are passed to torch's own function, compiled. Inside ``torch.compile`` a call runs outside of the graph.

    Raises:
        CallError: where torch also raises, and for a block mask of other batch rows or heads than the call's or 1, whose lists torch
            would read past their ends. It is a ValueError and a RuntimeError, as in torch.

    Source: Dong et al. 2024, Flex Attention; the documentation of torch.nn.attention.flex_attention.
    """
    enable_gqa, return_lse = check_flag(_NAME, "enable_gqa", enable_gqa), check_flag(_NAME, "return_lse", return_lse)
    _check(query, key, value, block_mask, enable_gqa)
    if score_mod is not None:
        check_function(_NAME, "score_mod", score_mod)
    if scale is not None and not isinstance(scale, int | float | np.integer | np.floating):
        raise CallError(f"{_NAME}: scale is {type(scale).__name__}, but it takes one plain number. Fix: float(scale).")
    if return_aux is not None and not hasattr(return_aux, "max_scores"):
        raise CallError(f"{_NAME}: return_aux is {type(return_aux).__name__}. Fix: AuxRequest(lse=True).")
    if return_aux is not None and return_lse:
        raise CallError(f"{_NAME}: return_lse and return_aux exclude each other. Fix: return_aux=AuxRequest(lse=True).")
    if query.device.type != "cpu":
        options = {"scale": scale, "enable_gqa": enable_gqa, "kernel_options": kernel_options}
        if return_lse:
            options["return_lse"] = True
        elif return_aux is not None:
            options["return_aux"] = return_aux
        return _torchs()(query, key, value, score_mod, block_mask, **options)
    if return_aux is not None and return_aux.max_scores:
        raise CallError(
            f"{_NAME}: return_aux asks for max_scores, which torch has on accelerators alone. Fix: AuxRequest(lse=True)."
        )
    wants_lse = return_lse if return_aux is None else return_aux.lse
    output, lse = _attend(query, key, value, score_mod, block_mask, scale, wants_lse)
    if return_aux is None:
        return (output, lse) if return_lse else output
    from torch.nn.attention.flex_attention import AuxOutput

    return output, AuxOutput(lse)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, blocks: BlockMask | None, scale: float | None, wants_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """The output and the log-sum-exp, None if it is not wanted."""
    batch, heads = q.shape[:2]
    nq, nk = q.shape[2], k.shape[2]
    if k.shape[0] != batch:
        k, v = (x.expand(batch, -1, -1, -1) for x in (k, v))
    shape = (batch, heads, nq, nk)
    mask: Mask = full() if blocks is None else mask_of(blocks, shape)
    dtype = torch.promote_types(cast_for_autocast(q, k, v)[1][0].dtype, torch.float32)
    scores = read_score_mod(score_mod, shape, q.device, dtype)
    if scores.mask is not None:
        mask = mask & scores.mask if blocks is not None else scores.mask
    positions = top_left_positions(nq, nk)  # FlexAttention's q and k are indices from 0
    if scores.in_kernel:
        factor = (q.shape[3] ** -0.5 if scale is None else float(scale)) * scores.factor
        options: dict[str, Any] = {"scale": factor, "softcap": scores.softcap, "bias": scores.bias, **positions}
        if wants_lse:
            return attention(q, k, v, mask, return_lse=True, **options)
        return attention(q, k, v, mask, **options), None
    device, arrays = cast_for_autocast(q, k, v)
    q, k, v = arrays
    call, inputs = describe(q, k, v, mask, CallOptions(scale, return_lse=True)._replace(**positions))
    with without_autocast(device):
        result = FormulaCall(call, tile_function(score_mod)).run(inputs)
    return result.output, result.lse if wants_lse else None


def _check(q: Any, k: Any, v: Any, blocks: Any, enable_gqa: bool) -> None:
    if not all(isinstance(x, Tensor) and x.ndim == 4 for x in (q, k, v)):
        shapes = ", ".join(
            f"{n} {tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}"
            for n, x in zip(("query", "key", "value"), (q, k, v), strict=True)
        )
        raise CallError(f"{_NAME}: {shapes}; all are tensors (B, H, N, D). Fix: x[None] adds a dimension.")
    if blocks is not None and not isinstance(blocks, BlockMask):
        raise CallError(
            f"{_NAME}: block_mask is {type(blocks).__name__}, but it takes a BlockMask.\n"
            "Fix: create_block_mask for a mask_mod; lowtri.integrations.flex.block_mask for a mask of lowtri."
        )
    if q.shape[3] != k.shape[3] or q.shape[3] == 0:
        raise CallError(
            f"{_NAME}: query is {tuple(q.shape)} and key {tuple(k.shape)}. Fix: the same head size, the last dimension, at least 1."
        )
    if not enable_gqa and q.shape[1] != k.shape[1]:
        raise CallError(
            f"{_NAME}: {q.shape[1]} query heads and {k.shape[1]} key heads. Fix: enable_gqa=True if they are shared."
        )
    if q.shape[0] != k.shape[0] and (k.shape[0] != 1 or blocks is None or blocks.kv_num_blocks.shape[0] != q.shape[0]):
        raise CallError(
            f"{_NAME}: query has {q.shape[0]} batch rows and key {k.shape[0]}.\n"
            f"Fix: as many, or one row of keys and a block_mask made with B={q.shape[0]}."
        )


@cache
def _torchs() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention as torchs

    compiled: Callable[..., Any] = torch.compile(torchs)
    return compiled
