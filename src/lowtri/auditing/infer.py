"""Which mask a model has: the simplest formula that agrees with everything measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from lowtri.auditing.context import Context
from lowtri.auditing.example import read_example
from lowtri.auditing.finding import movement
from lowtri.auditing.fitting import fitted
from lowtri.auditing.options import Bools, Options, vocabulary
from lowtri.auditing.pads import real_positions
from lowtri.auditing.running import try_example
from lowtri.auditing.system import System, redrawn
from lowtri.errors import CallError
from lowtri.masks import Mask

__all__ = ["InferredMask", "infer_mask"]

_DRAWS = (("random", 0), ("random", 1), ("extreme", 2))


@dataclass(frozen=True)
class InferredMask:
    """The mask that a model was measured to have; `str()` is its text.

    Attributes:
        mask: the formula, or a table where no formula of three parts agrees.
        text: its text; of the layers where their attention was read and all have the same, else from end to end.
        layers: the text of each layer's mask, where attention was read; else empty.
        seen: (B, N, N), whether an output moved with an input.
        nearest: the formula nearest to a table; equal to `text` where a formula agrees.
        differs: pairs (query, key) at which `nearest` differs from what was measured.
    """

    mask: Mask
    text: str
    layers: tuple[str, ...]
    seen: Bools
    nearest: str
    differs: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        return self.text

    @property
    def message(self) -> str:
        """The text, the layers, and the pairs that no formula explains."""
        lines = [self.text]
        if len(set(self.layers)) > 1:
            lines.append(_described(self.layers))
        if self.differs:
            pairs = ", ".join(f"({q}, {k})" for q, k in self.differs[:5])
            lines.append(f"nearest formula: {self.nearest}, which differs at {len(self.differs)} pairs: {pairs}")
        return "\n".join(lines)


def infer_mask(
    model: Any,
    example: Any,
    *,
    labels: Any = None,
    vocab_size: int | None = None,
    output: Callable[[Any], Any] | None = None,
    input: str | int | Sequence[str | int] | None = None,
    position_axis: int | None = None,
    batch_axis: int | str | None = "auto",
    redraw: bool | float = False,
    seed: int = 0,
) -> InferredMask:
    """Measure which inputs each output depends on, and find the simplest mask that agrees.

    >>> import numpy as np
    >>> from lowtri import infer_mask
    >>> x = np.random.default_rng(0).standard_normal((9, 4))
    >>> print(infer_mask(lambda x: np.cumsum(x, axis=0), x))
    causal
    >>> print(infer_mask(lambda x: np.array([x[max(0, t - 3) : t + 1].sum(0) for t in range(len(x))]), x))
    causal & window(4)

    Args:
        model, example, vocab_size, output, input, position_axis, batch_axis, redraw, seed: as in `audit`.
        labels: the document of each position, (N,) or (B, N), where documents are packed; by default read off the pairs.

    Returns:
        InferredMask: its `text` is what `lowtri.mask`, `block_mask` and the kernels take. A window that is longer than the
        example is not seen: the answer is about the lengths that were tried.

    Raises:
        CallError: if an argument cannot be used, or the model does not repeat itself.
    """
    options = Options("full", None, None, None, None, None, False, False, 0, 1, 0, seed)
    options.check(model, output, redraw)
    inputs, signature = read_example(
        example, model=model, input=input, position_axis=position_axis, batch_axis=batch_axis
    )
    audited = redrawn(model, 0.15 if redraw is True else float(redraw), seed) if redraw else model
    system = System(audited, signature, output, seed=seed)
    pairs = np.ones((1, inputs.n, inputs.n), bool)
    real = real_positions(inputs, signature.prefix, None)
    if labels is not None:
        labels = np.asarray(labels)
        if labels.shape not in ((inputs.n,), (inputs.batch, inputs.n)):
            shapes = f"({inputs.n},) or ({inputs.batch}, {inputs.n})"
            raise CallError(
                f"infer_mask: labels= has the shape {labels.shape}, expected {shapes}.\nFix: the document of each position."
            )
        labels = np.broadcast_to(labels, (inputs.batch, inputs.n))
    with system.prepared():
        ids = vocabulary(system, inputs, vocab_size)
        context = Context(system, inputs, pairs, pairs, real, options, ids, lambda *_: None)
        try_example(context)
        if context.noise.broken:
            raise CallError(
                f"infer_mask: {context.noise.broken}.\nFix: make the model repeat itself: eval mode, seeds."
            )
        seen = _measured(context)
        layers = _layers(context) if system.module is not None else []
    care = real[:, :, None] & real[:, None, :]
    texts = tuple(fitted(pairs, care, labels).text for pairs in layers)
    fit = fitted(layers[0] if len(set(texts)) == 1 else seen, care, labels)
    return InferredMask(fit.mask, fit.text, texts, seen, fit.nearest, fit.differs)


def _measured(context: Context) -> Bools:
    """Which inputs move each output, (B, N, N): in float64 where there is a copy, so that rounding moves nothing."""
    copy64 = context.float64
    context = context if isinstance(copy64, str) else copy64
    noise, inputs = context.noise, context.inputs
    seen = np.zeros((inputs.batch, context.n, context.n), bool)
    least = max(64 * noise.eps * noise.magnitude, 4 * noise.repeat, 4 * noise.reorder)
    for kind, salt in _DRAWS:
        fresh = context.fresh(salt, kind)
        for key in range(context.n):
            rows = context.system(inputs.change(np.arange(context.n) == key, fresh))
            seen[:, :, key] |= np.nan_to_num(movement(context.base, rows), nan=np.inf) > least
    return seen


def _layers(context: Context) -> list[Bools]:
    """The pairs (1 or B, N, N) of each layer's attention, in the order of the calls; none where no attention was read."""
    from lowtri.auditing.attentions import attention_tables

    model, inputs = context.system.module, context.inputs
    for attention in ("sdpa", "eager") if hasattr(model, "set_attn_implementation") else ("",):
        condition = replace(context.condition, attention=attention if attention != _attention(model) else "")
        options = {**inputs.options, "output_attentions": True} if attention == "eager" else inputs.options
        try:
            with context.under(condition).set():
                tables = attention_tables(lambda o=options: context.system.answer(replace(inputs, options=o)))  # type: ignore[misc]
        except Exception:
            continue
        tables = [pairs for pairs in tables if pairs.shape[-2:] == (context.n, context.n)]
        if tables:
            return tables
    return []


def _attention(model: Any) -> str | None:
    from lowtri.compat.transformers_private import attention_name

    return attention_name(model)


def _described(texts: Sequence[str]) -> str:
    """Which layers have which mask.

    >>> _described(["causal & window(4)", "causal & window(4)", "causal"] * 2)
    'layers 0-1 of each 3: causal & window(4), else causal'
    >>> _described(["causal", "full", "full"])
    'layer 0: causal, else full'
    """
    period = next(p for p in range(1, len(texts) + 1) if all(text == texts[i % p] for i, text in enumerate(texts)))
    kinds = list(dict.fromkeys(texts[:period]))
    parts = []
    for kind in kinds[:-1]:
        where = [i for i, text in enumerate(texts[:period]) if text == kind]
        runs = [list(group) for _, group in groupby(where, key=lambda i, w=where: i - w.index(i))]  # type: ignore[misc]
        spans = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
        each = f" of each {period}" if period < len(texts) else ""
        parts.append(f"layer{'s' if len(where) > 1 else ''} {spans}{each}: {kind}")
    return ", ".join([*parts, f"else {kinds[-1]}"])
