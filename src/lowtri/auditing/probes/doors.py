"""Other doors to the same model: asked for weights, by another attention, in training, compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding, Leak, first_line, moves
from lowtri.auditing.inputs import Inputs
from lowtri.auditing.noise import magnitude, movement
from lowtri.auditing.subject import Subject

__all__ = ["doors"]

_KEYWORDS = ("output_attentions", "output_hidden_states", "return_weights", "need_weights", "return_attention")


@dataclass(frozen=True)
class _Door:
    name: str
    subject: Subject
    options: dict[str, Any]
    attention: str | None = None
    same_answer: bool = True

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Set what the door sets, and put it back."""
        module = self.subject.module
        flags = [] if module is None else [(part, part.training) for part in module.modules()]
        before = getattr(getattr(module, "config", None), "_attn_implementation", None)
        try:
            if self.subject.training and module is not None:
                module.train()
            if self.attention:
                module.set_attn_implementation(self.attention)
                if module.config._attn_implementation != self.attention:
                    raise LookupError("the model kept the attention it had")
            yield
        finally:
            if self.attention:
                module.set_attn_implementation(before)
            for part, flag in flags:
                part.training = flag


def doors(context: Context) -> Finding:
    """Through each door the mask must hold; another answer behind an unbroken mask is a warning."""
    leaks: list[Leak] = []
    differ: dict[str, float] = {}
    opened: list[str] = []
    shut: dict[str, str] = {}
    for door in _doors(context):
        try:
            with door.open():
                difference, leak = _through(context, door)
        except Exception as error:
            shut[door.name] = first_line(error)
            continue
        opened.append(door.name)
        if leak is not None:
            leaks.append(leak)
        if difference:
            differ[door.name] = difference
        context.tick("doors", len(opened), len(opened))
    measured = {"opened": opened, "not_offered": shut, "differ": differ}
    if leaks:
        return Finding("doors", "leak", f"the mask is broken: {leaks[0].note}", tuple(leaks), measured)
    if differ:
        text = ", ".join(f"{name} by {size:.2g}" for name, size in differ.items())
        return Finding("doors", "warning", f"another door gives another answer: {text}", (), measured)
    if not opened:
        return Finding("doors", "skipped", "no other door is known", (), measured)
    return Finding("doors", "clean", f"the mask holds ({', '.join(opened)})", (), measured)


def _doors(context: Context) -> Iterator[_Door]:
    subject = context.subject
    for name in _KEYWORDS:
        if subject.accepts(name) or (name.startswith("output_") and hasattr(subject.model, "config")):
            for value in (True, False) if name == "need_weights" else (True,):
                yield _Door(f"{name}={value}", subject, {name: value})
    if hasattr(subject.model, "set_attn_implementation"):
        current = getattr(subject.model.config, "_attn_implementation", None)
        for name in ("eager", "sdpa"):
            if name != current:
                yield _Door(f"attn_implementation={name}", subject, {}, attention=name)
    if subject.module is not None and subject.model is subject.module and not subject.training:
        yield _Door("training mode", replace(subject, training=True), {}, same_answer=False)
    if context.options.get("compile"):
        import torch

        yield _Door("torch.compile", replace(subject, model=torch.compile(subject.model)), {})


def _through(context: Context, door: _Door) -> tuple[float, Leak | None]:
    """How far the door's answer is from the main one, and the first leak behind it."""

    def ask(inputs: Inputs) -> Any:
        return door.subject(replace(inputs, options={**inputs.options, **door.options}))

    base = ask(context.inputs)
    scale = magnitude(base, context.base)
    apart = 0.0
    if door.same_answer and base.shape == context.base.shape:
        sizes = np.nan_to_num(movement(context.base, base), nan=np.inf)
        sizes[np.broadcast_to(context.ignored, sizes.shape)] = 0.0
        if context.noise.weigh(float(sizes.max()), scale, doubtful=False) == "leak":
            apart = float(sizes.max())
    if np.abs(np.nan_to_num(movement(base, ask(context.inputs)), nan=0.0)).max() > 0:
        return apart, None  # this door does not repeat itself, so nothing can be said of it
    for salt, kind in ((500, "random"), (501, "random")):
        fresh = context.fresh(salt, kind)
        for query in context.places(8):
            where = ~context.allowed[:, query, :]
            if not where.any():
                continue
            sizes = np.nan_to_num(movement(base, ask(context.inputs.change(where, fresh))), nan=np.inf)
            wrong = np.where(context.untouched(where), sizes, 0.0)
            for row, first in np.argwhere(wrong > 0):
                if context.noise.weigh(float(wrong[row, first]), scale) == "leak":
                    key, size = _key(context, ask, base, int(row), int(first), fresh, float(wrong[row, first]))
                    note = (
                        f"with {door.name}, position {first} sees position {key}: its output {moves(size).rstrip(',')}"
                    )
                    return apart, Leak(int(first), key, size, "doors", int(row), note=note)
    return apart, None


def _key(context: Context, ask: Any, base: Any, row: int, query: int, fresh: Inputs, size: float) -> tuple[int, float]:
    """The first hidden key that moves the query alone."""
    hidden = np.flatnonzero(~context.allowed[row % context.allowed.shape[0], query])
    places = set(context.places(32))
    for key in hidden:
        if int(key) in places:
            changed = context.inputs.change(np.arange(context.n) == key, fresh)
            moved = float(np.nan_to_num(movement(base, ask(changed)), nan=np.inf)[row, query])
            if context.noise.weigh(moved, magnitude(base)) == "leak":
                return int(key), moved
    return int(hidden[0]), size
