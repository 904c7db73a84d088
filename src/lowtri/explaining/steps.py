"""Every step of masked attention, with numbers: the inputs, every intermediate result, and the output, with and without the mask.

Computed in float64 by the definition in :mod:`lowtri.backends.reference`. A hidden weight is exactly 0 whatever its score; a
visible weight may also be 0, and the two look different wherever they are shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.backends.reference import Steps, attend
from lowtri.errors import CallError, MaskError
from lowtri.explaining.capture import Captured, capture_arrays, capture_module, capture_scores
from lowtri.explaining.explanation import PAIRS, Explanation, Step, number
from lowtri.masks import Mask, as_mask
from lowtri.masks.label_masks import check_row_lengths

_MOST_PAIRS = 2**24  # of all heads: tables of 128 MB each
# name -> formula, sentence. The order is the order of computing.
_TEXTS = {
    "tokens": ("", "The sentence as tokens. Each has a position in the sequence, counted from 0."),
    "embedding": ("", "The numbers of each token by itself, the same at every position."),
    "position": ("", "The numbers of each position, the same for every token."),
    "encoding": ("{sum}", "What attention reads: a row for each token."),
    "q": ("encoding W_q^T", "What each token asks for."),
    "k": ("encoding W_k^T", "What each token answers to."),
    "v": ("encoding W_v^T", "What each token hands on when it is looked at."),
    "scores": ("q k^T", "The dot product of each query (row) with each key (column)."),
    "scaled": ("scores / sqrt({size})", "Scaled so that a wider head does not make larger scores."),
    "mask": ("", "Who may see whom: a row for each query, a column for each key."),
    "masked": ("scaled where visible, else {hidden}", "What the mask hides gets the weight 0."),
    "weights": (
        "softmax(masked) along the row",
        "How much each token looks at each: a row sums to 1 over what it sees.",
    ),
    "output": ("weights v", "What each token takes away: the values it looked at, in these proportions."),
    "joined": ("heads side by side", "The heads' outputs, one after the other in each row."),
}
for _name in ("queries", "keys", "values"):
    _weight = f"The weight of the map to {_name}, transposed: a row for each number of the encoding."
    _TEXTS[f"W_{_name[0]}^T"] = ("", _weight)
    _TEXTS[f"b_{_name[0]}"] = ("", f"The bias of the map to {_name}, added to each row.")


def explain(
    what: Any = None,
    inputs: Any = None,
    *,
    scores: Any = None,
    values: Any = None,
    tokens: Sequence[str] | None = None,
    mask: Mask | str | None = None,
    position: Any = None,
    heads: int = 1,
    layer: int = 0,
    head: int | None = None,
    batch: int | None = None,
    hidden: float = -math.inf,
) -> Explanation:
    """Every step of masked attention, with numbers.

    >>> import numpy as np
    >>> q = k = np.zeros((2, 1)); v = np.array([[1.0], [3.0]])
    >>> steps = explain((q, k, v), tokens=["a", "b"], mask="causal")
    >>> steps["weights"].value.tolist(), steps["weights"].unmasked.tolist()
    ([[1.0, 0.0], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]])

    Args:
        what: ``(q, k, v)``, each (N, D), (H, N, D) or (B, H, N, D), NumPy or torch; or a module: one with W_q, W_k and
            W_v, a ``MultiHeadAttention``, or a ``Decoder``.
        inputs: the module's input: encodings (N, d_model) or (B, N, d_model), or for a decoder the ids (N,) or (B, N).
        scores: instead of ``what``: scores as softmax takes them, after any scaling, (Nq, Nk), (H, Nq, Nk) or
            (B, H, Nq, Nk). Only mask and softmax are shown, and with ``values`` (Nk, D) also the output.
        tokens: a label for each token; by default their positions or ids.
        mask: which query may see which key; by default the module's own mask.
        position: (N, d_model) to add to ``inputs``, which are then the embeddings.
        heads: the number of heads into which a module with W_q, W_k and W_v is split.
        layer: which layer of a decoder.
        head: show this head only; for a decoder, which always shows one head, the default is the first.
        batch: which row of a batch; by default the first, and a note says so.
        hidden: how a hidden score is written, -inf or a number like -1e9. Its weight is exactly 0 either way.

    Raises:
        CallError: if the shapes do not fit, or there is no such layer, head or batch row.
        MaskError: for arrays without a mask, and for a mask with other batch rows than the arrays.
    """
    if scores is not None or values is not None:
        if what is not None or scores is None:
            raise CallError(
                "explain: values go with scores, and scores stand alone. Fix: explain(scores=..., mask=...)."
            )
        captured = capture_scores(scores, values, batch)
    elif isinstance(what, tuple | list):
        captured = capture_arrays(what, batch)
    else:
        captured = capture_module(what, inputs, position=position, heads=heads, layer=layer, mask=mask, batch=batch)
    allowed = as_mask(captured.mask if mask is None else mask, "explain: mask")
    count, nq, nk = captured.pairs
    if count * nq * nk > _MOST_PAIRS:
        raise CallError(
            f"explain: {nq:,} queries and {nk:,} keys in {count} head{'s' * (count > 1)} have {count * nq * nk:,} pairs, "
            f"more than {_MOST_PAIRS:,} that fit on a page. Fix: fewer tokens."
        )
    steps = _every_head(captured.arrays, count)
    visible = _visible(allowed, captured, batch or 0)
    head = captured.head if head is None else head
    if head is not None:
        if not 0 <= head < count:
            raise CallError(f"explain: there is no head {head} among {count}. Fix: head from 0 to {count - 1}.")
        steps = {name: value[head : head + 1] if value.ndim == 3 else value for name, value in steps.items()}
        visible = visible[head : head + 1]

    masked_result, unmasked_result = _attend(steps, visible), _attend(steps, visible | True)
    if "q" in steps:
        steps |= {"scores": masked_result.scores[0], "scaled": masked_result.scaled[0]}
    last = steps["scaled" if "q" in steps else "scores"]
    steps |= {
        "mask": visible,
        "masked": np.where(visible, last, hidden),
        "weights": masked_result.weights[0],
    }  # (H, Nq, Nk)
    unmasked = {"masked": last, "weights": unmasked_result.weights[0], "output": unmasked_result.output[0]}
    if "v" in steps:
        steps["v"] = steps.pop("v") if "q" not in steps else steps["v"]  # of given scores, the values come last
        steps["output"] = masked_result.output[0]  # (H, Nq, Dv)
        if len(visible) > 1:
            steps["joined"] = np.concatenate(list(masked_result.output[0]), axis=-1)  # (Nq, H Dv)

    labels = _labels(captured.tokens if tokens is None else tokens, nk)
    steps = {"tokens": np.arange(nk)[:, None], **steps}
    words = {"hidden": number(hidden), "sum": "embedding + position" * ("position" in steps)}
    words["size"] = str(steps["q"].shape[-1]) if "q" in steps else ""
    formulas = {name: formula for name, (formula, _) in _TEXTS.items()} | captured.formulas
    sentences = {name: sentence for name, (_, sentence) in _TEXTS.items()} | captured.sentences
    shown = []
    for name, value in steps.items():
        if name.startswith("W_"):  # a row for each number of the encoding
            rows = _numbered(value.shape[-2])
        else:
            rows = ("bias",) if name.startswith("b_") else labels[nk - value.shape[-2] :]
        columns = labels if name in PAIRS else ("position",) if name == "tokens" else _numbered(value.shape[-1])
        without = _alone(unmasked[name]) if name in unmasked else None
        shown.append(Step(name, formulas[name].format(**words), sentences[name], _alone(value), rows, columns, without))
    notes = [f"Batch row {batch or 0} of {captured.rows}."] if captured.rows > 1 else []
    if captured.output is not None:
        own = captured.output if head is None else captured.output[head : head + 1]  # (H, Nq, Dv)
        difference = abs(own - steps["output"]).max()
        notes.append(f"Computed anew in float64; the model's own output differs by {difference:.0e}.")
    return Explanation(labels, repr(allowed), _alone(visible), tuple(shown), " ".join(notes))


def _attend(steps: dict[str, NDArray[Any]], visible: NDArray[np.bool_]) -> Steps:
    """The definition, from q, k and v, or from the scores."""
    if "q" in steps:
        q, k, v = (steps[name][None] for name in "qkv")  # (1, H, Nq, D), (1, H, Nk, D), (1, H, Nk, Dv)
        return attend(q, k, v, visible[None], scale=q.shape[-1] ** -0.5)
    scores = steps["scores"][None]  # (1, H, Nq, Nk)
    _, count, nq, nk = scores.shape
    v = steps["v"][None] if "v" in steps else np.zeros((1, count, nk, 0))
    return attend(np.zeros((1, count, nq, 1)), np.zeros((1, count, nk, 1)), v, visible[None], scale=1.0, bias=scores)


def _every_head(arrays: dict[str, NDArray[Any]], count: int) -> dict[str, NDArray[Any]]:
    """Grouped heads written out: each key/value head once for every query head that it serves."""
    return {name: np.repeat(a, count // len(a), axis=0) if a.ndim == 3 else a for name, a in arrays.items()}


def _visible(mask: Mask, captured: Captured, row: int) -> NDArray[np.bool_]:
    """The table of one batch row for each head (H, Nq, Nk); True = may see."""
    count, nq, nk = captured.pairs
    if mask.batch[:1] not in ((), (1,), (captured.rows,)):
        raise MaskError(
            f"explain: the mask differs between {mask.batch[0]} batch rows, but the arrays have {captured.rows}.\n"
            "Fix: mask.at(b) for the mask of row b."
        )
    if mask.batch[1:] not in ((), (1,), (count,)):
        raise MaskError(f"explain: the mask is for {mask.batch[1]} heads, but there are {count}.")
    check_row_lengths("explain", mask, nk)
    table = mask.dense(nq, nk)
    if mask.batch:
        table = table[row if mask.batch[0] > 1 else 0]
    return np.broadcast_to(table, (count, nq, nk))


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
