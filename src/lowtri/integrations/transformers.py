"""``attn_implementation="lowtri"`` for the models of the transformers library.

    from lowtri.integrations.transformers import switch, use

    model = switch(AutoModelForCausalLM.from_pretrained(name))
    model(ids, attention_mask="causal & window(4)")    # a lowtri mask for this forward
    use(model, mask="causal & window(4)")              # for all of them, in training and generate, too

``switch(model)`` checks that the model calls the registered attention, as most do. ``register()`` makes the name known without this
check; ``from_pretrained(name, attn_implementation="lowtri")`` then uses it.

An attention implementation of transformers has two parts: one makes the mask of a forward pass from a mask function
(:mod:`~lowtri.integrations.transformers_masks`), the other computes the attention of each layer
(:mod:`~lowtri.integrations.transformers_attend`). Between the two, the mask is a lazy tensor
(:mod:`~lowtri.integrations.transformers_lazy`); dense masks are read by :mod:`~lowtri.integrations.transformers_dense`. Under
torch.compile and torch.export, :mod:`~lowtri.integrations.transformers_traced` replaces both parts.
:mod:`~lowtri.integrations.transformers_use` sets masks of a user's own, :mod:`~lowtri.integrations.transformers_falcon` reaches the
one family with attention code of its own.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from lowtri.compat.transformers_private import has_interface
from lowtri.errors import EngineError
from lowtri.integrations.transformers_attend import attend
from lowtri.integrations.transformers_falcon import is_falcon, switch_layers
from lowtri.integrations.transformers_switched import unwrapped
from lowtri.integrations.transformers_traced import attend_or_trace
from lowtri.integrations.transformers_use import add_hooks, use

__all__ = ["attend", "register", "switch", "use"]


def register(name: str = "lowtri", *, engine: str = "auto") -> None:
    """Register ``attn_implementation=name`` with transformers, for models loaded before and after this call.

    >>> import torch, transformers
    >>> register()
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    ... )
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> ids = torch.randint(99, (1, 12))
    >>> before = model(ids).logits
    >>> model.set_attn_implementation("lowtri")
    >>> bool(torch.allclose(model(ids).logits, before, atol=1e-5))
    True

    Args:
        name: the value of ``attn_implementation``; several names with different engines may be registered.
        engine: as in :func:`lowtri.attention`.

    Raises:
        EngineError: if the name is one of transformers' own, or transformers is too old.

    Source: the documentation of transformers, "Attention interface".
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    from lowtri.integrations.transformers_masks import make_mask

    if name in ("eager", "sdpa", "flex_attention") or "flash" in name or "|" in name:
        raise EngineError(
            f'register: "{name}" is a name of transformers\' own, and models would take it for that. Fix: name="lowtri".'
        )
    if "q_offset" not in sdpa_mask.__code__.co_varnames:
        raise EngineError(
            "register: this transformers makes masks in another way than lowtri was written for. Fix: pip install -U transformers."
        )
    AttentionInterface.register(name, partial(attend_or_trace, engine=engine))
    AttentionMaskInterface.register(name, make_mask)


def switch(model: Any, name: str = "lowtri") -> Any:
    """Switch a model to a registered attention, and check that all its layers use it, which transformers does not check.

    >>> import transformers
    >>> size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    >>> model = switch(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(vocab_size=99, intermediate_size=64, **size)))
    >>> model.config._attn_implementation
    'lowtri'

    Args:
        model: a model of transformers, switched in place.
        name: as registered; "lowtri" is registered if it is not yet.

    Returns:
        the model. Its ``attention_mask`` now also takes a lowtri mask or its text; see :func:`use`.

    Raises:
        EngineError: if the model, or a part of it, has attention code that does not use the attention interface.
    """
    from transformers import AttentionInterface, PreTrainedModel

    if name not in AttentionInterface().valid_keys():
        if name != "lowtri":
            raise EngineError(f'switch: "{name}" is not registered. Fix: register("{name}").')
        register()
    wrapped, model = model, unwrapped(model)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    closed = {type(part).__name__ for part in parts if not (is_falcon(type(part)) or has_interface(part))}
    kinds = {type(part) for part in model.modules() if not is_falcon(type(part))}
    closed |= {kind.__name__ for kind in kinds if _attends_by_itself(kind)}
    if closed or not parts:
        names = ", ".join(sorted(closed)) or type(model).__name__
        raise EngineError(
            f"switch: {names} has attention code of its own and asks no attention interface, "
            f'so "{name}" would never be called.\nFix: keep attn_implementation="eager" or "sdpa" for it.'
        )
    if is_falcon(type(model)):
        switch_layers(model, name)
    else:
        model.set_attn_implementation(name)
    add_hooks(model)
    return wrapped


def _attends_by_itself(layer: Any) -> bool:
    """Whether a layer's own code, as far as it can be read, takes the softmax instead of asking the interface."""
    if "Attention" not in layer.__name__:
        return False
    try:
        code = inspect.getsource(layer.forward)
    except (OSError, TypeError, AttributeError):
        return False
    return ("softmax(" in code or "scaled_dot_product_attention(" in code) and "get_interface(" not in code
