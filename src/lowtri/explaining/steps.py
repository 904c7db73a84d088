"""Every step of masked attention, with numbers: what goes in, what each step does to it, masked beside unmasked.

Computed in float64 by the definition in :mod:`lowtri.ops.reference`. A hidden weight is exactly 0 whatever stands there; a
visible weight may be 0 too, and the two are told apart wherever they are shown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError, MaskError
from lowtri.explaining.capture import look_inside, three_arrays
from lowtri.explaining.show import as_text, number
from lowtri.masks import Mask, as_mask
from lowtri.ops.reference import attend

__all__ = ["Explanation", "Step", "explain"]

# name -> formula, sentence. The order is the order of computing.
_SAID = {
    "tokens": ("", "The sentence as tokens. Each stands at a place in the sequence, counted from 0."),
    "embedding": ("", "The numbers of each token by itself, the same wherever it stands."),
    "position": ("", "The numbers of each place, the same whatever stands there."),
    "encoding": ("{sum}", "What attention reads: a row for each token."),
    "W_q": ("", "The learned map to queries, as it multiplies: a row for each number of the encoding."),
    "W_k": ("", "The learned map to keys, as it multiplies: a row for each number of the encoding."),
    "W_v": ("", "The learned map to values, as it multiplies: a row for each number of the encoding."),
    "q": ("encoding W_q^T", "What each token asks for."),
    "k": ("encoding W_k^T", "What each token answers to."),
    "v": ("encoding W_v^T", "What each token hands on when it is looked at."),
    "scores": ("q k^T", "How well each question (row) meets each answer (column)."),
    "scaled": ("scores / sqrt({size})", "Scaled so that a wider head does not make larger scores."),
    "mask": ("", "Who may see whom: a row for each token that looks, a column for each token looked at."),
    "masked": ("scaled where visible, else {hidden}", "What the mask hides can no longer win any weight."),
    "weights": (
        "softmax(masked) along the row",
        "How much each token looks at each: a row sums to 1 over what it sees.",
    ),
    "output": ("weights v", "What each token takes away: the values it looked at, in these proportions."),
    "joined": ("heads side by side", "The heads' outputs, one after the other in each row."),
}
_PAIRS = ("scores", "scaled", "mask", "masked", "weights")


@dataclass(frozen=True)
class Step:
    """One step: its value, (rows, columns) or (heads, rows, columns), with a label for each row and column."""

    name: str
    formula: str
    sentence: str
    value: NDArray[Any]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    unmasked: NDArray[Any] | None = None  # the same step had there been no mask

    @property
    def hatched(self) -> bool:
        """Whether the cells are pairs of tokens that the mask may hide."""
        return self.name in ("mask", "masked", "weights")


@dataclass(frozen=True)
class Explanation:
    """All steps, in order. ``print`` shows tables; ``explanation["weights"].value`` is the array of one step."""

    tokens: tuple[str, ...]
    mask: str
    visible: NDArray[np.bool_]  # (Nq, Nk), or (H, Nq, Nk) with several heads; True = may see
    steps: tuple[Step, ...]
    note: str = ""

    def __getitem__(self, name: str) -> Step:
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(f"no step {name!r}; there are {', '.join(step.name for step in self.steps)}")

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"Explanation({len(self.tokens)} tokens, {self.mask}, {len(self.steps)} steps)"

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain lists and numbers. What JSON has no number for is text: "-inf", "inf", "nan"."""
        return {
            "tokens": list(self.tokens),
            "mask": self.mask,
            "note": self.note,
            "visible": self.visible.tolist(),
            "steps": [
                {
                    "name": step.name,
                    "formula": step.formula,
                    "sentence": step.sentence,
                    "shape": list(step.value.shape),
                    "rows": list(step.rows),
                    "columns": list(step.columns),
                    "value": _plain(step.value.tolist()),
                    "unmasked": None if step.unmasked is None else _plain(step.unmasked.tolist()),
                }
                for step in self.steps
            ],
        }

    def to_json(self) -> str:
        """:meth:`as_dict` as text."""
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def to_html(self) -> str:
        """One page that needs nothing else: no network, no script."""
        from lowtri.explaining.html import as_html

        return as_html(self)

    _repr_html_ = to_html


def explain(
    what: Any,
    inputs: Any = None,
    *,
    tokens: Sequence[str] | None = None,
    mask: Mask | str | None = None,
    position: Any = None,
    heads: int = 1,
    layer: int = 0,
    head: int | None = None,
    hidden: float = -math.inf,
) -> Explanation:
    """Every step of masked attention, with numbers.

    >>> import numpy as np
    >>> q = k = np.zeros((2, 1)); v = np.array([[1.0], [3.0]])
    >>> steps = explain((q, k, v), tokens=["a", "b"], mask="causal")
    >>> steps["weights"].value.tolist(), steps["weights"].unmasked.tolist()
    ([[1.0, 0.0], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]])

    Args:
        what: ``(q, k, v)``, each (N, D) or (H, N, D), NumPy or torch; or a module: one with W_q, W_k and W_v, a
            ``MultiHeadAttention``, or a ``Decoder``.
        inputs: what the module reads: encodings (N, d_model), or for a decoder the ids (N,).
        tokens: a label for each token; their places, or the ids, if not given.
        mask: who may see whom; a module's own if not given.
        position: (N, d_model) to add to ``inputs``, which are then the embeddings.
        heads: into how many heads a module with W_q, W_k and W_v is cut.
        layer: which layer of a decoder.
        head: this head alone; a decoder shows one head, the first if not given.
        hidden: how a hidden score is written, -inf or a number like -1e9. Its weight is exactly 0 either way.

    Raises:
        CallError: if the shapes do not fit, or there is no such layer or head.
        MaskError: for (q, k, v) without a mask, and for a mask that differs between batch rows.
    """
    if isinstance(what, tuple | list):
        inside = three_arrays(what)
    else:
        inside = look_inside(what, inputs, position=position, heads=heads, layer=layer, mask=mask)
    allowed = as_mask(inside.mask if mask is None else mask)
    values = _every_head(inside.arrays)
    count, nq, nk = len(values["q"]), values["q"].shape[1], values["k"].shape[1]
    visible = _visible(allowed, count, nq, nk)
    head = inside.head if head is None else head
    if head is not None:
        if not 0 <= head < count:
            raise CallError(f"explain: head {head} asked, but there are {count}. Fix: head from 0 to {count - 1}.")
        values = {name: value[head : head + 1] if value.ndim == 3 else value for name, value in values.items()}
        visible = visible[head : head + 1]

    q, k, v = values["q"], values["k"], values["v"]  # (H, Nq, D), (H, Nk, D), (H, Nk, Dv)
    found, without = (
        attend(q[None], k[None], v[None], seen[None], scale=q.shape[-1] ** -0.5) for seen in (visible, visible | True)
    )
    masked = np.where(visible, found.scaled[0], hidden)
    values |= {"scores": found.scores[0], "scaled": found.scaled[0], "mask": visible, "masked": masked}
    values |= {"weights": found.weights[0], "output": found.output[0]}  # (H, Nq, Nk), (H, Nq, Dv)
    if len(q) > 1:
        values["joined"] = np.concatenate(list(found.output[0]), axis=-1)  # (Nq, H Dv)
    unmasked = {"masked": found.scaled[0], "weights": without.weights[0], "output": without.output[0]}

    labels = _labels(inside.tokens if tokens is None else tokens, nk)
    values = {"tokens": np.arange(nk)[:, None], **values}
    words = {"hidden": number(hidden), "size": q.shape[-1], "sum": "embedding + position" * ("position" in values)}
    said = {name: (formula.format(**words), sentence) for name, (formula, sentence) in {**_SAID, **inside.said}.items()}
    steps = [_step(name, value, labels, said[name], unmasked.get(name)) for name, value in values.items()]
    note = ""
    if inside.output is not None:
        own = inside.output if head is None else inside.output[head : head + 1]  # (H, Nq, Dv)
        note = f"Computed anew in float64; the model's own output differs by {abs(own - values['output']).max():.0e}."
    return Explanation(labels, repr(allowed), _alone(visible), tuple(steps), note)


def _every_head(arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Grouped heads written out: each key/value head once for every query head that it serves."""
    count = len(arrays["q"])
    return {name: np.repeat(a, count // len(a), axis=0) if a.ndim == 3 else a for name, a in arrays.items()}


def _visible(mask: Mask, count: int, nq: int, nk: int) -> NDArray[np.bool_]:
    """The table for each head (H, Nq, Nk); True = may see."""
    if mask.batch[:1] not in ((), (1,)):
        raise MaskError(
            f"explain: looks at one sequence, but the mask differs between {mask.batch[0]} batch rows.\n"
            "Fix: mask.at(b) for the mask of row b."
        )
    if mask.batch[1:] not in ((), (1,), (count,)):
        raise MaskError(f"explain: the mask is for {mask.batch[1]} heads, but there are {count}.")
    table = mask.dense(nq, nk)
    return np.broadcast_to(table[0] if len(mask.batch) else table, (count, nq, nk))


def _step(
    name: str,
    value: NDArray[Any],
    labels: tuple[str, ...],
    said: tuple[str, str],
    unmasked: NDArray[Any] | None,
) -> Step:
    by_number = name.startswith("W_")  # a map's rows are numbers of the encoding, every other row is a token
    rows = _numbered(value.shape[-2]) if by_number else labels[len(labels) - value.shape[-2] :]
    columns = labels if name in _PAIRS else ("place",) if name == "tokens" else _numbered(value.shape[-1])
    return Step(name, *said, _alone(value), rows, columns, None if unmasked is None else _alone(unmasked))


def _alone(value: NDArray[Any]) -> NDArray[Any]:
    """One head needs no axis for heads."""
    return value[0] if value.ndim == 3 and len(value) == 1 else value


def _numbered(n: int) -> tuple[str, ...]:
    return tuple(str(i) for i in range(n))


def _labels(tokens: Sequence[str] | None, n: int) -> tuple[str, ...]:
    if tokens is None:
        return _numbered(n)
    if len(tokens) != n:
        raise CallError(f"explain: {len(tokens)} tokens for {n} keys. Fix: one label for each key.")
    return tuple(str(token) for token in tokens)


def _plain(value: Any) -> Any:
    """Nested lists without the numbers that JSON does not have."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
