"""Checks of flash-attn's arguments, in its own layout and under its own names; errors give the value, what is expected, and the fix."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtri.errors import CallError
from lowtri.masks import POSITION_MAX

NO_WINDOW = (-1, -1)  # the default of window_size
ROWS, PACKED = "(B, N, H, D)", "(total, H, D)"
SLOTS = "(B, slots, H, D)"
_INTEGERS = (torch.int32, torch.int64)


def check_tensor(name: str, argument: str, x: Any, layout: str) -> None:
    """Raise unless x is a tensor with the dimensions of its layout; a digit in the layout is the size of that dimension."""
    fits = isinstance(x, Tensor) and x.ndim == layout.count(",") + 1
    if fits and ("2" in layout or "3" in layout):
        sizes = layout.strip("()").split(", ")
        fits = all(not size.isdigit() or int(size) == n for size, n in zip(sizes, x.shape, strict=True))
    if not fits:
        got = f"{tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise CallError(f"{name}: {argument} is {got}. Fix: a torch tensor {layout}.")


def check_inputs(name: str, layout: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[torch.Size, torch.Size]:
    """The shapes of q (..., Nq, Hq, D) and k (..., Nk, Hkv, D); raises unless they and v (..., Nk, Hkv, Dv) fit together.

    A shape is a new object each time that it is read, which takes longer than to compare it; so callers use these.

    Args:
        layout: of k and v: ROWS, PACKED, or SLOTS, where they are a cache, of rows of its own.
    """
    key, value = ("k_cache", "v_cache") if layout is SLOTS else ("k", "v")
    rank = 3 if layout is PACKED else 4
    tensors = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    if not tensors or not q.ndim == k.ndim == v.ndim == rank:
        check_tensor(name, "q", q, ROWS if layout is SLOTS else layout)
        check_tensor(name, key, k, layout)
        check_tensor(name, value, v, layout)
    of_q = q.shape
    of_k, of_v = k.shape, v.shape
    rule = ""
    if of_q[-1] != of_k[-1] or of_q[-1] == 0:
        rule = f"q and {key} have the same head size D, at least 1"
    elif of_k != of_v and of_k[:-1] != of_v[:-1]:
        rule = f"{key} and {value} have the same shape, up to the head size of {value}"
    elif of_k[-2] == 0 or of_q[-2] % of_k[-2]:
        rule = f"the heads of q, in its dimension before the last, are a multiple of the heads of {key}"
    elif layout is ROWS and of_q[0] != of_k[0]:
        rule = f"q, {key} and {value} have the same batch size"
    if rule:
        raise CallError(f"{name}: q is {tuple(of_q)}, {key} {tuple(of_k)} and {value} {tuple(of_v)}. Fix: {rule}.")
    return of_q, of_k


def check_numbers(name: str, dropout_p: Any, softmax_scale: Any, softcap: Any, causal: Any) -> None:
    """Raise unless each option is one plain number, in its range."""
    plain = softmax_scale is None and type(dropout_p) is type(softcap) is float and type(causal) is bool
    if plain and dropout_p == softcap == 0.0:  # as most calls have it
        return
    numbers = (
        ("dropout_p", dropout_p, 0.0, 1.0, "a probability, 0 .. 1"),
        ("softmax_scale", softmax_scale, -math.inf, math.inf, "a finite number, or None for 1 / sqrt(D)"),
        ("softcap", softcap, 0.0, math.inf, "a positive number, or 0.0 for no cap"),
    )
    for argument, value, low, high, fix in numbers:
        if value is None and argument != "dropout_p":
            continue
        plain = isinstance(value, int | float | np.integer | np.floating)
        if not plain or not (low <= value <= high and math.isfinite(value)):
            raise CallError(f"{name}: {argument} is {_shown(value)}. Fix: {fix}.")
    if not isinstance(causal, bool | int | np.bool_ | None):
        raise CallError(
            f"{name}: causal is {_shown(causal)}. Fix: True or False; there are no tables of who sees whom."
        )


def read_window(name: str, window_size: Any) -> tuple[int, int]:
    """(left, right), -1 for no limit."""
    if window_size is NO_WINDOW:
        return NO_WINDOW
    try:
        left, right = (operator.index(n) for n in window_size)
    except (TypeError, ValueError):
        raise CallError(
            f"{name}: window_size is {_shown(window_size)}. Fix: (left, right), two whole numbers, -1 for no limit."
        ) from None
    return tuple(-1 if n < 0 or n >= POSITION_MAX else n for n in (left, right))  # type: ignore[return-value]


def check_slopes(name: str, slopes: Any, rows: int, heads: int) -> None:
    """Raise unless slopes, where given, are one per query head, and per sequence or not."""
    if slopes is None or (isinstance(slopes, Tensor) and tuple(slopes.shape) in ((heads,), (rows, heads))):
        return
    got = tuple(slopes.shape) if isinstance(slopes, Tensor) else type(slopes).__name__
    raise CallError(
        f"{name}: alibi_slopes is {got}. Fix: a torch tensor ({heads},) or ({rows}, {heads}), one per query head."
    )


def whole_numbers(name: str, argument: str, value: Any, sizes: tuple[int | str, ...]) -> NDArray[np.int64]:
    """An argument of whole numbers as int64, of the given sizes; the name of a size fits any."""
    try:
        numbers = value.numpy(force=not value.is_cpu) if isinstance(value, Tensor) else np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        numbers = np.empty(0)
    fits = numbers.dtype.kind in "iu" and numbers.ndim == len(sizes)
    for size, given in zip(sizes, numbers.shape, strict=False):
        fits = fits and (size == given or type(size) is str)
    if not fits:
        got = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else _shown(value)
        shape = f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(map(str, sizes))})"
        raise CallError(f"{name}: {argument} is {got}. Fix: whole numbers {shape}.")
    return numbers.astype(np.int64, copy=False)


def check_range(name: str, argument: str, numbers: list[int], below: int) -> None:
    """Raise unless each number is one of 0 .. below - 1."""
    if numbers and not 0 <= min(numbers) <= max(numbers) < below:
        fix = "at least 0" if below == POSITION_MAX else f"each of 0 .. {below - 1}"
        raise CallError(f"{name}: {argument} is {numbers!r:.60}. Fix: {fix}.")


def for_rows(name: str, argument: str, value: int | Tensor, rows: int) -> list[int]:
    """A position of each row, from one for all rows or one for each."""
    dimensions = value.ndim if isinstance(value, Tensor) else np.ndim(value)
    if dimensions == 0:
        number: int = whole_numbers(name, argument, value, ()).item()
        of_rows = [number for _ in range(rows)]
    else:
        of_rows = _list_of(name, argument, value, rows)
    check_range(name, argument, of_rows, POSITION_MAX)
    return of_rows


def _list_of(name: str, argument: str, value: Any, size: int | str) -> list[int]:
    """Whole numbers (size,), most of which are tensors of integers."""
    if isinstance(value, Tensor) and value.dtype in _INTEGERS and value.ndim == 1 and size in (value.shape[0], "B + 1"):
        given: list[int] = value.tolist()
        return given
    numbers: list[int] = whole_numbers(name, argument, value, (size,)).tolist()
    return numbers


def edges_of(name: str, argument: str, edges: Any, total: int | None = None) -> list[int]:
    """cu_seqlens, (B + 1,): ascending from 0, to ``total`` if it is given."""
    numbers = _list_of(name, argument, edges, "B + 1")
    ascends = len(numbers) > 1 and numbers[0] == 0 and numbers == sorted(numbers)
    if not ascends or total not in (None, numbers[-1]):
        fix = (
            "(B + 1,) whole numbers, ascending from 0" if total is None else f"ascending, from 0 to {total}, the tokens"
        )
        raise CallError(f"{name}: {argument} is {numbers!r:.60}. Fix: {fix}.")
    return numbers


def _shown(value: Any) -> str:
    return "a torch tensor" if isinstance(value, Tensor) else f"{value!r:.60}"
