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
# Keywords that mark real positions, and whether True (or 1) means real.
_KEYWORDS = {"attention_mask": True, "padding_mask": True, "positions": True, "key_padding_mask": False}


def pad_keyword(context: Context) -> str | None:
    """The keyword that marks this model's real positions."""
    named = context.options.adapter.pads
    if named is not None and named not in context.inputs.per_row:
        return named
    names = [context.tested.signature.prefix + name for name in _KEYWORDS]
    given = next((name for name in names if name in context.inputs.settings), None)
    # A signature alone is believed only of libraries whose words are known.
    accepted = (name for name in names if _library(context) and context.tested.accepts(name))
    return given or next(accepted, None)


def real_positions(inputs: Inputs, prefix: str, named: str | None) -> Bools:
    """The positions (B, N) that the example's own padding mask does not mark as pads."""
    for name in filter(None, [named, *(prefix + name for name in _KEYWORDS)]):
        value = inputs.settings.get(name)
        if value is not None and value.shape in ((inputs.batch, inputs.n), (inputs.n,)):
            marks = value >= 0 if name.endswith("positions") else value.astype(bool) == (_pad_value(name, prefix) == 0)
            return np.broadcast_to(marks, (inputs.batch, inputs.n))
    return np.ones((inputs.batch, inputs.n), bool)


def pad(context: Context, name: str, left: int, right: int, salt: int) -> Inputs:
    """The example with pads around it, their content and that of its own pads drawn at random."""
    inputs, signature = context.inputs, context.tested.signature
    pad_value, place = _pad_value(name, signature.prefix), f"{signature.prefix}position_ids"

    def wider(value: Any, axis: int, **more: Any) -> Any:
        return np.pad(value, [(left, right) if i == axis else (0, 0) for i in range(value.ndim)], **more)

    settings = {
        key: wider(value, value.ndim - 1, **({"constant_values": pad_value} if key == name else {"mode": "edge"}))
        for key, value in inputs.settings.items()
        if isinstance(value, np.ndarray)
    }
    wide = replace(inputs, sequences=tuple(wider(values, 1, mode="edge") for values in inputs.sequences))
    real = np.pad(np.broadcast_to(context.real, (inputs.batch, inputs.n)), ((0, 0), (left, right)))
    position = np.tile(np.arange(wide.n) - left, (inputs.batch, 1))
    if name == "positions":
        settings.setdefault(name, np.where(real, position, -1))
    else:
        marks = real.astype(np.int64) if pad_value == 0 else ~real
        settings.setdefault(name, marks[0] if signature.batch_axis is None else marks)
        if context.tested.accepts(place):
            settings.setdefault(place, np.where(real, position, 0))
    return wide.change(~real, context.fresh(salt, inputs=wide)).having(settings)


def _pad_value(name: str, prefix: str) -> int:
    """What a padding mask has at pads."""
    if name == "positions":
        return -1
    return 1 if name.endswith("key_padding_mask") or not _KEYWORDS.get(name.removeprefix(prefix), True) else 0


def _library(context: Context) -> set[str]:
    return {part.__module__.split(".")[0] for part in type(context.tested.model).__mro__} & {"transformers", "lowtri"}


@probe(
    "padding",
    "adds pads on either side, with different contents and amounts",
    "pads that change outputs at real positions",
    needs="a padding mask, no random numbers",
    reshapes=True,
    argument="pads",
)
def padding(context: Context) -> PairsOfRuns:
    """Pads on the right, on the left and on both sides, with two contents each, against the input alone."""
    name, n = pad_keyword(context), context.n
    tested, prefix = context.tested, context.tested.signature.prefix
    if name is None:
        raise Skipped("the model takes no known padding mask; pass pads=")
    arrays = {str(key) for key, value in context.inputs.settings.items() if isinstance(value, np.ndarray)}
    if arrays - {name, f"{prefix}position_ids", "token_type_ids"}:
        raise Skipped("other inputs follow the positions, and how to pad them cannot be inferred")
    table = context.options.mask.pairs(n, context.inputs.batch)
    if len(table) > 1 or not (table[0].diagonal().all() or not table[0].diagonal().any()):
        raise Skipped("the declared mask speaks of pads of its own")
    require_repeatable(context)
    placed = name == "positions" or any(tested.accepts(prefix + key) for key in ("position_ids", "positions"))
    library, real = _library(context), ~context.ignored
    # What the caller does with the other side is not known.
    right_only = not real.all() and bool((real[:, :-1] >= real[:, 1:]).all())
    given = "lowtri" in library or name in arrays or context.options.adapter.pads is not None
    # Without pads, but with positions passed the same way: some models start to count at another number by default.
    whole = context.run(pad(context, name, 0, 0, 300))
    try:
        whole.output  # noqa: B018 (run)
    except Exception:
        whole = context.example
    tried = list[list[int]]()
    warning, why = "", "its answer has another shape"
    leaking = by_amount = False
    for left, right in _AMOUNTS:
        examples = [pad(context, name, left, right, salt) for salt in (300, 301)]
        try:
            first, second = (context.run(example).part(positions=slice(left, left + n)) for example in examples)
        except Exception as error:
            why = first_line(error)
            continue
        if first.output.shape != context.base.shape:
            continue
        tried.append([left, right])
        side = "left" if left else "right"
        by_content = compare(first.output, second.output, context.noise, real, same_order=True).status != "clean"
        if left and not by_content and by_amount:
            continue  # that the amount counts is known from the right
        what = f"{left + right} pads on the {side} that are hidden from it"
        before, run = whole, first
        if by_content:
            what = f"the content of the pads on the {side}"
            before, run = first, second
        # Many models of transformers take the keyword under left padding, and count positions from the pads; and a mask of
        # chunks, say, may be meant from the first column.
        unplaced = not placed and ("transformers" in library or not context.options.mask.is_relative)
        if left and (not given or right_only or (not by_content and unplaced)):
            moved = compare(before.output, run.output, context.noise, real, same_order=by_content)
            if moved.status == "leak":
                why = what if by_content else "having pads"
                warning = f"left padding is not kept with {name}: {why} moves real outputs, {describe_difference(moved.greatest)}"
            continue
        note = f"position {{query}} sees {what}: its output {{moves}}"
        # The key is counted as the real positions are.
        difference = yield PairOfRuns(run, real, note, -1 if left else n, before, same_order=by_content)
        differs = difference is not None and difference.status != "clean"
        leaking |= differs
        by_amount |= differs and not by_content
    measured = {"keyword": name, "tried": tried}
    if not tried:
        raise Skipped(f"the model does not run with {name} for a padded input: {why}", measured)
    message = f"{{count}} of {len(tried)} ways to pad change real positions"
    clean = f"padded equals alone ({len(tried)} ways to pad)"
    return Summary(clean, message, measured, "" if leaking else warning)


@probe(
    "source",
    "changes the pads of an encoder-decoder's other sequence, and adds more of them",
    "pads of the source that change outputs",
    needs="a source with a padding mask, no random numbers",
    reshapes=True,
)
def source(context: Context) -> PairsOfRuns:
    """The source's own pads with other contents, and pads behind it, against the example."""
    require_repeatable(context)
    mask, marks = _source_marks(context)
    per_row, real = context.inputs.per_row, ~context.ignored
    pad_value = _pad_value(mask, "")
    is_pad = marks == pad_value  # (B, M)
    contents: dict[Hashable, Array] = {}
    for key, value in per_row.items():
        array = maybe_array(value)
        if key != mask and array is not None and array.shape[:2] == marks.shape:
            contents[key] = array
    if not contents:
        raise Skipped("what the source's padding mask marks is not among the inputs")
    tried = []
    for more in (0, 3, 8):
        if not more and not is_pad.any():
            continue
        hidden = np.pad(is_pad, ((0, 0), (0, more)), constant_values=True)
        for salt in (0, 1):
            rng, changed = np.random.default_rng([context.options.seed, 310 + salt]), dict(per_row)
            for key, array in contents.items():
                wide = np.pad(array, [(0, 0), (0, more), *[(0, 0)] * (array.ndim - 2)], mode="edge")
                fresh = random_values(wide, np.unique(wide), rng, "random")
                where = hidden.reshape(hidden.shape + (1,) * (wide.ndim - 2))
                changed[key] = like(per_row[key], np.where(where, fresh, wide))
            wider = np.pad(marks, ((0, 0), (0, more)), constant_values=pad_value)
            changed[mask] = like(per_row[mask], wider) if mask in per_row else _as_ids(context, wider)
            what = f"{more} pads behind the source" if more else "the content of the source's pads"
            note = f"position {{query}} sees {what}: its output {{moves}}"
            run = context.run(replace(context.inputs, per_row=changed))
            if (yield PairOfRuns(run, real, note)) is not None and more not in tried:
                tried.append(more)
    clean = "the source's pads change no output" if tried else "nothing was compared"
    return Summary(clean, "the source's pads change outputs", {"keyword": mask, "tried": tried})


def _source_marks(context: Context) -> tuple[str, Array]:
    """The name of the mask that marks the source's real positions, and the marks (B, M)."""
    named, per_row = context.options.adapter.pads, context.inputs.per_row
    for key, value in per_row.items():
        array = maybe_array(value)
        if array is None or array.ndim != 2 or not set(np.unique(array).tolist()) <= {0, 1}:
            continue
        if key == named or "mask" in str(key):
            return str(key), array.astype(np.int64)
    ids = maybe_array(per_row.get("input_ids"))
    if ids is not None and _library(context) and context.tested.accepts("attention_mask"):
        return "attention_mask", np.ones(ids.shape, np.int64)
    raise Skipped("there is no source with a known padding mask; pass pads=" if per_row else "there is no source")


def _as_ids(context: Context, marks: Array) -> Any:
    return like(context.inputs.per_row["input_ids"], marks)
