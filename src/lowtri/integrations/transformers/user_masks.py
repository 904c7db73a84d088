"""A lowtri mask on a switched model of transformers, for one forward or for all.

    model(ids, attention_mask="causal & window(4)")    this forward
    use(model, mask="causal & window(4)")              every forward, in training and generate, too
    use(model, context_parallel=context)               every forward on this process's part of a sequence
    use(model)                                         the model's own mask, and whole sequences, again

The mask replaces the model's own pattern (causal, sliding, chunked) in every attention layer. Padding and packed documents still hide
what they hide; positions count from the first token of a left-padded row, and from the start of each packed document. So a padded or
packed row gives the same as the row alone.

The setting is an attribute of the model and of the models inside it (a language model's decoder). Hooks around their forwards make it
the mask of the forward that runs, for which :func:`~lowtri.integrations.transformers.masks.make_mask` then makes masks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import torch
from torch.nn import Module

from lowtri.compat.model_caches import CACHE_NAMES, cache_argument
from lowtri.compat.torch_private import assert_in_graph, inside_compiled, outside_graph
from lowtri.compat.transformers_private import attention_name, is_stateful
from lowtri.errors import CallError, EngineError
from lowtri.generation.slots import row_masks, visible_pair
from lowtri.integrations.transformers.lazy import LazyMaskTensor
from lowtri.integrations.transformers.packing import (
    Packing,
    begins_anew_in_graph,
    is_next_token,
    is_table,
    read_packing,
    remember,
)
from lowtri.integrations.transformers.sharded import check_sharded, shard_arguments
from lowtri.integrations.transformers.traced_cache import TRACED, begin_forward, end_forward, packed_rows
from lowtri.masks.formulas import first
from lowtri.masks.mask import Mask
from lowtri.masks.text import as_mask
from lowtri.masks.tile import EMPTY, POSITION_MAX

if TYPE_CHECKING:
    from lowtri.parallel.context import ContextParallel

M = TypeVar("M")


@dataclass(eq=False)
class ModelMask:
    """What :func:`use` has set; shared by a model and the models inside it. A deep copy of the model gets its own."""

    mask: Mask | None = None
    context: ContextParallel | None = None
    applied: bool = False  # whether a forward has had a mask; until then torch.compile traces the hooks
    first_positions: frozenset[int] | None = None  # with which a document may begin

    def __deepcopy__(self, memo: Any) -> ModelMask:
        return ModelMask(self.mask, self.context)  # which has process groups: they cannot be copied


@dataclass(eq=False)
class Forward:
    """A running forward of a switched model: its mask and documents, and whether a mask was made for it."""

    model: Any
    mask: Mask | None  # None for the model's own
    context: ContextParallel | None
    in_generate_without_cache: bool  # which computes the whole row again for the next token, with one more key
    outer: Forward | None  # the forward that contains this one
    packing: Packing | None = None
    named: dict[str, Any] = field(default_factory=dict)  # the arguments, by name
    cache: Any = None  # an EvictingCache
    mask_was_built: bool = False

    @property
    def has_own_attention(self) -> bool:
        """Whether it is the model's own, with nothing set."""
        return self.mask is None and self.context is None and self.packing is None and self.cache is None

    @property
    def required(self) -> bool:
        """Whether it is wrong without a mask that is made for it. Under a table of all pairs, the layers read the documents; and
        without a cache and padding, transformers finds those of the positions by itself."""
        if self.mask is not None or self.context is not None or self.cache is not None:
            return True
        given = self.named.get("attention_mask")
        if self.packing is None or is_table(given):
            return False
        by_transformers = given is None and self.packing.told_by == "position_ids"
        return not by_transformers or uses_cache(self.model, self.named)

    @property
    def crosses(self) -> bool:
        """Whether it has layers of cross-attention, whose keys are no tokens of the rows."""
        return self.named.get("encoder_hidden_states") is not None

    @property
    def cache_argument(self) -> str:
        """What the model's cache is called."""
        return cache_argument(parameter_names(type(self.model).forward), self.model) or CACHE_NAMES[0]


_current: ContextVar[Forward | None] = ContextVar("lowtri_transformers_forward", default=None)


def current_forward(config: Any) -> Forward | None:
    """The forward that runs.

    Args:
        config: of the part of the model that makes a mask. Only masks of its text are replaced: parts for images keep theirs.
    """
    forward = _current.get()
    return forward if forward is not None and _is_text(config, forward.model) else None


def _is_text(config: Any, model: Any) -> bool:
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
        model: a model of transformers, after :func:`switch`; also inside of torch's wrappers (DDP, FSDP, torch.compile). A decoder
            inside it has the setting, too, where it is called alone; other models, also with the same config, do not.
        mask: a mask or its text; None for the model's own.
        context_parallel: a :class:`lowtri.parallel.ContextParallel`, whose plan has the masks of all layers; None for whole
            sequences in this process.

    Returns:
        the model.

    Raises:
        EngineError: if the model is not switched, or has layers that no mask reaches: encoder-decoders and recurrent layers; with
            ``context_parallel`` also if its positions cannot be given, or its rotary embedding depends on the length of the input.
        CallError: if the plan lacks the mask. From a later forward, where a cache cannot serve the mask: if the mask shows earlier
            queries keys that are computed only after them (in ``generate`` also without a cache), or keys that the model's own
            cache has dropped. With ``context_parallel`` for padding, caches, dropout, ``logits_to_keep`` and labels of a part of
            the sequence. Whatever one process raises in such a forward, the others raise as a CallError.
    """
    checked = None if mask is None else as_mask(mask, "use: mask")
    inner = unwrapped(model)
    if checked is not None or context_parallel is not None:
        check_switched(inner, "use")
    if context_parallel is not None:
        check_sharded(inner, context_parallel, checked)
    add_hooks(inner)
    setting: ModelMask = inner.lowtri_mask
    setting.mask = checked
    setting.context = context_parallel
    setting.applied = False
    return model


def add_hooks(model: Any) -> None:
    """Let the forward of a model, and of the models inside it, take masks; once for each."""
    from transformers import PreTrainedModel

    setting = getattr(model, "lowtri_mask", None) or ModelMask()
    inside = [part for part in model.modules() if isinstance(part, PreTrainedModel) and _is_text(part.config, model)]
    for part in (model, *inside):
        if not hasattr(part, "lowtri_mask"):
            part.lowtri_mask = setting
            part.register_forward_pre_hook(_before, with_kwargs=True)
            part.register_forward_hook(_after, with_kwargs=True, always_call=True)


# The hooks around a model's forward.


@cache
def parameter_names(forward: Any) -> tuple[str, ...]:
    """The parameters of a model's forward, without the model."""
    return tuple(inspect.signature(forward).parameters)[1:]


def _place_of_mask(forward: Any) -> int:
    """The place of ``attention_mask`` among the positional arguments of a model's forward."""
    names = parameter_names(forward)
    return names.index("attention_mask") if "attention_mask" in names else POSITION_MAX


def _before(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Begin a forward, whose mask may be among its arguments."""
    setting = model.lowtri_mask
    traced = torch.compiler.is_dynamo_compiling()
    outer = None if traced else _current.get()
    if outer is not None and outer.model is not model and outer.model.lowtri_mask is setting:
        return None  # a part of the model that runs
    evicting = _evicting_cache(kwargs)
    if evicting is not None:
        if traced and setting.context is None:
            begin_forward(model, evicting, args, kwargs)
            return None
        return _begin_eagerly(model, args, kwargs)
    own = setting.mask is None and setting.context is None
    own = own and not isinstance(kwargs.get("attention_mask"), _MASKS) and not (args and _has_mask(args))
    if own and torch.compiler.is_compiling():
        _check_traced_positions(model, kwargs)
        return None
    if own and len(args) < 2 and outer is None and is_next_token(args[0] if args else None, kwargs):
        return None  # nothing is set, here or around
    return _begin_eagerly(model, args, kwargs)


_MASKS = (str, Mask)
_MADE = (dict, LazyMaskTensor)  # masks that were made before the forward


def _evicting_cache(named: Mapping[str, Any]) -> Any:
    """The EvictingCache among the arguments of a forward, if there is one."""
    for name in CACHE_NAMES[:2]:
        value = named.get(name)
        if value is not None and getattr(value, "evicts_by_mask", False):
            return value
    return None


def _has_mask(args: tuple[Any, ...]) -> bool:
    return any(isinstance(x, _MASKS) for x in args)


def _after(model: Any, args: Any, kwargs: Any, output: Any) -> None:
    """End the forward; it has raised if there is no output."""
    if torch.compiler.is_dynamo_compiling():
        if _evicting_cache(kwargs) is not None:
            end_forward(model)
            return
        running = model.lowtri_mask.applied
    else:
        forward = _current.get()
        running = forward is not None and forward.model is model
    if running:
        _end_eagerly(model, output)


def _begin(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    outer = _current.get()
    if outer is not None and outer.model is model:
        outer = outer.outer  # KeyboardInterrupt ended that forward without its hook
    if outer is not None and _is_text(model.config, outer.model) and any(x is model for x in outer.model.modules()):
        return None  # a part of the model that runs
    context: ContextParallel | None = model.lowtri_mask.context
    if context is None:
        return _arguments(model, args, kwargs, outer)
    try:
        begun = _arguments(model, args, kwargs, outer)
    except Exception as error:
        context.share_error(type(model).__name__, error)
        raise
    context.share_error(type(model).__name__, None)
    return begun


def _arguments(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outer: Forward | None) -> Any:
    """Make this forward the current one; its arguments without its mask, and for the tokens of this process."""
    setting: ModelMask = model.lowtri_mask
    mask = setting.mask
    given = kwargs.get("attention_mask")
    kwargs = dict(kwargs)
    if len(args) > 1:
        place = _place_of_mask(type(model).forward)
        given = args[place] if place < len(args) else given
    if isinstance(given, str | Mask):
        mask = as_mask(given, "attention_mask")
        check_switched(model, "attention_mask")
        args = tuple(None if x is given else x for x in args)
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = None
    named = {**dict(zip(parameter_names(type(model).forward), args, strict=False)), **kwargs}
    if setting.context is not None:
        args, kwargs = shard_arguments(model, setting.context, mask, args, kwargs)
    again = mask is not None and setting.context is None and _in_generate_without_cache(model, kwargs)
    evicting = _evicting_cache(named)
    is_next = evicting is not None and len(args) < 2 and is_next_token(args[0] if args else None, kwargs)
    packing = None if setting.context is not None or is_next else _packing(model, named, mask)
    forward = Forward(model, mask, setting.context, again, outer, packing, named, evicting)
    if evicting is not None:
        _begin_in_cache(forward)
    setting.applied |= mask is not None or setting.context is not None
    _current.set(forward)
    made = kwargs.get("attention_mask")
    if isinstance(made, _MADE) and not forward.has_own_attention:  # by generate
        try:
            kwargs["attention_mask"] = _materialized_for_forward(made)
        except Exception:
            _current.set(outer)
            raise
    return args, kwargs


def _begin_in_cache(forward: Forward) -> None:
    """Let an EvictingCache know where the tokens of a forward stand."""
    if forward.packing is not None:
        raise packed_rows(forward.packing.told_by)
    forward.cache.check_mask(forward.mask)
    named = forward.named
    if named.get("cache") is forward.cache and forward.cache_argument != "cache":  # which this forward would pass over
        taken = forward.cache_argument
        raise CallError(
            f"EvictingCache: got cache=, but {type(forward.model).__name__} takes its cache as {taken}.\nFix: {taken}=cache."
        )
    ids = named.get("input_ids")
    tokens = ids if isinstance(ids, torch.Tensor) else named["inputs_embeds"]
    forward.cache.begin(tokens.shape[0], tokens.shape[1], named.get("attention_mask"))
    TRACED.begin(forward.model, forward.cache)  # a program may be a part of this forward


def _materialized_for_forward(made: Any) -> Any:
    """Masks that were made before the forward began, made for the forward; a dictionary has one for each kind of layer."""
    if isinstance(made, dict):
        return {name: _materialized_for_forward(x) for name, x in made.items()}
    return made.lazy.materialize() if isinstance(made, LazyMaskTensor) and made.lazy.materialize is not None else made


def _end(model: Any, output: Any) -> None:
    forward = _current.get()
    if forward is None or forward.model is not model:
        return
    _current.set(forward.outer)
    unused, name = None, type(model).__name__
    if output is not None and forward.packing is not None:
        _remember(forward, output)
    made = forward.mask_was_built or (forward.cache is not None and forward.cache.has_attended)
    if forward.cache is not None:
        TRACED.end()
        if output is not None:
            forward.cache.end()
    if output is not None and not made and forward.required:
        applied = "context_parallel" if forward.mask is None else repr(forward.mask)
        if forward.packing is not None and forward.mask is None:
            applied = repr(forward.packing.mask)
        unused = EngineError(
            f"transformers: {name} made no mask in this forward, so {applied} was not applied.\n"
            "Fix: attention_mask=None or a table of two dimensions; no torch.compile; and switch(model) if it was switched elsewhere."
        )
    if forward.context is not None:
        forward.context.share_error(name, unused if output is not None else sys.exc_info()[1])
    if unused is not None:
        raise unused


# torch.compile does not trace these two: they change a context variable.
_begin_eagerly, _end_eagerly = outside_graph(_begin), outside_graph(_end)


# Documents in packed rows.


def uses_cache(model: Any, named: Mapping[str, Any]) -> bool:
    """Whether a forward with these arguments has a cache, so that transformers does not look for packed rows."""
    given = named.get("use_cache")
    on = getattr(model.config.get_text_config(), "use_cache", False) if given is None else given
    return bool(on) or any(hasattr(named.get(name), "get_mask_sizes") for name in CACHE_NAMES)


def _packing(model: Any, named: Mapping[str, Any], mask: Mask | None) -> Packing | None:
    """The documents that the arguments of a forward say."""
    if isinstance(named.get("cu_seq_lens_k"), dict):
        return None  # continuous batching: its attention functions read the bounds themselves

    def looks_for_jumps() -> bool:
        unmasked = mask is None and named.get("attention_mask") is None
        return (
            unmasked and not uses_cache(model, named) and any(getattr(x, "is_causal", False) for x in model.modules())
        )

    packing = read_packing(named, lambda: _first_positions(model), looks_for_jumps)
    if packing is not None and getattr(model.config, "is_encoder_decoder", False):
        raise CallError(
            f"transformers: got {packing.told_by} of packed rows, but {type(model).__name__} is an encoder-decoder, which has three "
            "attentions.\nFix: one document in each row."
        )
    return packing


def _first_positions(model: Any) -> frozenset[int]:
    """The positions with which a document may begin: 0; where padding has a position of its own, the one after it."""
    setting: ModelMask = model.lowtri_mask
    if setting.first_positions is None:
        found = {0}
        for name, part in model.named_modules():
            if name.endswith("position_embeddings") and isinstance(padding := getattr(part, "padding_idx", None), int):
                found.add(padding + 1)
        setting.first_positions = frozenset(found)
    return setting.first_positions


def _remember(forward: Forward, output: Any) -> None:
    """Let the cache of a forward know its documents."""
    if forward.packing is None:
        return
    if isinstance(output, tuple):
        values = list(output)
    elif isinstance(output, dict):
        # Its items, since get() of transformers 5.24 warns where it is asked for an older name.
        values = [value for name, value in output.items() if name in CACHE_NAMES]
    else:
        values = [getattr(output, name, None) for name in CACHE_NAMES]
    for value in [*(forward.named.get(name) for name in CACHE_NAMES), *values]:
        if value is not None:
            remember(value, forward.packing)


def _check_traced_positions(model: Any, kwargs: dict[str, Any]) -> None:
    """Let a compiled program stop where positions begin anew. With a cache transformers does not look, and a program cannot read them
    before it makes its masks."""
    positions = kwargs.get("position_ids")
    if (
        isinstance(positions, torch.Tensor)
        and positions.ndim == 2
        and positions.shape[-1] > 1
        and uses_cache(model, kwargs)
    ):
        packed = begins_anew_in_graph(positions, kwargs.get("attention_mask"))
        assert_in_graph(
            ~packed,
            "transformers: position_ids begin anew in a compiled program with a cache, which cannot tell the documents apart. "
            "Fix: use_cache=False, or no torch.compile.",
        )


# Which models and caches can serve a mask.


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

    from lowtri.integrations.transformers.attention import attend

    interface = AttentionInterface()
    return {name for name in interface.valid_keys() if getattr(interface[name], "func", None) is attend}


def _in_generate_without_cache(model: Any, options: dict[str, Any]) -> bool:
    """Whether ``generate`` of this model calls a forward with these options, without a cache.

    Each step then computes the whole row again and gives earlier tokens other outputs if the mask shows them later ones, so such masks
    are rejected as with a cache. A forward outside of ``generate`` has the same arguments, so its callers decide.
    """
    generate = getattr(type(model), "generate", None)
    if options.get("use_cache") is not False or generate is None:
        return False
    code = inspect.unwrap(generate).__code__
    frame: Any = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def check_cache(mask: Mask, q0: int, nq: int, k0: int, nk: int, argument: str) -> Mask:
    """The mask for queries ``q0 .. q0 + nq`` and keys ``k0 .. k0 + nk`` (positions in the row), if a cache can serve it.

    Args:
        argument: what the model's cache is called.

    Returns:
        the mask, without keys of a static cache that are not written yet.

    Raises:
        CallError: if earlier queries lack one of these keys, or these queries lack a key that the cache has dropped.
    """
    end = q0 + nq
    if pair := _shown(mask, 0, q0, q0, end):
        _reject(mask, *pair, "which is computed only after it", "a mask that shows no later keys")
    if pair := _shown(mask, q0, end, 0, k0):
        fix = f"{argument}=transformers.DynamicCache(), which drops nothing"
        _reject(mask, *pair, "which the model's cache has dropped", fix)
    if k0 + nk > end and not np.all(mask.tile(q0, end, end, k0 + nk) == EMPTY):
        return mask & first(end)
    return mask


def _shown(mask: Mask, q0: int, q1: int, k0: int, k1: int) -> tuple[int, int] | None:
    """A query of ``q0 .. q1`` and a key of ``k0 .. k1`` that it sees, for any row and head."""
    if q0 == q1 or k0 == k1 or np.all(mask.tile(q0, q1, k0, k1) == EMPTY):
        return None
    pairs = (visible_pair(part, q0, q1, np.arange(k0, k1)) for part in row_masks(mask, 0, 1))
    return next((pair for pair in pairs if pair is not None), None)


def _reject(mask: Mask, q: int, k: int, why: str, fix: str) -> NoReturn:
    raise CallError(f"transformers: {mask!r} shows the query at {q} the key at {k}, {why}.\nFix: {fix}.")
