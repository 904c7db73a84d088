"""``nn.MultiheadAttention`` on lowtri's engines, in every module that uses it; and the ``Attend`` of x-transformers.

    from lowtri.integrations.torch import switch

    switch(model)             # every nn.MultiheadAttention inside, so nn.Transformer and its encoder and decoder layers, too
    switch(model, back=True)  # as it was

Arguments keep torch's meanings: True in ``attn_mask`` and ``key_padding_mask`` hides. Weights, names of parameters and checkpoints stay
as they are. torch's fused inference kernels, which compute whole encoder layers, are off in a switched module.
:mod:`~lowtri.integrations.torch_multihead` computes the attention, :mod:`~lowtri.integrations.x_transformers` that of ``Attend``.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn

from lowtri.backends import BACKENDS
from lowtri.errors import EngineError
from lowtri.integrations import x_transformers
from lowtri.integrations.replaced_class import Replaced, replace_forward, restore_forward
from lowtri.integrations.torch_multihead import multi_head_attention

__all__ = ["switch"]

M = TypeVar("M", bound=nn.Module)


def switch(module: M, *, back: bool = False, engine: str = "auto") -> M:
    """Switch every ``nn.MultiheadAttention`` in a model to lowtri, in place.

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> x, future = torch.randn(1, 5, 8), torch.ones(5, 5, dtype=torch.bool).triu(1)
    >>> before = layer(x, src_mask=future)  # True hides
    >>> bool(torch.allclose(switch(layer)(x, src_mask=future), before, atol=1e-5))
    True

    Args:
        module: a model, or an attention module itself.
        back: whether to undo the switch instead.
        engine: as in :func:`lowtri.attention`.

    Returns:
        the module. Outputs and gradients are equal, with two exceptions: a query that sees no key gives the bias of the output
        projection alone, never NaN; and an ``nn.TransformerEncoder`` computes padded positions, where torch's inference kernels
        give 0. Arguments that torch rejects raise an error that is a CallError, and an AssertionError and a RuntimeError as in torch.

    Raises:
        EngineError: if no attention in the module can be switched, one has a ``forward`` of its own, or there is no such engine;
            nothing is switched then.

    Source: the documentation of torch.nn.MultiheadAttention.
    """
    if not isinstance(module, nn.Module):
        raise EngineError(f"switch: the model is {module!r:.60}, but it takes an nn.Module. Fix: an instance of one.")
    if engine not in ("auto", *BACKENDS):
        raise EngineError(f"switch: there is no engine {engine!r}. There are: auto, {', '.join(BACKENDS)}.")
    parts: list[Any] = list(module.modules())
    switched = [part for part in parts if isinstance(part, Replaced) and hasattr(part, "lowtri_engine")]
    if back:
        _switch_back(parts, switched)
        return module
    found = [(part, kind) for part in parts if part not in switched and (kind := _replacement(type(part)))]
    closed = {reason for part, _ in found if (reason := _why_not(part))}
    closed |= x_transformers.needs_similarities(parts)
    if closed or not (found or switched):
        reason = "; ".join(sorted(closed)) or f"{type(module).__name__} contains no nn.MultiheadAttention"
        raise EngineError(
            f"switch: {reason}.\nFix: leave this model to torch. For a model of transformers: lowtri.integrations.transformers.switch."
        )
    for part, kind in found:
        replace_forward(part, kind)
        # An encoder layer whose parts have hooks calls them, instead of torch's fused kernel.
        part.lowtri_hook = part.register_forward_pre_hook(_unchanged)
    for part in (*switched, *(part for part, _ in found)):
        part.lowtri_engine = engine
    for part in _encoders(parts):
        if not hasattr(part, "lowtri_nested"):
            part.lowtri_nested, part.use_nested_tensor = part.use_nested_tensor, False
    return module


def _switch_back(parts: list[Any], switched: list[Any]) -> None:
    for part in switched:
        restore_forward(part)
        part.lowtri_hook.remove()
        del part.lowtri_hook, part.lowtri_engine
    for part in _encoders(parts):
        if hasattr(part, "lowtri_nested"):
            part.use_nested_tensor = part.lowtri_nested
            del part.lowtri_nested


def _encoders(parts: list[Any]) -> list[Any]:
    """The modules that pass nested tensors to their layers."""
    return [part for part in parts if isinstance(part, nn.TransformerEncoder)]


def _unchanged(module: nn.Module, arguments: Any) -> None:
    """A hook that changes nothing."""


def _why_not(part: nn.Module) -> str | None:
    """Why a module cannot be switched, or None."""
    if not isinstance(part, nn.MultiheadAttention):
        return x_transformers.why_not(part)
    if type(part).forward is not nn.MultiheadAttention.forward:
        return f"{type(part).__name__} has a forward of its own, which may compute something else"
    return None


def _replacement(kind: type[nn.Module]) -> type[Replaced] | None:
    """What replaces the forward of a class; None where nothing does."""
    if issubclass(kind, nn.MultiheadAttention):
        return _Multihead
    return _Attend if x_transformers.is_attend(kind) else None


class _Multihead(Replaced):
    lowtri_engine: str

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As of ``nn.MultiheadAttention``, on lowtri's engines."""
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        output, weights = multi_head_attention(
            self, query, key, value, masks, is_causal=is_causal, return_weights=need_weights, engine=self.lowtri_engine
        )
        if weights is not None and average_attn_weights:
            weights = weights.mean(-3)
        return output, weights


class _Attend(Replaced):
    lowtri_engine: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """As of the ``Attend`` of x-transformers, on lowtri's engines."""
        return x_transformers.attend(self, q, k, v, **options, engine=self.lowtri_engine)
