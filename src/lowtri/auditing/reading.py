"""The example as probes see it, read off the arguments and off the model.

What the arguments leave open the model is asked: which ids it knows, which axis has the positions, where rows begin, at
which token documents end. A longer example continues it.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.context import FEW, Context, compare, vocabulary_size
from lowtri.auditing.declared import DeclaredMask, own_positions
from lowtri.auditing.example import Array, Bools, Inputs, first_line
from lowtri.auditing.model_under_test import WIDE, ModelUnderTest
from lowtri.auditing.pads import pad_keyword, real_positions
from lowtri.errors import CallError, LowtriError


def read_context(tested: ModelUnderTest, inputs: Inputs, mask: DeclaredMask, **fields: Any) -> Context:
    """What probes work on, with the noise measured; the other fields are those of `Context`."""
    real = real_positions(inputs, tested.signature.prefix, tested.adapter.pads) & ~mask.pads(inputs.n)
    ids = _vocabulary(tested, inputs)
    context = Context(tested, inputs, mask.pairs(inputs.n, inputs.batch), real, mask, ids, **fields)
    if context.is_large:
        context = replace(context, chosen=tuple(context.sample(FEW)))
    try:
        rows = context.base
        if rows.shape[-1] > WIDE and rows.dtype.kind == "f" and np.isfinite(rows).all():
            context = replace(context, tested=replace(tested, narrow=True))
        context.noise  # noqa: B018 (measured)
    except LowtriError:
        raise
    except Exception as error:
        raise CallError(
            f"audit: the model raised {first_line(error)}, on the example itself.\n"
            "Fix: an example that the model takes: ids within its table, the dtype it needs, all of its inputs."
        ) from error
    return context


def interpreted(context: Context) -> tuple[Context, list[str]]:
    """The context with what the model itself shows about the example, and notes on it."""
    notes = list[str]()
    if context.tested.adapter.axes is None:
        _check_axes(context)
    if context.noise.broken is None:
        context = _from_own_positions(context, notes)
        token = find_separator(context)
        if token is not None:
            context = replace(context, separator=token)
            notes.append(f"documents end at token {token}: it is neither changed nor drawn")
    return context, notes


def _vocabulary(tested: ModelUnderTest, inputs: Inputs) -> npt.NDArray[np.int64]:
    """The ids to draw from: those of the table in which the example's are looked up, else those that the config names."""
    present = np.unique(inputs.sequences[0]).astype(np.int64) if inputs.discrete else np.zeros(2, np.int64)
    size = tested.adapter.vocab_size
    if size is None and inputs.discrete:
        size = vocabulary_size(tested.module)
        if tested.in_torch:
            from lowtri.auditing.torch_hooks import looked_up

            with contextlib.suppress(Exception):  # the example's own run reports it
                size = min(filter(None, (size, looked_up(tested, inputs))), default=None)
    if size is not None:
        return np.arange(size)
    if len(present) < 2:
        raise CallError(
            "audit: the example repeats one id, and how many ids there are cannot be inferred.\nFix: pass Model(vocab_size=)."
        )
    return present


def _check_axes(context: Context) -> None:
    """Ask back where there are more rows than positions, and only the first axis behaves as positions do."""
    tested, inputs = context.tested, context.inputs
    batch, n = inputs.batch, inputs.n
    if batch <= n or tested.signature.position_axes[0] != 1:
        return
    rng = np.random.default_rng([tested.seed, 11])
    before = tested(inputs)
    across_rows = across_positions = False
    for row, position in ((0, 0), (batch - 1, n - 1), (batch // 2, 0), (0, n - 1)):
        where = np.zeros((batch, n), bool)
        where[row, position] = True
        other = replace(inputs, sequences=tuple(values[rng.permutation(batch)][:, ::-1] for values in inputs.sequences))
        moved = (before != tested(inputs.change(where, other))).any(axis=-1)
        across_positions |= bool(np.delete(moved[row], position).any())
        across_rows |= bool(np.delete(moved, row, axis=0).any())
    if across_rows and not across_positions:
        shape = (batch, n, *inputs.sequences[0].shape[2:])
        letters = "DEFGH"[: len(shape) - 2]
        raise CallError(
            f"audit: example of shape {shape} is either {batch} rows of {n} positions or {n} rows of {batch} positions,\n"
            "and changes move outputs along the first axis alone.\n"
            f'Fix: Model(axes="BN{letters}") for the first reading, Model(axes="NB{letters}") for the second.'
        )


def _from_own_positions(context: Context, notes: list[str]) -> Context:
    """Where rows begin later, a mask of chunks, say, may be meant from the first column or from each row's first token.

    The reading that agrees with the model is taken.
    """
    mask, inputs = context.mask, context.inputs
    real = context.real
    positions = own_positions(inputs, real, f"{context.tested.signature.prefix}position_ids")
    if positions is None or mask.is_relative:
        return context
    own = replace(context, declared=mask.pairs(context.n, inputs.batch, positions))
    if ((own.declared == context.declared) | ~(real[:, None] & real[:, :, None])).all():
        return context
    readings, wrong = (context, own), [0, 0]
    fresh = context.fresh(0)
    for key in range(context.n):
        where = np.arange(context.n) == key
        after = context.tested(inputs.change(where, fresh))
        for number, reading in enumerate(readings):
            moved = context.compare(after, reading.independent_of(where), same_order=True)
            wrong[number] += int((moved.sizes > 0).sum())
    if wrong[0] == 0 or wrong[1] >= wrong[0]:
        return context
    notes.append("the mask is read from each row's first token, as the model counts its positions")
    return own


def find_separator(context: Context) -> int | None:
    """The token at which the model ends a document: to change one of them changes who may see whom. None where documents do not end
    at a token of the example.

    A token is one where it stands at the end of every document that the mask has (or at the start of every one but the first),
    and where the documents on its two sides are one once it is another token: an earlier token then moves a later output.
    """
    labels = context.mask.documents(context.n) if context.inputs.discrete else None
    if labels is None:
        return None
    labels = np.broadcast_to(labels, context.real.shape)
    # (B, N): the last token of a document but the last
    last = np.pad(labels[:, 1:] != labels[:, :-1], ((0, 0), (0, 1)))
    ids = context.inputs.sequences[0]
    for places in (last, np.roll(last, 1, axis=1)):
        tokens = np.unique(ids[places])
        if len(tokens) == 1 and _joins(context, places, ids, int(tokens[0])):
            return int(tokens[0])
    return None


def _joins(context: Context, places: Bools, ids: Array, token: int) -> bool:
    """Whether the documents are one where these tokens are others."""
    inputs, tested = context.inputs, context.tested
    fresh = replace(context, separator=token).fresh(950)
    others = context.vocabulary[context.vocabulary != token]
    joined_ids = np.where(places, others[tested.seed % len(others)], ids)
    joined = replace(inputs, sequences=(joined_ids.astype(ids.dtype), *inputs.sequences[1:]))
    before_first = np.cumsum(places, axis=1) == 0  # (B, N)
    hidden = context.independent_of(before_first & (ids != token))
    try:
        apart = context.compare(tested(inputs.change(before_first & (ids != token), fresh)), hidden)
        one, other = tested(joined), tested(joined.change(before_first, fresh))
    except Exception:
        return False
    # A leak moves outputs in both cases; what moves in the second alone was hidden by the token.
    return compare(one, other, context.noise, hidden & (apart.sizes == 0)).status == "leak"


def extended(context: Context, length: int) -> Context:
    """The real tokens of the first row with inputs drawn at random behind them; of the first in which the mask has no pads."""
    pads = np.broadcast_to(context.mask.pads(context.n), context.real.shape)
    row = int(pads.any(axis=1).argmin())
    if pads[row].any():
        raise CallError("audit: the mask has pads in every row, and how it goes on cannot be inferred")
    inputs = context.inputs.rows([row])
    keyword = pad_keyword(context)
    marks = inputs.settings.get(keyword) if keyword else None
    if marks is not None and marks.ndim == 2 and not context.real[row].all() and context.real[row].any():
        inputs = inputs.at(np.flatnonzero(context.real[row]))
    n = inputs.n
    declared = _table_of_row(context, length, row)
    before = _table_of_row(context, context.n, row)[0, :n, :n]
    inputs = inputs.with_lengths(lambda lengths: np.full_like(lengths, length))
    settings = {key: _continued(value, before, length, declared[0]) for key, value in inputs.settings.items()}
    repeated = tuple(np.concatenate([a, np.repeat(a[:, -1:], length - n, axis=1)], axis=1) for a in inputs.sequences)
    inputs = replace(inputs, sequences=repeated, settings=settings)
    inputs = inputs.change(np.arange(length) >= n, context.fresh(600, inputs=inputs))
    real = np.ones((1, length), bool)
    if keyword not in settings:
        real[:, : context.n] = context.real[row]
    # Queries behind the example: the last ones, the ones before powers of two, and a spread.
    edges = [2**power - 1 for power in range(length.bit_length())]
    spread = np.linspace(n - 1, length - 2, 4).astype(int).tolist()
    chosen = tuple(sorted({position for position in [*edges, *spread, length - 1] if n - 1 <= position < length}))
    return replace(context, inputs=inputs, declared=declared, real=real, chosen=chosen)


def _table_of_row(context: Context, n: int, row: int) -> Bools:
    """The pairs (1, N, N) of one row of the batch."""
    pairs = context.mask.pairs(n, context.inputs.batch)
    return pairs[row : row + 1] if len(pairs) > 1 else pairs


def _continued(value: Array, before: Bools, length: int, allowed: Bools) -> Array:
    """An array along the positions, continued to more of them: a table that says what the mask says, a constant, a count."""
    n = len(before)
    if value.shape[-2:] == (n, n):
        shown, hidden = value[..., before], value[..., ~before]
        if all(len(np.unique(part)) <= 1 for part in (shown, hidden)) and shown.size:
            table = np.where(allowed, shown.flat[0], hidden.flat[0] if hidden.size else shown.flat[0])
            return np.broadcast_to(table.astype(value.dtype), (*value.shape[:-2], length, length))
    elif value.shape.count(n) == 1:
        axis = value.shape.index(n)
        first = np.take(value, [0], axis)
        continued = np.repeat(first, length, axis)
        if value.dtype != bool and n > 1:
            count = np.arange(length).reshape([-1 if i == axis else 1 for i in range(value.ndim)])
            continued = np.asarray(first + (np.take(value, [1], axis) - first) * count, value.dtype)
        if np.array_equal(np.take(continued, np.arange(n), axis), value):
            return continued
    raise CallError("audit: other inputs follow the positions, and how they go on cannot be inferred")
