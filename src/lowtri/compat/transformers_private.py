"""Private functions of transformers, under plain names; ``tested`` lists the versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def known_mask_function(name: str, *arguments: Any) -> Callable[..., Any] | None:
    """``masking_utils.<name>``, called if there are arguments; None in versions without it.

    Which variables these functions close over is documented nowhere; :mod:`lowtri.integrations.transformers.masks` compares what it
    reads from them with their values.
    """
    from transformers import masking_utils

    function: Callable[..., Any] | None = getattr(masking_utils, name, None)
    return function(*arguments) if function is not None and arguments else function


def collects_attentions() -> bool:
    """Whether the model that runs collects its layers' attention weights: it no longer tells the layers.

    True in versions that do not collect: layers then return the weights always, as eager attention does.
    """
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return True
    collected = _active_collector.get()
    return collected is not None and any("attentions" in name for name in collected)


def has_interface(model: Any) -> bool:
    """Whether a part of a model calls the attention that is registered; True if this version does not say."""
    return bool(getattr(model, "_can_set_attn_implementation", lambda: True)())


def attention_name(model: Any) -> str | None:
    """The attention implementation that a model has, which ``set_attn_implementation`` changes; None for other models."""
    name: str | None = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return name


def set_attention_name(model: Any, name: str) -> None:
    """Set the attention implementation of a model whose class does not let ``set_attn_implementation`` do so: Falcon."""
    model.config._attn_implementation = name


def split_heads(layer: Any, fused: Any) -> tuple[Any, Any, Any]:
    """Queries, keys and values (B, N, H, D) of a layer of Falcon, from the output of its joint projection.

    Their order in that output depends on three fields of the configuration.
    """
    parts: tuple[Any, Any, Any] = layer._split_heads(fused)
    return parts


def is_stateful(model: Any) -> bool:
    """Whether a model's cache cannot go back: recurrent and hybrid models."""
    return bool(getattr(model, "_is_stateful", False))
