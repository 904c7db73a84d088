"""The ``Attend`` module of the package x-transformers on :func:`lowtri.attention`, for :func:`lowtri.integrations.torch.switch`.

x-transformers' meanings, which this file translates:

    mask           True = may see, (B, S) or (B|1, H|1, L|1, S)
    causal         the last query is aligned with the last key, as in lowtri
    heads          query head h uses key/value head h % Hkv, where lowtri's (and torch's) uses h // (Hq // Hkv)
    attn_bias      added after the scale; a softclamp is applied to the sum
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtri.dispatch.attend import attention
from lowtri.errors import CallError
from lowtri.integrations.dense_mask import join, read_table
from lowtri.masks.formulas import causal as causal_mask
from lowtri.masks.formulas import full
from lowtri.masks.mask import Mask

__all__ = ["attend", "is_attend", "needs_similarities", "why_not"]

# Attributes of Attend that change the formula of attention; lowtri's has none of them.
_OTHER_FORMULAS = (
    "inverted_attention",
    "pre_softmax_talking_heads",
    "post_softmax_talking_heads",
    "pre_scale_post_talking_heads",
    "selective",
    "cog_signed",
    "l2_distance",
    "cope",
    "flash_pack_seq",
)


def is_attend(kind: type[nn.Module]) -> bool:
    """Whether a class is the package's ``Attend``; the package is not imported."""
    return kind.__name__ == "Attend" and kind.__module__ == "x_transformers.attend"


def why_not(part: Any) -> str | None:
    """Why an ``Attend`` cannot be switched, or None."""
    used = [name for name in _OTHER_FORMULAS if getattr(part, name, None) not in (None, False)]
    softmax: Any = part.attn_fn
    while hasattr(softmax, "func"):
        softmax = softmax.func
    if softmax is not F.softmax:
        used.append("a function other than softmax")
    return f"Attend has {', '.join(used)}, which lowtri's attention does not compute" if used else None


def needs_similarities(parts: Iterable[nn.Module]) -> set[str]:
    """Layers that add the scores of an earlier layer, which a switched ``Attend`` does not return."""
    names = ("residual_attn", "cross_residual_attn")
    used = {name for part in parts for name in names if type(part).__module__ == "x_transformers.x_transformers"
            and getattr(part, name, False) is True}  # fmt: skip
    return {f"{name}=True adds the scores of an earlier layer, which are not computed" for name in used}


def attend(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    causal: bool | None = None,
    engine: str = "auto",
    **others: Any,
) -> tuple[Tensor, Any]:
    """The output (B, Hq, L, Dv) and the package's ``Intermediates``, empty as from its flash attention.

    Args:
        module: the ``Attend``, which has the options.
        q: (B, Hq, L, D).  k: (B, Hkv, S, D).  v: (B, Hkv, S, Dv).
        mask, attn_bias, causal: as described at the top of this file.

    Raises:
        CallError: for inputs that lowtri's attention has no place for.
    """
    given = [name for name in ("prev_attn", "attn_delta", "flash_pack_seq_kwargs") if others.get(name) is not None]
    if given or (module.softclamp_logits and attn_bias is not None):
        reason = f"got {given[0]}" if given else "got attn_bias with softclamp_logits, which clamps their sum"
        raise CallError(f"Attend: {reason}, and lowtri would have to leave it out.\nFix: switch(model, back=True).")
    causal = module.causal if causal is None else causal
    heads, kv_heads = q.shape[1], k.shape[1]
    k, v = (F.pad(x, (0, 0, 1, 0)) if module.add_zero_kv else x for x in (k, v))
    if mask is not None:
        mask = mask[:, None, None] if mask.ndim == 2 else mask
        mask = F.pad(mask, (1, 0), value=True) if module.add_zero_kv else mask
    if attn_bias is not None:
        attn_bias = attn_bias.reshape((1,) * (4 - attn_bias.ndim) + tuple(attn_bias.shape))
        attn_bias = F.pad(attn_bias, (1, 0)) if module.add_zero_kv else attn_bias
    sinks = module.head_attn_sink
    regroup = 1 < kv_heads < heads
    if regroup:  # heads of one group become neighbours
        order = torch.arange(heads, device=q.device).reshape(-1, kv_heads).T.flatten()
        q, mask, attn_bias = q[:, order], _per_head(mask, order), _per_head(attn_bias, order)
        sinks = None if sinks is None else sinks[order]
    visible, positions = _read_mask(mask, causal and q.shape[2] > 1, q, k)
    output = attention(
        q,
        k,
        v,
        visible,
        scale=module.scale,
        softcap=module.logit_softclamp_value if module.softclamp_logits else None,
        bias=attn_bias,
        sinks=sinks,
        dropout=module.dropout if module.training else 0.0,
        engine=engine,
        **positions,
    )
    output = output[:, order.argsort()] if regroup else output
    return output, sys.modules["x_transformers.attend"].Intermediates()


def _per_head(x: Tensor | None, order: Tensor) -> Tensor | None:
    return x if x is None or x.shape[1] == 1 else x[:, order]


def _read_mask(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> tuple[Mask, dict[str, Any]]:
    formula = causal_mask() if causal else full()
    if mask is None:
        return formula, {}
    shown, _, positions = read_table(mask, q.shape[2], k.shape[2], q.dtype, name=("Attend", "mask"))
    return join(shown, formula) if causal else shown, positions
