"""A model of transformers on one process's part of a sequence: its arguments, its loss, and its attention.

The model needs the positions of its tokens, no padding and no cache, targets that were shifted before the sequence was split, and a
loss that is divided by the number of targets of the whole sequence.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtri.compat.model_caches import CACHE_NAMES
from lowtri.errors import CallError, EngineError
from lowtri.integrations.dense_mask import LazyMask, join
from lowtri.integrations.transformers.packing import TOLD
from lowtri.masks.mask import And, Mask

if TYPE_CHECKING:
    from lowtri.parallel.context import ContextParallel
    from lowtri.parallel.shards import ShardPlan

_IGNORED = -100  # a target that does not count


def check_sharded(model: Any, context: Any, mask: Mask | None) -> None:
    """Raise unless a model can run on a part of a sequence, and the plan has the mask."""
    from lowtri.parallel.context import ContextParallel

    if not isinstance(context, ContextParallel):
        raise CallError(
            f"use: context_parallel is {type(context).__name__}.\nFix: lowtri.parallel.ContextParallel(plan)."
        )
    if mask is not None:
        context.plan.index(mask)
    if "position_ids" not in _parameters(type(model).forward):
        raise EngineError(
            f"use: {type(model).__name__} takes no position_ids, so it cannot know where the tokens of a process are.\n"
            "Fix: no context_parallel for this model."
        )
    if not context.plan.tokens.all():
        raise CallError(
            f"use: context_parallel has a plan of {context.plan.n} tokens that gives some of {context.plan.ranks} ranks none, "
            "which models of transformers cannot compute.\nFix: fewer ranks, or longer sequences."
        )
    kinds = _values(getattr(model.config, "rope_parameters", None) or {}, "rope_type")
    if lengthwise := sorted(kinds & {"dynamic", "longrope"}):
        raise EngineError(
            f'use: the rotary embedding "{lengthwise[0]}" depends on the last position of a call, which differs between processes.\n'
            "Fix: no context_parallel for this model."
        )


def shard_arguments(
    model: Any, context: ContextParallel, mask: Mask | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a forward for this process's tokens.

    Raises:
        CallError: if they cannot be split.
    """
    forward = type(model).forward
    try:
        inspect.signature(forward).bind(model, *args, **kwargs)
    except TypeError as error:  # what the call would raise, but on this process alone
        raise CallError(f"{type(model).__name__}: {error}.") from None
    arguments = {**dict(zip(_parameters(forward), args, strict=False)), **kwargs}
    if mask is not None:
        context.plan.index(mask)
    result = dict(arguments)
    rows = 0
    for name in ("input_ids", "inputs_embeds", "position_ids", "shift_labels"):
        if arguments.get(name) is not None:
            result[name] = _own(context, name, arguments[name])
            rows = len(result[name]) if name.startswith("input") else rows
    for name in TOLD:
        if arguments.get(name) is not None:
            raise CallError(
                f"context_parallel: got {name}, but the documents are the plan's, which must know them.\n"
                "Fix: plan_shards(causal() & documents(ids), n, ranks), and use(model, mask=..., context_parallel=...)."
            )
    for name in (*CACHE_NAMES, "use_cache"):
        if arguments.get(name) not in (None, False):
            raise CallError(
                f"context_parallel: got {name}, but the keys of a cache would lie on one process.\nFix: use_cache=False."
            )
    for name in ("logits_to_keep", "num_logits_to_keep"):
        kept = arguments.get(name)
        if kept is not None and (isinstance(kept, Tensor) or kept != 0):
            raise CallError(
                f"context_parallel: got {name}, but the last tokens of a process are not those of the sequence.\n"
                "Fix: all logits, which are those of the tokens at context.positions; take from them what you need."
            )
    valid = arguments.get("attention_mask")
    device = model.device
    if isinstance(valid, Tensor) and (valid.ndim != 2 or not bool((valid == 1).all())):
        raise CallError(
            f"context_parallel: attention_mask {tuple(valid.shape)} hides keys, which the plan must know.\n"
            "Fix: plan_shards(causal() & keys(valid), n, ranks), use(model, mask=..., context_parallel=...), and no attention_mask."
        )
    if not isinstance(valid, Tensor) and valid is not None:
        raise CallError(f"context_parallel: attention_mask is {type(valid).__name__}. Fix: None.")
    tokens = len(context.positions)
    if "use_cache" in _parameters(type(model).forward):
        result["use_cache"] = False
    if result.get("position_ids") is None:
        result["position_ids"] = torch.from_numpy(context.positions).to(device)[None]  # (1, my tokens)
    elif mask is None:
        given = result["position_ids"].cpu()
        own = torch.from_numpy(context.positions)
        if ((given - given[:, :1]) != own - own[0]).any():
            raise CallError(
                "context_parallel: position_ids jump, which transformers reads as beginnings of documents; the plan must know them.\n"
                "Fix: plan_shards(causal() & documents(ids), n, ranks), and use(model, mask=..., context_parallel=...)."
            )
    # Without a mask, transformers would take each jump of the positions for the beginning of another document.
    result["attention_mask"] = torch.ones((rows, tokens), dtype=torch.bool, device=device)
    if arguments.get("labels") is not None:
        result |= _targets(model, context, arguments)
    return (), result


def _targets(model: Any, context: ContextParallel, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the loss: the target of a token may lie on another process, so targets are shifted before they are split."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    labels = arguments["labels"]
    n = context.plan.n
    if not isinstance(labels, Tensor):
        raise CallError(f"context_parallel: labels are {type(labels).__name__}. Fix: a tensor (B, {n}).")
    if model.loss_function is not ForCausalLMLoss or not _passes_options(type(model).forward):
        raise CallError(
            f"context_parallel: the loss of {type(model).__name__} takes no shifted labels.\nFix: compute it from the logits."
        )
    if arguments.get("shift_labels") is not None:
        whole = arguments["shift_labels"]
    elif labels.ndim == 2 and labels.shape[1] == n:
        whole = torch.nn.functional.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
    else:
        raise CallError(
            f"context_parallel: labels are {tuple(labels.shape)}, but the target of a process's last token lies on another process.\n"
            f"Fix: labels of the whole sequence, (B, {n})."
        )
    count = arguments.get("num_items_in_batch")
    if count is None and whole.shape[1] != n:
        raise CallError("context_parallel: shift_labels of a part of the sequence need num_items_in_batch=.")
    if count is None:
        count = max(1, int((whole != _IGNORED).sum()))
    shard = _own(context, "shift_labels", whole)
    return {"labels": shard, "shift_labels": shard, "num_items_in_batch": count}


def _own(context: ContextParallel, name: str, x: Any) -> Tensor:
    """This process's tokens of a tensor (B, N, ...) or (B, my tokens, ...)."""
    n = context.plan.n
    tokens = len(context.positions)
    if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[1] not in (n, tokens):
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise CallError(
            f"context_parallel: {name} is {shape}, but the plan has {n} tokens, {tokens} of them here.\n"
            f"Fix: the whole sequence (B, {n}), or context.shard(x)."
        )
    return context.shard(x) if x.shape[1] == n else x


def mask_of_plan(mask: Mask, plan: ShardPlan) -> Mask:
    """The mask of a layer as the plan has it: ``causal & window(4)`` and ``window(4)`` are the same.

    Raises:
        CallError: if the plan was not made for it.
    """

    def simple(one: Mask) -> Mask:
        return join(simple(one.left), simple(one.right)) if isinstance(one, And) else one

    for one in plan.masks:
        if one == mask or simple(one) == simple(mask):
            return one
    raise CallError(
        f"context_parallel: a layer of the model has the mask {mask!r}, but the plan was made for "
        f"{', '.join(map(repr, plan.masks))}.\n"
        "Fix: plan_shards([...], n, ranks) with the masks of all layers, or use(model, mask=..., context_parallel=...)."
    )


def attend_sharded(
    lazy: LazyMask,
    tensors: tuple[Tensor, Tensor, Tensor],
    options: dict[str, Any],
    rejected: dict[str, Any],
) -> Tensor:
    """The attention of a layer over the whole sequence, (B, my tokens, Hq, Dv), with these options of :func:`lowtri.attention`.

    Raises:
        CallError: for what needs a whole row of weights or a table of all pairs: the entries of ``rejected`` that are not None.
    """
    for name, value in rejected.items():
        if value is not None:
            raise CallError(
                f"context_parallel: the model passes {name}, but no process has all pairs of the sequence.\n"
                "Fix: attention_dropout=0 and no output_attentions in the model's config; else no context_parallel."
            )
    output: Tensor = lazy.context.attention(*tensors, lazy.mask, **options)
    return output.transpose(1, 2).contiguous()


@cache
def _parameters(forward: Any) -> tuple[str, ...]:
    """The names of the parameters of a model's forward, in order."""
    return tuple(inspect.signature(forward).parameters)[1:]


@cache
def _passes_options(forward: Any) -> bool:
    """Whether a model's forward takes further arguments, which transformers passes to the loss."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(forward).parameters.values())


def _values(settings: dict[str, Any], name: str) -> set[Any]:
    """The values of a key in a dictionary and in those that it contains."""
    inner = [_values(value, name) for value in settings.values() if isinstance(value, dict)]
    return {settings[name]}.union(*inner) if name in settings else set().union(*inner)
