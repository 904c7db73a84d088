"""``attn_implementation="lowtri"`` for the models of the transformers library: its registration, and the switch of a model.

Falcon is the family whose layers choose their attention code when they are built, from a table of its own, so that
``set_attn_implementation`` does not reach them. Their forward is replaced by one that calls the registered attention.
"""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from typing import Any

from torch import Tensor

from lowtri.compat.transformers_private import attention_name, has_interface, set_attention_name, split_heads
from lowtri.errors import EngineError
from lowtri.integrations.replaced_class import SwappedForward, replace_forward
from lowtri.integrations.transformers.attention import attend
from lowtri.integrations.transformers.masks import make_mask
from lowtri.integrations.transformers.user_masks import add_hooks, unwrapped

_FALCON = "transformers.models.falcon.modeling_falcon"


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

    if name in ("eager", "sdpa", "flex_attention") or "flash" in name or "|" in name:
        raise EngineError(
            f'register: "{name}" is a name of transformers\' own, and models would take it for that. Fix: name="lowtri".'
        )
    if "q_offset" not in sdpa_mask.__code__.co_varnames:
        raise EngineError(
            "register: this transformers makes masks in another way than lowtri was written for. Fix: pip install -U transformers."
        )
    AttentionInterface.register(name, partial(attend, engine=engine))
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
    closed = {type(part).__name__ for part in parts if not (_is_falcon(type(part)) or has_interface(part))}
    kinds = {type(part) for part in model.modules() if not _is_falcon(type(part))}
    closed |= {kind.__name__ for kind in kinds if _attends_by_itself(kind)}
    if closed or not parts:
        names = ", ".join(sorted(closed)) or type(model).__name__
        raise EngineError(
            f"switch: {names} has attention code of its own and asks no attention interface, "
            f'so "{name}" would never be called.\nFix: keep attn_implementation="eager" or "sdpa" for it.'
        )
    if _is_falcon(type(model)):
        _switch_falcon(model, name)
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


def _is_falcon(kind: type) -> bool:
    """Whether a class is one of the models or layers of Falcon."""
    return kind.__module__ == _FALCON


def _switch_falcon(model: Any, name: str) -> None:
    """Let the layers of a Falcon call the attention that is registered under a name.

    Raises:
        EngineError: if the model was built for the package flash_attn.
    """
    layers = [
        part
        for part in model.modules()
        if type(part).__name__.startswith("Falcon") and hasattr(part, "query_key_value")
    ]
    if any(type(layer).__name__ != "FalconAttention" for layer in layers):
        raise EngineError(
            'switch: this Falcon was built for flash attention. Fix: load it with attn_implementation="eager".'
        )
    for layer in layers:
        if not isinstance(layer, SwappedForward):
            replace_forward(layer, _FalconAttention)
    set_attention_name(model, name)


class _FalconAttention(SwappedForward):
    def forward(
        self: Any,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As of ``FalconAttention``. With ALiBi, the mask is additive and holds it already, as for torch's attention."""
        from transformers import AttentionInterface

        q, k, v = (x.transpose(1, 2) for x in split_heads(self, self.query_key_value(hidden_states)))  # (B, H, N, D)
        if alibi is None and position_embeddings is not None:
            q, k = importlib.import_module(_FALCON).apply_rotary_pos_emb(q, k, *position_embeddings)
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        registered = AttentionInterface().get_interface(str(attention_name(self)), attend)
        dropout = self.attention_dropout.p if self.training and alibi is not None else 0.0
        output, weights = registered(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=dropout,
            scaling=self.inv_norm_factor,
            output_attentions=output_attentions,
        )
        return self.dense(output.flatten(2)), weights
