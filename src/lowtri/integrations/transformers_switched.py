"""The model inside of its wrappers, and whether a user's mask can reach every layer of it."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from lowtri.compat.torch_private import inside_compiled
from lowtri.compat.transformers_private import attention_name, is_stateful
from lowtri.errors import EngineError

__all__ = ["check_switched", "unwrapped"]


def unwrapped(model: Any) -> Any:
    """The model inside of torch.compile, DistributedDataParallel and FullyShardedDataParallel."""
    while isinstance(model, Module):
        inner = inside_compiled(model)  # torch.compile's wrapper has all attributes of the model
        if inner is None and not hasattr(model, "config"):
            inner = getattr(model, "module", None)
        if inner is None:
            break
        model = inner
    return model


def check_switched(model: Any, where: str) -> None:
    """Raise unless all layers of a model are attention of lowtri.

    Raises:
        EngineError: with the reason.
    """
    name = attention_name(model)
    if name is None or name not in _registered_names():
        raise EngineError(f'{where}: the model\'s attention is "{name}". Fix: switch(model) first.')
    reason = "an encoder-decoder has three attentions, and one mask does not say which it means"
    if not getattr(model.config, "is_encoder_decoder", False):
        reason = "its recurrent layers see every earlier token, whatever the mask" if is_stateful(model) else ""
    if reason:
        raise EngineError(f"{where}: {type(model).__name__}: {reason}.\nFix: the model's own mask.")


def _registered_names() -> set[str]:
    """The names under which lowtri is registered with transformers."""
    from transformers import AttentionInterface

    from lowtri.integrations.transformers_traced import attend_or_trace

    interface = AttentionInterface()
    return {name for name in interface.valid_keys() if getattr(interface[name], "func", None) is attend_or_trace}
