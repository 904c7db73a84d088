"""The mask that the config of a transformers model declares, from its first layer to its last."""

from __future__ import annotations

from typing import Any

__all__ = ["declared_mask"]


def declared_mask(config: Any) -> tuple[str, int | None]:
    """What each output may depend on by a model's config, as the text of a mask, and for how many layers it is widened.

    >>> from transformers import Gemma3TextConfig, MistralConfig
    >>> declared_mask(MistralConfig(sliding_window=16, num_hidden_layers=3))
    ('causal & window(16)', 3)
    >>> declared_mask(Gemma3TextConfig(layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2))
    ('causal', None)

    Every layer passes on what it has seen, so a window widens with the layers and chunks do not. Where layers differ, the outputs
    may depend on what any path through them reaches: one layer of full attention makes that all earlier positions.

    Args:
        config: a config of transformers; one with parts for several modalities is read for its text model.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = max(1, int(getattr(text, "num_hidden_layers", None) or 1))
    masks = {_mask_of(kind, text) for kind in _kinds(text, layers)}
    if len(masks) != 1 or masks == {"causal"}:
        return "causal", None
    return masks.pop(), layers


def _kinds(text: Any, layers: int) -> list[str]:
    """The kind of attention of each layer, in transformers' words."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "attention_layers", None)  # the latter: GPT-Neo
    if kinds:
        return [str(kind) for kind in kinds]
    if getattr(text, "use_sliding_window", True) is False:
        return ["full_attention"] * layers
    return ["sliding_attention" if _whole(getattr(text, "sliding_window", None)) else "full_attention"] * layers


def _mask_of(kind: str, text: Any) -> str:
    if kind in ("sliding_attention", "local"):
        n = _whole(getattr(text, "sliding_window", None)) or _whole(getattr(text, "window_size", None))
        return f"causal & window({n})" if n else "causal"
    if kind == "chunked_attention":
        n = _whole(getattr(text, "attention_chunk_size", None))
        return f"causal & chunks({n})" if n else "causal"
    return "causal"  # full attention, and layers that read the whole past without attention


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
