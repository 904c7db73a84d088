"""Falcon, the family of transformers whose layers choose their attention code when they are built, from a table of its own.

So ``set_attn_implementation`` does not reach them. Their forward is replaced by one that calls the registered attention.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from lowtri.compat.transformers_private import attention_name, set_attention_name, split_heads
from lowtri.errors import EngineError
from lowtri.integrations.replaced_class import Replaced, replace_forward

__all__ = ["is_falcon", "switch_layers"]

_FILE = "transformers.models.falcon.modeling_falcon"


def is_falcon(kind: type) -> bool:
    """Whether a class is one of the models or layers of Falcon."""
    return kind.__module__ == _FILE


def switch_layers(model: Any, name: str) -> None:
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
        if not isinstance(layer, Replaced):
            replace_forward(layer, _Attention)
    set_attention_name(model, name)


class _Attention(Replaced):
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
            q, k = importlib.import_module(_FILE).apply_rotary_pos_emb(q, k, *position_embeddings)
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        attend = AttentionInterface()[attention_name(self)]
        dropout = self.attention_dropout.p if self.training and alibi is not None else 0.0
        output, weights = attend(
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
