"""A lowtri mask on a switched model of transformers, for one forward or for all.

    model(ids, attention_mask="causal & window(4)")    this forward
    use(model, mask="causal & window(4)")              every forward, in training and generate, too
    use(model, context_parallel=context)               every forward on this process's part of a sequence
    use(model)                                         the model's own mask, and whole sequences, again

The mask replaces the model's own pattern (causal, sliding, chunked) in every attention layer. Padding and packed documents still hide
what they hide; positions count from the first token of a left-padded row, and from the start of each packed document. So a padded or
packed row gives the same as the row alone.

Hooks around the model's forward say which mask applies; :func:`~lowtri.integrations.transformers_masks.make_mask` asks for it.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from lowtri.errors import EngineError
from lowtri.integrations.transformers_functions import RemappedMask
from lowtri.integrations.transformers_generating import is_recomputed
from lowtri.integrations.transformers_lazy import LazyMaskTensor
from lowtri.integrations.transformers_sharded import check_sharded, shard_arguments
from lowtri.integrations.transformers_switched import check_switched
from lowtri.masks.arrays import FrozenArray
from lowtri.masks.formulas import Band, full
from lowtri.masks.mask import Mask
from lowtri.masks.positions import POSITION_MAX
from lowtri.masks.text import as_mask

if TYPE_CHECKING:
    from lowtri.parallel.context import ContextParallel

__all__ = ["GivenMask", "add_hooks", "given_mask", "use"]

M = TypeVar("M")


@dataclass(eq=False)
class GivenMask:
    """The mask of the forward that runs, and whether a layer of the model has asked for it."""

    mask: Mask | None  # None for the model's own, where the sequence is spread over processes
    model: Any
    asked: bool = False
    context: ContextParallel | None = None
    recomputed: bool = False  # for the next token, with one more key

    def placed(self, mask: Mask, valid: Tensor | None, length: int) -> Mask:
        """A mask at positions that count from the first token of each row.

        Args:
            valid: (B, N) bools, True = a token, False = padding; None without padding.
            length: of the longest row, past tokens included.
        """
        if valid is None or isinstance(mask, Band) or mask == full():  # which compare distances only
            return mask
        pads = valid.to("cpu", torch.uint8).numpy().argmax(-1)[:, None]  # (B, 1) in front of the first token
        if not pads.any():
            return mask
        return RemappedMask(mask, FrozenArray(np.maximum(np.arange(length) - pads, 0)))


@dataclass(eq=False)
class _Setting:
    """What :func:`use` has set for a model."""

    model: Any
    mask: Mask | None = None
    context: ContextParallel | None = None
    hooked: bool = (
        False  # whether any forward has had a mask; until then the hooks do nothing, and torch.compile traces them
    )

    def __post_init__(self) -> None:
        _settings.add(self)

    def __deepcopy__(self, memo: Any) -> _Setting:
        return _Setting(copy.deepcopy(self.model, memo), self.mask, self.context)


_settings: WeakSet[_Setting] = WeakSet()
_running: ContextVar[tuple[GivenMask, ...]] = ContextVar("lowtri_transformers_masks", default=())


def given_mask(config: Any) -> GivenMask | None:
    """The mask of the forward that runs, or that ``generate`` prepares; None if there is none.

    Args:
        config: of the part that makes a mask. It is the model's, or that of its text; parts for images keep their own masks.
    """
    running = _running.get()
    if running:
        return running[-1] if _is_of(config, running[-1].model) else None
    for setting in _settings:
        if setting.mask is not None and _is_of(config, setting.model):
            return GivenMask(setting.mask, setting.model)
    return None


def _is_of(config: Any, model: Any) -> bool:
    return config is not None and (config is model.config or config is model.config.get_text_config())


def use(model: M, mask: Mask | str | None = None, *, context_parallel: ContextParallel | None = None) -> M:
    """Set the mask of a switched model, or the processes that share its sequences, in place, for every forward from now on.

    >>> import torch, transformers
    >>> from lowtri.integrations.transformers import switch, use
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    ... )
    >>> model = switch(transformers.LlamaForCausalLM(config).eval())
    >>> ids = torch.randint(99, (1, 12))
    >>> once = model(ids, attention_mask="causal & window(4)").logits
    >>> always = use(model, mask="causal & window(4)")(ids).logits
    >>> torch.equal(once, always), torch.equal(use(model, mask=None)(ids).logits, always)
    (True, False)

    With ``context_parallel``, each process calls ``model(ids, labels=labels)`` with the whole sequences, (B, n), or with its own
    tokens as ``ids``. The logits are those of its own tokens, and no cache is made, whatever the config's ``use_cache``. The loss is
    its part: the sum over its targets, divided by the number of targets of all processes; the parts of all processes add up to the
    loss. ``num_items_in_batch=`` replaces that number where other processes have other rows. DDP and FSDP average gradients over
    processes: multiply the loss by their number.

    Args:
        model: a model of transformers, after :func:`switch`. It is the model that is called: for a language model the whole of
            it, not its inner decoder.
        mask: a mask or its text; None for the model's own.
        context_parallel: a :class:`lowtri.parallel.ContextParallel`, whose plan has the masks of all layers; None for whole
            sequences in this process.

    Returns:
        the model.

    Raises:
        EngineError: if the model is not switched, or has layers that no mask reaches: encoder-decoders and recurrent layers; with
            ``context_parallel`` also if its positions cannot be given, or its rotary embedding depends on the length of the input.
        CallError: if the plan lacks the mask. From a later forward, where a cache cannot serve the mask: if the mask shows earlier
            queries keys that came only after them (in ``generate`` also without a cache), or keys that the model's own cache has
            dropped. With ``context_parallel`` for padding, caches, dropout, ``logits_to_keep`` and labels of a part of the sequence.
            Whatever one process raises in such a forward, the others raise as a CallError.
    """
    checked = None if mask is None else as_mask(mask, "use: mask")
    if checked is not None or context_parallel is not None:
        check_switched(model, "use")
    if context_parallel is not None:
        check_sharded(model, context_parallel, checked)
    add_hooks(model)
    setting: _Setting = model.lowtri_setting  # type: ignore[attr-defined]
    setting.mask, setting.context = checked, context_parallel
    return model


def add_hooks(model: Any) -> None:
    """Let a model's forward take masks; once for each model."""
    if not hasattr(model, "lowtri_setting"):
        model.lowtri_setting = _Setting(model)
        model.register_forward_pre_hook(_before, with_kwargs=True)
        model.register_forward_hook(_after, with_kwargs=True, always_call=True)


# The hooks around a model's forward.


@cache
def _place_of_mask(forward: Any) -> int:
    """The place of ``attention_mask`` among the positional arguments of a model's forward."""
    names = list(inspect.signature(forward).parameters)
    return names.index("attention_mask") - 1 if "attention_mask" in names else POSITION_MAX


def _before(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take the mask of this forward from its arguments."""
    setting = model.lowtri_setting
    own = setting.mask is None and setting.context is None
    own = own and not any(isinstance(x, str | Mask) for x in (kwargs.get("attention_mask"), *args))
    return None if own else _begin_eagerly(model, args, kwargs)


def _after(model: Any, args: Any, kwargs: Any, output: Any) -> None:
    """End the forward; it has raised if there is no output."""
    if model.lowtri_setting.hooked:
        _end_eagerly(model, output)


def _begin(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    context: ContextParallel | None = model.lowtri_setting.context
    if context is None:
        return _arguments(model, args, kwargs)
    try:
        begun = _arguments(model, args, kwargs)
    except Exception as error:
        context.share_error(type(model).__name__, error)
        raise
    context.share_error(type(model).__name__, None)
    return begun


def _arguments(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    setting: _Setting = model.lowtri_setting
    mask, given = setting.mask, kwargs.get("attention_mask")
    if len(args) > 1:
        place = _place_of_mask(type(model).forward)
        given = args[place] if place < len(args) else given
    if isinstance(given, str | Mask):
        mask = as_mask(given, "attention_mask")
        check_switched(model, "attention_mask")
        args = tuple(None if x is given else x for x in args)
        kwargs = {**kwargs, "attention_mask": None} if "attention_mask" in kwargs else kwargs
    if setting.context is not None:
        args, kwargs = shard_arguments(model, setting.context, mask, args, kwargs)
        setting.hooked = True
        _running.set((*_running.get(), GivenMask(mask, model, context=setting.context)))
    elif mask is not None:
        setting.hooked = True
        made = given.values() if isinstance(given, dict) else [given]  # by generate, for each kind of layer
        asked = any(isinstance(x, LazyMaskTensor) and x.lazy.given is mask for x in made)
        _running.set((*_running.get(), GivenMask(mask, model, asked, recomputed=is_recomputed(model, kwargs))))
    return args, kwargs


def _end(model: Any, output: Any) -> None:
    running = _running.get()
    if not running or running[-1].model is not model:
        return
    _running.set(running[:-1])
    unused, name, context = None, type(model).__name__, running[-1].context
    if output is not None and not running[-1].asked:
        unused = EngineError(
            f"transformers: {name} made no mask in this forward, so {_name(running[-1])} was not applied.\n"
            "Fix: attention_mask=None or a table of two dimensions; no torch.compile; and switch(model) if it was switched elsewhere."
        )
    if context is not None:
        context.share_error(name, unused if output is not None else sys.exc_info()[1])
    if unused is not None:
        raise unused


def _name(given: GivenMask) -> str:
    return "context_parallel" if given.mask is None else repr(given.mask)


# torch.compile does not trace these two: they change a context variable.
_begin_eagerly: Callable[..., Any] = torch.compiler.disable(_begin)
_end_eagerly: Callable[..., Any] = torch.compiler.disable(_end)
