"""Decode step by step with a cache: every step must equal the whole forward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lowtri.auditing.adapter import Rows
from lowtri.auditing.context import Bools, Context
from lowtri.auditing.decoding import Decode, decoder_for
from lowtri.auditing.finding import Finding, Leak, by, first_line
from lowtri.auditing.inputs import Inputs
from lowtri.auditing.noise import magnitude, movement
from lowtri.auditing.pads import pad, pad_keyword, pads_declared
from lowtri.auditing.probe import Need, Probe

__all__ = ["PROBE"]


def _cache(context: Context) -> Finding:
    """One position at a time, a prompt and then one at a time, and in chunks of three, against the whole."""
    known = decoder_for(context)
    assert known is not None  # see `_no_decoder`
    decode, chunks = known
    n = context.n
    ways = {"one at a time": [1] * n}
    if chunks or context.options.get("step") is None:
        half = n // 2
        ways["after a prompt"] = [half] + [1] * (n - half)
    if chunks:
        ways["in chunks of three"] = [3] * (n // 3) + ([n % 3] if n % 3 else [])
    leaks: list[Leak] = []
    status, greatest, tried, refused = "clean", 0.0, [], {}
    ahead: list[str] = []  # ways in which every position would need inputs that are still to come
    for way, sizes in ways.items():
        if not _settled(context, sizes).any():
            ahead.append(way)
            continue
        for salt in (None, 400):
            inputs = context.inputs if salt is None else context.fresh(salt)
            try:
                rows = decode(inputs, sizes)
            except Exception as error:
                refused[way] = first_line(error)
                break
            whole = context.base if salt is None else context.adapter(inputs)
            kind, size, leak = _compare(context, decode, inputs, sizes, whole, rows, way)
            greatest = max(greatest, size)
            if way not in tried:
                tried.append(way)
            if leak is not None:
                status = "leak" if "leak" in (kind, status) else "doubt"
                leaks.append(leak)
                break
        context.tick(len(tried), len(ways))
    warned = ""
    keyword = pad_keyword(context) or ""
    if keyword.endswith("attention_mask") and status == "clean" and "after a prompt" in tried:
        found = _left_padded(context, decode, keyword)
        if found is not None:
            kind, size, leak = found
            tried.append("left padding")
            greatest = max(greatest, size)
            if leak is not None and not pads_declared(context, keyword):
                warned = f"{leak.note}; without pads they agree" if kind == "leak" else ""
            elif leak is not None:
                status, leaks = kind, [leak]
    measured = {"ways": tried, "refused": refused, "greatest": greatest, "length": n, **_edges(context)}
    if not tried and not refused:
        text = f"the mask shows inputs that are still to come when decoding {' or '.join(ahead)}"
        return Finding("skipped", text, (), measured)
    if not tried:
        reason = next(iter(refused.values()), "no way to decode")
        return Finding("skipped", f"cached decoding does not run: {reason}", (), measured)
    if leaks:
        message = f"cached decoding differs from the whole forward, {by(greatest)}"
        places = f"{context.adapter.signature.prefix}position_ids"
        unplaced = context.adapter.accepts(places) and places not in context.inputs.options
        # Its own `generate` passes positions; a caller who does not gets another output, which deserves a warning.
        if unplaced and _cache(_placed(context)).status == "clean":
            return Finding("warning", f"{message}, unless position_ids are passed", (), measured)
        return Finding("leak" if status == "leak" else "doubt", message, tuple(leaks), measured)
    if warned:
        return Finding("warning", warned, (), measured)
    return Finding("clean", f"cached decoding equals the whole forward ({', '.join(tried)})", (), measured)


def _no_decoder(context: Context) -> str | None:
    if decoder_for(context) is None:
        return "how this model decodes with a cache is not known (say step=)"
    step, adapter = context.options.get("step"), context.adapter
    copied = step is adapter.model or getattr(step, "__self__", None) is adapter.model
    if step is not None and adapter.signature.float64 and adapter.module is not None and not copied:
        return "step= keeps its own precision"
    return "the model draws random numbers, and steps draw others" if context.noise.random else None


def _placed(context: Context) -> Context:
    """The same with position_ids passed at every call."""
    places = np.tile(np.arange(context.n), (context.inputs.batch, 1))
    name = f"{context.adapter.signature.prefix}position_ids"
    inputs = replace(context.inputs, options={**context.inputs.options, name: places})
    return replace(context, inputs=inputs, _base=None)


def _compare(
    context: Context,
    decode: Decode,
    inputs: Inputs,
    sizes: list[int],
    whole: Rows,
    rows: Rows,
    way: str,
) -> tuple[str, float, Leak | None]:
    if rows.shape != whole.shape:
        note = f"decoding {way} gives {rows.shape[1]} rows for {whole.shape[1]} positions"
        return "leak", float("inf"), Leak(0, 0, float("inf"), note=note)
    moved = np.nan_to_num(movement(whole, rows), nan=np.inf)
    moved[np.broadcast_to(context.ignored | ~_settled(context, sizes), moved.shape)] = 0.0
    size, scale = float(moved.max()), magnitude(whole, rows)
    kind = context.noise.classify(size, scale, doubtful=False)
    if kind == "clean":
        return kind, size, None
    wrong = [[context.noise.classify(float(value), scale, doubtful=False) == kind for value in row] for row in moved]
    row, query = np.argwhere(wrong)[np.argmin(np.argwhere(wrong)[:, 1])].tolist()
    key = _key_that_differs(context, decode, inputs, sizes, whole, rows, row, query)
    note = f"decoding {way} differs from the whole forward from position {query} on, {by(moved[row, query], '')}"
    if key != query:
        note += f"; the two disagree whether it sees position {key}"
    return kind, size, Leak(query, key, float(moved[row, query]), row, note=note)


def _settled(context: Context, sizes: list[int]) -> Bools:
    """Positions (1 or B, N) that see only what has come, and nothing that saw less than the mask shows it."""
    come = np.repeat(np.cumsum(sizes), sizes)  # how many inputs are there when a position is decoded
    early = np.any(context.allowed & (np.arange(context.n) >= come[:, None]), axis=-1)  # (1 or B, N)
    return np.asarray(~early & ~np.any(context.allowed & early[:, None, :], axis=-1))


def _key_that_differs(
    context: Context, decode: Decode, inputs: Inputs, sizes: list[int], whole: Rows, rows: Rows,
    row: int, query: int,
) -> int:  # fmt: skip
    """The first key that one mode sees from `query` and the other does not; the query itself if there is none."""
    fresh = context.fresh(401)
    for key in (place for place in context.sample(24) if place <= query):
        changed = inputs.change(np.arange(context.n) == key, fresh)
        try:
            one = movement(whole, context.adapter(changed))[row, query]
            other = movement(rows, decode(changed, sizes))[row, query]
        except Exception:
            return query
        if (one > 0) != (other > 0):
            return int(key)
    return query


def _left_padded(context: Context, decode: Decode, keyword: str) -> tuple[str, float, Leak | None] | None:
    """With pads on the left, cached against whole, both padded."""
    try:
        inputs = pad(context, keyword, 3, 0, 402)
        if not _settled(context, [context.n // 2] + [1] * (context.n - context.n // 2)).all():
            return None
        whole = context.adapter(inputs)
        rows = decode(inputs, [inputs.n // 2] + [1] * (inputs.n - inputs.n // 2))
    except Exception:
        return None
    whole, rows = whole[:, 3:], rows[:, 3:]
    if whole.shape != rows.shape or np.isnan(whole).any():
        return None
    moved = np.nan_to_num(movement(whole, rows), nan=np.inf)
    size = float(moved.max())
    kind = context.noise.classify(size, magnitude(whole, rows), doubtful=False)
    if kind == "clean":
        return kind, size, None
    row, query = np.unravel_index(int(moved.argmax()), moved.shape)
    note = f"with pads on the left, cached decoding differs from the whole forward at position {query}, {by(size, '')}"
    return kind, size, Leak(int(query), int(query), size, int(row), note=note)


def _edges(context: Context) -> dict[str, object]:
    """The model's own window, and whether the input goes past it."""
    config = getattr(context.adapter.model, "config", None)
    window = getattr(config, "sliding_window", None)
    return {"window": window, "past_the_window": context.n > window} if isinstance(window, int) else {}


PROBE = Probe(
    name="cache",
    does="decodes one by one, after a prompt, in chunks, left-padded (`step=` for your own), "
    "wherever what the mask shows has come by then",
    finds="caches that disagree with the whole forward",
    function=_cache,
    needs=(Need("a cache", _no_decoder),),
    reshapes=True,
    argument="step",
)
