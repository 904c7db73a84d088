"""``flash_attn_interface``, the module of FlashAttention 3: its signatures, for what flash-attn 2 has, too.

Numbers in 8 bits (``q_descale``, ...), ``qv`` and ``attention_chunk`` raise; arguments that tune kernels are accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any

from lowtri.errors import CallError
from lowtri.integrations.flash_attn import functions

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

_NOT_OFFERED = (
    *("qv", "q_descale", "k_descale", "v_descale", "attention_chunk", "seqused_q", "seqused_k"),
    *("cu_seqlens_q", "cu_seqlens_k_new", "rotary_seqlens"),
)
_DESCALES = {"q_descale": None, "k_descale": None, "v_descale": None}
_MASK = {"window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0}
_TUNING: dict[str, Any] = {"num_splits": 1, "pack_gqa": None, "deterministic": False, "sm_margin": 0}
_REST = {
    "softmax_scale": None,
    "causal": False,
    "qv": None,
    **_DESCALES,
    **_MASK,
    **_TUNING,
    "return_attn_probs": False,
}


def _with_signature(function: Callable[..., Any], required: str, defaults: dict[str, Any]) -> Callable[..., Any]:
    """A function of flash-attn 2 with the signature of FlashAttention 3."""
    kind, name = Parameter.POSITIONAL_OR_KEYWORD, function.__name__
    parameters = [Parameter(one, kind) for one in required.split()]
    parameters += [Parameter(one, kind, default=value) for one, value in defaults.items()]
    third, second = Signature(parameters), signature(function).parameters

    def call(*args: Any, **options: Any) -> Any:
        given = third.bind(*args, **options).arguments
        for argument in _NOT_OFFERED:
            if argument not in second and given.get(argument, defaults.get(argument)) != defaults.get(argument):
                raise CallError(f"flash_attn_interface.{name}: {argument} is not offered by lowtri. Fix: leave it out.")
        if "page_table" in given:
            given["block_table"] = given.pop("page_table")
        results = function(**{argument: value for argument, value in given.items() if argument in second})
        return results[:2] if isinstance(results, tuple) else results  # without the weights

    call.__signature__ = third  # type: ignore[attr-defined]
    call.__name__ = call.__qualname__ = name
    call.__doc__ = f":func:`lowtri.integrations.flash_attn.{name}` with the signature of FlashAttention 3."
    return call


flash_attn_func = _with_signature(functions.flash_attn_func, "q k v", _REST)
flash_attn_varlen_func = _with_signature(
    functions.flash_attn_varlen_func,
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    {"seqused_q": None, "seqused_k": None, **_REST},
)
_CACHE = (
    *("k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "page_table"),
    *("cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens", *_DESCALES),
)
flash_attn_with_kvcache = _with_signature(
    functions.flash_attn_with_kvcache,
    "q k_cache v_cache",
    {
        **dict.fromkeys(_CACHE),
        **{"softmax_scale": None, "causal": False, **_MASK, "rotary_interleaved": True, "scheduler_metadata": None},
        **{"num_splits": 0, "pack_gqa": None, "sm_margin": 0, "return_softmax_lse": False},
    },
)
