"""Probes of padding: pads around the sequence, and those of an encoder-decoder's other sequence."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import numpy as np

from lowtri.auditing.context import Context, compare, describe_difference, random_values
from lowtri.auditing.example import Array, Bools, Inputs, first_line, like, maybe_array
from lowtri.auditing.probe import PairOfRuns, PairsOfRuns, Skipped, Summary, probe, require_repeatable

_AMOUNTS = ((0, 3), (0, 8), (3, 0), (8, 0), (2, 5))
_KEYWORDS = ("attention_mask", "padding_mask", "positions", "key_padding_mask")  # that mark real positions


def pad_keyword(context: Context) -> str | None:
    """The keyword that marks this model's real positions."""
    named = context.tested.adapter.pads
    if named is not None and named not in context.inputs.per_row:
        return named
    names = [context.tested.signature.prefix + name for name in _KEYWORDS]
    given = next((name for name in names if name in context.inputs.settings), None)
    # A signature alone is believed only of libraries whose words are known.
    accepted = (name for name in names if libraries(context) and context.tested.accepts(name))
    return given or next(accepted, None)


def libraries(context: Context) -> set[str]:
    """Which of the libraries whose words are known the model's class is of."""
    return {part.__module__.split(".")[0] for part in type(context.tested.model).__mro__} & {"transformers", "lowtri"}


def real_positions(inputs: Inputs, prefix: str, named: str | None) -> Bools:
    """The positions (B, N) that the example's own padding mask does not mark as pads."""
    for name in filter(None, [named, *(prefix + name for name in _KEYWORDS)]):
        value = inputs.settings.get(name)
        if value is not None and value.shape in ((inputs.batch, inputs.n), (inputs.n,)):
            marks = value >= 0 if _at_pads(name) < 0 else value.astype(bool) != bool(_at_pads(name))
            return np.broadcast_to(marks, (inputs.batch, inputs.n))
    return np.ones((inputs.batch, inputs.n), bool)


def _at_pads(name: str) -> int:
    """What a padding mask has at pads."""
    return -1 if name.endswith("positions") else int(name.endswith("key_padding_mask"))


def marks(context: Context, name: str, real: Bools) -> dict[Hashable, Any]:
    """The settings that mark real positions (B, N) under a keyword, and count them where the model takes positions."""
    signature, count = context.tested.signature, np.cumsum(real, axis=1) - 1
    if _at_pads(name) < 0:
        return {name: np.where(real, count, -1)}
    marked = ~real if _at_pads(name) else real.astype(np.int64)
    settings: dict[Hashable, Any] = {name: marked[0] if signature.batch_axis is None else marked}
    if context.tested.accepts(f"{signature.prefix}position_ids"):
        settings[f"{signature.prefix}position_ids"] = np.where(real, count, 0)
    return settings


def pad(context: Context, name: str, left: int, right: int, salt: int) -> Inputs:
    """The example with pads around it, their content and that of its own pads drawn at random."""
    inputs = context.inputs

    def wider(value: Any, axis: int, **more: Any) -> Any:
        return np.pad(value, [(left, right) if i == axis else (0, 0) for i in range(value.ndim)], **more)

    settings = {
        key: wider(value, value.ndim - 1, **({"constant_values": _at_pads(name)} if key == name else {"mode": "edge"}))
        for key, value in inputs.settings.items()
        if isinstance(value, np.ndarray)
    }
    wide = replace(inputs, sequences=tuple(wider(values, 1, mode="edge") for values in inputs.sequences))
    real = wider(context.real, 1)
    return wide.change(~real, context.fresh(salt, inputs=wide)).having({**marks(context, name, real), **settings})


@probe(
    "padding",
    "adds pads on either side, with different contents and amounts",
    "pads that change outputs at real positions",
    needs="a padding mask, no random numbers",
    reshapes=True,
    argument="pads",
)
def padding(context: Context) -> PairsOfRuns:
    name, n = pad_keyword(context), context.n
    tested, real = context.tested, context.real
    if name is None:
        raise _without_keyword(context)
    arrays = {str(key) for key, value in context.inputs.settings.items() if isinstance(value, np.ndarray)}
    if arrays - {name, f"{tested.signature.prefix}position_ids", "token_type_ids"}:
        raise Skipped("other inputs follow the positions, and how to pad them cannot be inferred")
    table = context.mask.pairs(n, context.inputs.batch)
    if len(table) > 1 or not (table[0].diagonal().all() or not table[0].diagonal().any()):
        raise Skipped("the declared mask speaks of pads of its own")
    require_repeatable(context)
    placed = name == "positions" or any(
        tested.accepts(tested.signature.prefix + key) for key in ("position_ids", "positions")
    )
    # Many models of transformers take the keyword under left padding, and count positions from the pads; and a mask of
    # chunks, say, may be meant from the first column.
    unplaced = not placed and ("transformers" in libraries(context) or not context.mask.is_relative)
    # What the caller does with the other side is not known.
    right_only = not real.all() and bool((real[:, :-1] >= real[:, 1:]).all())
    given = "lowtri" in libraries(context) or name in arrays or tested.adapter.pads is not None
    # Without pads, but with positions passed the same way: some models start to count at another number by default.
    whole = context.run(pad(context, name, 0, 0, 300))
    try:
        whole.output  # noqa: B018 (run)
    except Exception:
        whole = context.example
    tried = list[list[int]]()
    warning, refused = "", "its answer has another shape"
    leaking = by_amount = False
    for left, right in _AMOUNTS:
        examples = [pad(context, name, left, right, salt) for salt in (300, 301)]
        try:
            first, second = (context.run(example).part(positions=slice(left, left + n)) for example in examples)
        except Exception as error:
            refused = first_line(error)
            continue
        if first.output.shape != context.base.shape:
            continue
        tried.append([left, right])
        by_content = compare(first.output, second.output, context.noise, real, same_order=True).status != "clean"
        if left and not by_content and by_amount:
            continue  # that the amount counts is known from the right
        side = "left" if left else "right"
        what = f"{left + right} pads on the {side} that are hidden from it"
        if by_content:
            what = f"the content of the pads on the {side}"
        before, run = (first, second) if by_content else (whole, first)
        warned_only = bool(left) and (not given or right_only or (not by_content and unplaced))
        note = f"position {{query}} sees {what}: its output {{moves}}"
        # The key is counted as the real positions are.
        key = -1 if left else n
        pair = PairOfRuns(run, real, note, key, before, same_order=by_content, is_leak=not warned_only)
        difference = yield pair
        if difference is None or difference.status == "clean":
            continue
        if not warned_only:
            leaking = True
            by_amount |= not by_content
        elif difference.status == "leak":
            why = what if by_content else "having pads"
            moved = describe_difference(difference.greatest)
            warning = f"left padding is not kept with {name}: {why} moves real outputs, {moved}"
    measured = {"keyword": name, "tried": tried}
    if not tried:
        raise Skipped(f"the model does not run with {name} for a padded input: {refused}", measured)
    message = f"{{count}} of {len(tried)} ways to pad change real positions"
    clean = f"padded equals alone ({len(tried)} ways to pad)"
    return Summary(clean, message, measured, "" if leaking else warning)


def _without_keyword(context: Context) -> Skipped:
    """Why no padding mask is known, and what to do about it."""
    named, prefix = context.tested.adapter.pads, context.tested.signature.prefix
    if named is not None:  # among the inputs that belong to rows
        return Skipped(f"{named} marks the pads of the source", {"instead": source.name})
    taken = next((prefix + name for name in _KEYWORDS if context.tested.accepts(prefix + name)), None)
    if taken is not None:
        return Skipped(f'the example passes no {taken}; pass it, or pads="{taken}"')
    return Skipped("the model takes no known padding mask; pass pads=")


@probe(
    "source",
    "changes the pads of an encoder-decoder's other sequence, and adds more of them",
    "pads of the source that change outputs",
    needs="a source with a padding mask, no random numbers",
    reshapes=True,
)
def source(context: Context) -> PairsOfRuns:
    require_repeatable(context)
    mask, marked = _source_marks(context)
    per_row, at_pads = context.inputs.per_row, _at_pads(mask)
    arrays = ((key, maybe_array(value)) for key, value in per_row.items() if key != mask)
    contents = {key: array for key, array in arrays if array is not None and array.shape[:2] == marked.shape}
    if not contents:
        raise Skipped("what the source's padding mask marks is not among the inputs")
    tried = []
    for more in (0, 3, 8) if (marked == at_pads).any() else (3, 8):
        wider = np.pad(marked, ((0, 0), (0, more)), constant_values=at_pads)  # (B, M)
        what = f"{more} pads behind the source" if more else "the content of the source's pads"
        for salt in (0, 1):
            rng = np.random.default_rng([context.tested.seed, 310 + salt])
            changed: dict[Hashable, Any] = {mask: like(per_row.get(mask, per_row.get("input_ids")), wider)}
            for key, array in contents.items():
                wide = np.pad(array, [(0, 0), (0, more), *[(0, 0)] * (array.ndim - 2)], mode="edge")
                fresh = random_values(wide, np.unique(wide), rng, "random")
                where = (wider == at_pads).reshape(wider.shape + (1,) * (wide.ndim - 2))
                changed[key] = like(per_row[key], np.where(where, fresh, wide))
            note = f"position {{query}} sees {what}: its output {{moves}}"
            run = context.run(context.inputs.having(changed))
            if (yield PairOfRuns(run, context.real, note)) is not None and more not in tried:
                tried.append(more)
    clean = "the source's pads change no output" if tried else "nothing was compared"
    return Summary(clean, "the source's pads change outputs", {"keyword": mask, "tried": tried})


def _source_marks(context: Context) -> tuple[str, Array]:
    """The name of the mask that marks the source's real positions, and the marks (B, M)."""
    named, per_row = context.tested.adapter.pads, context.inputs.per_row
    for key, value in per_row.items():
        array = maybe_array(value)
        if array is None or array.ndim != 2 or not set(np.unique(array).tolist()) <= {0, 1}:
            continue
        if key == named or "mask" in str(key):
            return str(key), array.astype(np.int64)
    ids = maybe_array(per_row.get("input_ids"))
    if ids is not None and libraries(context) and context.tested.accepts("attention_mask"):
        return "attention_mask", np.ones(ids.shape, np.int64)
    raise Skipped("there is no source with a known padding mask; pass pads=" if per_row else "there is no source")
