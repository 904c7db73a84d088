"""Decode step by step with a cache: every step must equal the full forward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lowtri.auditing.adapter import Rows
from lowtri.auditing.context import Context
from lowtri.auditing.decoding import Decode, decoder_for
from lowtri.auditing.finding import Finding, Leak, by, first_line
from lowtri.auditing.inputs import Inputs
from lowtri.auditing.noise import Difference, movement
from lowtri.auditing.options import Bools
from lowtri.auditing.pads import pad, pad_keyword, pads_declared
from lowtri.auditing.probe import Need, Probe, Tally

__all__ = ["PROBE"]

_PADS = 3  # on the left


def _cache(context: Context) -> Finding:
    """One position at a time, a prompt and then one at a time, and in chunks of three, against the whole."""
    known = decoder_for(context)
    assert known is not None  # see `_no_decoder`
    decode, chunks = known
    n = context.n
    ways = {"one at a time": [1] * n}
    if chunks or context.options.step is None:
        ways["after a prompt"] = _after_prompt(n)
    if chunks:
        ways["in chunks of three"] = [3] * (n // 3) + ([n % 3] if n % 3 else [])
    tally, tried, warning = Tally(), [], ""
    refused: dict[str, str] = {}
    ahead: list[str] = []  # ways in which every position would need inputs that are still to come
    for way, sizes in ways.items():
        if not _complete(context, sizes).any():
            ahead.append(way)
            continue
        for salt in (None, 400):
            inputs = context.inputs if salt is None else context.fresh(salt)
            try:
                rows = decode(inputs, sizes)
            except Exception as error:
                refused[way] = first_line(error)
                break
            if way not in tried:
                tried.append(way)
            whole = context.base if salt is None else context.adapter(inputs)
            if not _equal(context, _Decoded(way, sizes, decode, inputs, whole, rows), tally):
                break
        context.tick(len(tried), len(ways))
    keyword = pad_keyword(context) or ""
    if keyword.endswith("attention_mask") and tally.status == "clean" and "after a prompt" in tried:
        padded = _left_padded(context, decode, keyword)
        if padded is not None:
            tried.append("left padding")
            row, query = (int(i) for i in np.unravel_index(int(padded.sizes.argmax()), padded.sizes.shape))
            where = f"at position {query}, {by(padded.greatest, '')}"
            note = f"with pads on the left, cached decoding differs from the whole forward {where}"
            if not pads_declared(context, keyword):
                tally.greatest = max(tally.greatest, padded.greatest)
                warning = f"{note}; without pads they agree" if padded.status == "leak" else ""
            elif tally.differs(padded):
                tally.leaks.append(Leak(query, query, padded.greatest, row, note=note))
    measured = {"ways": tried, "refused": refused, "length": n, **_window(context)}
    if not tried:
        message = f"cached decoding does not run: {next(iter(refused.values()), 'no way to decode')}"
        if not refused:
            message = f"the mask shows inputs that are still to come when decoding {' or '.join(ahead)}"
        return Finding("skipped", message, (), {"greatest": 0.0, **measured})
    message = "cached decoding differs from the whole forward"
    finding = tally.finding(f"cached decoding equals the whole forward ({', '.join(tried)})", message, measured)
    name = f"{context.adapter.signature.prefix}position_ids"
    if tally.leaks and context.adapter.accepts(name) and name not in context.inputs.options:
        # Its own `generate` passes positions; a caller who does not gets another output, which deserves a warning.
        positions = np.tile(np.arange(n), (context.inputs.batch, 1))
        inputs = replace(context.inputs, options={**context.inputs.options, name: positions})
        if _cache(replace(context, inputs=inputs)).status == "clean":
            warning = f"{finding.message}, unless position_ids are passed"
    return replace(finding, status="warning", message=warning, leaks=()) if warning else finding


def _no_decoder(context: Context) -> str | None:
    if decoder_for(context) is None:
        return "how this model decodes with a cache is not known (say step=)"
    step, adapter = context.options.step, context.adapter
    copied = step is adapter.model or getattr(step, "__self__", None) is adapter.model
    if step is not None and adapter.signature.float64 and adapter.module is not None and not copied:
        return "step= keeps its own precision"
    return "the model draws random numbers, and steps draw others" if context.noise.random else None


@dataclass(frozen=True)
class _Decoded:
    """One way to decode, and the rows that it gave."""

    way: str
    sizes: list[int]  # how many positions each step takes
    decode: Decode
    inputs: Inputs
    whole: Rows  # (B, N, F)
    rows: Rows


def _equal(context: Context, decoded: _Decoded, tally: Tally) -> bool:
    """Whether the decoded rows are the whole forward's; the tally gets the difference."""
    whole, rows, way = decoded.whole, decoded.rows, decoded.way
    if rows.shape != whole.shape:
        note = f"decoding {way} gives {rows.shape[1]} rows for {whole.shape[1]} positions"
        tally.leaks.append(Leak(0, 0, np.inf, note=note))
        tally.status, tally.greatest = "leak", np.inf
        return False
    difference = context.difference(whole, rows, where=~context.ignored & _complete(context, decoded.sizes))
    if not tally.differs(difference):
        return True
    row, query, size = difference.first(of_all_rows=True)
    key = _key_that_differs(context, decoded, row, query)
    note = f"decoding {way} differs from the whole forward from position {query} on, {by(size, '')}"
    if key != query:
        note += f"; the two disagree whether it sees position {key}"
    tally.leaks.append(Leak(query, key, size, row, note=note))
    return False


def _key_that_differs(context: Context, decoded: _Decoded, row: int, query: int) -> int:
    """The first key that only one of the two sees from `query`; the query itself if there is none."""
    fresh = context.fresh(401)
    for key in (position for position in context.sample(24) if position <= query):
        changed = decoded.inputs.change(np.arange(context.n) == key, fresh)
        try:
            in_whole = movement(decoded.whole, context.adapter(changed))[row, query]
            in_steps = movement(decoded.rows, decoded.decode(changed, decoded.sizes))[row, query]
        except Exception:
            return query
        if (in_whole > 0) != (in_steps > 0):
            return int(key)
    return query


def _left_padded(context: Context, decode: Decode, keyword: str) -> Difference | None:
    """With pads on the left, cached against whole, both padded; None where that cannot be compared."""
    if not _complete(context, _after_prompt(context.n)).all():
        return None
    try:
        inputs = pad(context, keyword, _PADS, 0, 402)
        whole, rows = (
            answer[:, _PADS:] for answer in (context.adapter(inputs), decode(inputs, _after_prompt(inputs.n)))
        )
    except Exception:
        return None
    return None if whole.shape != rows.shape or np.isnan(whole).any() else context.difference(whole, rows)


def _after_prompt(n: int) -> list[int]:
    return [n // 2] + [1] * (n - n // 2)


def _complete(context: Context, sizes: list[int]) -> Bools:
    """Positions (1 or B, N) that see only what has come, and nothing that saw less than the mask shows it."""
    come = np.repeat(np.cumsum(sizes), sizes)  # how many inputs there are when a position is decoded
    early = np.any(context.allowed & (np.arange(context.n) >= come[:, None]), axis=-1)  # (1 or B, N)
    return np.asarray(~early & ~np.any(context.allowed & early[:, None, :], axis=-1))


def _window(context: Context) -> dict[str, object]:
    """The model's own window, and whether the input goes past it."""
    window = getattr(getattr(context.adapter.model, "config", None), "sliding_window", None)
    return {"window": window, "past_the_window": context.n > window} if isinstance(window, int) else {}


PROBE = Probe(
    name="cache",
    does="decodes one by one, after a prompt, in chunks and left-padded (`step=` for your own decoding); "
    "compares positions whose visible inputs have all been appended",
    finds="caches whose outputs differ from the full forward pass",
    function=_cache,
    needs=(Need("a cache", _no_decoder),),
    reshapes=True,
    argument="step",
)
