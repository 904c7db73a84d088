"""Whether a user's mask can reach every layer of a model of transformers."""

from __future__ import annotations

from typing import Any

from lowtri.compat.transformers_private import attention_name, is_stateful
from lowtri.errors import EngineError

__all__ = ["check_switched"]


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
