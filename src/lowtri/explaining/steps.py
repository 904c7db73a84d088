"""Every step of masked attention, with numbers: the inputs, every intermediate result, and the output, with and without the mask.

Computed in float64 by the definition in :mod:`lowtri.backends.reference`. A hidden weight is exactly 0 whatever its score; a
visible weight may also be 0, and the two look different wherever they are shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.backends.reference import Steps, attend
from lowtri.compat.transformers_private import model_inside
from lowtri.errors import CallError, MaskError
from lowtri.explaining.agreement import compare
from lowtri.explaining.capture import Captured, capture_arrays, capture_module, capture_scores
from lowtri.explaining.explanation import PAIRS, Explanation, Step, StepText, number, printable
from lowtri.explaining.models import capture_model
from lowtri.masks import Mask, as_mask
from lowtri.masks.label_masks import check_packed_totals
from lowtri.masks.tile import short_repr
from lowtri.pictures.labels import split
from lowtri.sentences import sentence, texts

_MOST_PAIRS = 2**24  # of all heads: tables of 128 MB each
_FORMULAS = {  # of each step, in the order of computing; its sentence is that of lowtri.sentences
    "tokens": "",
    "embedding": "",
    "position": "",
    "encoding": "{sum}",
    "W_q^T": "",
    "W_k^T": "",
    "W_v^T": "",
    "b_q": "",
    "b_k": "",
    "b_v": "",
    "q": "encoding W_q^T",
    "k": "encoding W_k^T",
    "v": "encoding W_v^T",
    "scores": "q k^T",
    "scaled": "{scaled}",
    "capped": "{softcap} tanh(scaled / {softcap})",
    "bias": "",
    "mask": "",
    "masked": "{last} where visible, else {hidden}",
    "weights": "softmax(masked{sink}) along the row",
    "output": "weights v",
    "joined": "heads side by side",
    "own output": "",
}
_NAMES = {"q": "queries", "k": "keys", "v": "values"}


def _sentence(name: str, captured: Captured, lang: str, words: dict[str, str]) -> str:
    """What a step is, in words."""
    if name in captured.sentences:
        key, values = captured.sentences[name]
        return sentence(lang, key, **values)
    if name.startswith(("W_", "b_")):
        key = "explain.map" if name.startswith("W_") else "explain.offset"
        return sentence(lang, key, name=sentence(lang, f"explain.{_NAMES[name[2]]}"))
    return sentence(lang, "explain.own" if name == "own output" else f"explain.{name}", **words)


def explain(
    what: Any = None,
    inputs: Any = None,
    *,
    scores: Any = None,
    values: Any = None,
    tokens: Sequence[str] | str | None = None,
    mask: Mask | str | None = None,
    position: Any = None,
    heads: int | None = None,
    layer: int = 0,
    head: int | None = None,
    batch: int | None = None,
    hidden: float = -math.inf,
    lang: str = "en",
) -> Explanation:
    """Every step of masked attention, with numbers.

    >>> import numpy as np
    >>> q = k = np.zeros((2, 1)); v = np.array([[1.0], [3.0]])
    >>> steps = explain((q, k, v), tokens=["a", "b"], mask="causal")
    >>> steps["weights"].value.tolist(), steps["weights"].unmasked.tolist()
    ([[1.0, 0.0], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]])

    Of a model of transformers, on lowtri's attention or on its own, the steps are those of one head in one layer: q, k and v as its
    attention receives them, after projections, norms and rotary embedding, under the mask that this layer has. They are read in one
    forward, in eval mode and without a cache, and nothing of the model is changed.

    >>> import torch, transformers
    >>> sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> config = transformers.MistralConfig(vocab_size=99, num_key_value_heads=2, sliding_window=2, **sizes)
    >>> model = transformers.MistralForCausalLM(config)
    >>> steps = explain(model, torch.tensor([5, 6, 7]), layer=1, head=3)
    >>> steps.mask, steps["q"].shape, steps["weights"].value[2].round(1).tolist()
    ('causal & window(2)', (3, 8), [0.0, 0.5, 0.5])

    A module's own output is compared with that of the steps, which are the textbook's. Where the two differ by more than rounding,
    ``warning`` says so, and the step ``"own output"`` has what the module gave.

    Args:
        what: ``(q, k, v)``, each (N, D), (H, N, D) or (B, H, N, D), NumPy or torch; or a module: one with W_q, W_k and
            W_v, a ``MultiHeadAttention``, a ``Decoder``, or a model of transformers other than an encoder-decoder.
        inputs: the module's input: encodings (N, d_model) or (B, N, d_model), or for a model the ids (N,) or (B, N), or a mapping with
            the arguments of its forward, such as what a tokenizer returns, with the attention_mask of padding.
        scores: instead of ``what``: scores as softmax takes them, after any scaling, (Nq, Nk), (H, Nq, Nk) or
            (B, H, Nq, Nk). Only mask and softmax are shown, and with ``values`` (Nk, D) also the output.
        tokens: a label for each token, as a list, or as one text that is cut at spaces, and by characters where its script has no
            spaces; by default their positions or ids.
        mask: which query may see which key; by default the module's own mask. A model of transformers must be switched to take one.
        position: (N, d_model) to add to ``inputs``, which are then the embeddings.
        heads: the number of heads into which a module with W_q, W_k and W_v is split.
        layer: which layer of a model.
        head: show this head only; for a model, which always shows one head, the default is the first.
        batch: which row of a batch; by default the first, and a note says so.
        hidden: how a hidden score is written, -inf or a number like -1e9. Its weight is exactly 0 either way.
        lang: the language of the sentences, "en", "id", "th" or "zh".

    Raises:
        CallError: if the shapes do not fit, there is no such layer, head or batch row, or a model's attention cannot be read: an
            encoder-decoder, and attention code that does not ask the attention interface of transformers.
        MaskError: for arrays without a mask, and for a mask with other batch rows than the arrays.
    """
    texts(lang, "explain")  # raises for a language that is not there
    _check_hidden(hidden)
    if scores is not None or values is not None:
        if what is not None or scores is None:
            raise CallError(
                "explain: values go with scores, and scores stand alone. Fix: explain(scores=..., mask=...)."
            )
        captured = capture_scores(scores, values, batch)
    elif isinstance(what, tuple | list):
        captured = capture_arrays(what, batch)
    elif (model := model_inside(what)) is not None:
        if position is not None or heads is not None:
            raise CallError("explain: position and heads are for a module with W_q, W_k and W_v. Fix: leave them out.")
        captured = capture_model(model, inputs, layer=layer, head=head, mask=mask, batch=batch)
        mask, head = None, None  # both are in what was captured
    else:
        captured = capture_module(what, inputs, position=position, heads=heads, layer=layer, mask=mask, batch=batch)
    allowed = as_mask(captured.mask if mask is None else mask, "explain: mask")
    count, nq, nk = captured.pairs
    if count * nq * nk > _MOST_PAIRS:
        raise CallError(
            f"explain: {nq:,} queries and {nk:,} keys in {count} {'head' if count == 1 else 'heads'} have {count * nq * nk:,} pairs, "
            f"more than {_MOST_PAIRS:,} that fit on a page. Fix: fewer tokens."
        )
    given = _every_head(captured.arrays, count)
    visible = _visible(allowed, captured, batch or 0) if captured.visible is None else captured.visible
    head = captured.head if head is None else head
    if head is not None:
        if not isinstance(head, int | np.integer) or not 0 <= head < count:
            raise CallError(f"explain: there is no head {head!r:.60} among {count}. Fix: head from 0 to {count - 1}.")
        given = {name: value[head : head + 1] if value.ndim == 3 else value for name, value in given.items()}
        visible = visible[head : head + 1]

    result = _attend(given, visible, captured)
    everything = _attend(given, visible | True, captured)
    steps, unmasked = _steps(given, visible, result, everything, captured.bias, hidden)
    agreement = compare(captured, result, visible, head)
    if agreement.own is not None:
        steps["own output"] = agreement.own  # (H, Nq, Dv)

    labels = _labels(captured.tokens if tokens is None else tokens, nk)
    steps = {"tokens": np.arange(nk)[:, None], **steps}
    words = {"hidden": number(hidden), "sum": "embedding + position" if "position" in steps else ""}
    words |= _words(captured, result, steps)
    shown = []
    for name, value in steps.items():
        if name.startswith("W_"):  # a row for each number of the encoding
            rows = _numbered(value.shape[-2])
        else:
            rows = ("bias",) if name.startswith("b_") else labels[nk - value.shape[-2] :]
        if name in PAIRS:
            columns = labels
        else:
            columns = ("position",) if name == "tokens" else _numbered(value.shape[-1])
        without = _alone(unmasked[name]) if name in unmasked else None
        formula = captured.formulas.get(name, _FORMULAS[name]).format(**words)
        about = StepText(name, formula, _sentence(name, captured, lang, words), rows, columns, lang)
        shown.append(Step(_alone(value), about, without, _alone(visible)))
    notes = [f"Batch row {batch or 0} of {captured.rows}."] if captured.rows > 1 else []
    notes += [*captured.notes, *([agreement.note] if agreement.note else [])]
    return Explanation(labels, repr(allowed), _alone(visible), tuple(shown), " ".join(notes), agreement.warning, lang)


def _check_hidden(hidden: Any) -> None:
    """Raise unless a hidden score can be written so: one number, and not NaN."""
    is_number = isinstance(hidden, int | float | np.integer | np.floating) and not isinstance(hidden, bool)
    if not is_number or (not -(2**1000) < hidden < 2**1000 and hidden != -math.inf):
        raise CallError(
            f"explain: hidden is {short_repr(hidden)}; expected a number. Fix: hidden=-1e9, or leave it out for -inf."
        )


def _attend(given: dict[str, NDArray[Any]], visible: NDArray[np.bool_], captured: Captured) -> Steps:
    """The definition, from q, k and v, or from the scores."""
    if "q" in given:
        q, k, v = (given[name][None] for name in "qkv")  # (1, H, Nq, D), (1, H, Nk, D), (1, H, Nk, Dv)
        scale = q.shape[-1] ** -0.5 if captured.scale is None else captured.scale
        bias = None if captured.bias is None else captured.bias[None]
        return attend(q, k, v, visible[None], scale=scale, softcap=captured.softcap, bias=bias, sinks=captured.sinks)
    scores = given["scores"][None]  # (1, H, Nq, Nk)
    _, count, nq, nk = scores.shape
    v = given["v"][None] if "v" in given else np.zeros((1, count, nk, 0))
    return attend(np.zeros((1, count, nq, 1)), np.zeros((1, count, nk, 1)), v, visible[None], scale=1.0, bias=scores)


def _steps(
    given: dict[str, NDArray[Any]],
    visible: NDArray[np.bool_],
    result: Steps,
    without_mask: Steps,
    bias: NDArray[np.float64] | None,
    hidden: float,
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Every step in order, (H, rows, columns) or (rows, columns), and some of them without the mask."""
    steps = dict(given)
    values = steps.pop("v") if "v" in given and "q" not in given else None  # of given scores, they come last
    if "q" in given:
        steps |= {"scores": result.scores[0], "scaled": result.scaled[0]}
        if result.softcap is not None:
            steps["capped"] = result.capped[0]
        if bias is not None:
            steps["bias"] = bias
    last = without_mask.masked[0]
    steps |= {"mask": visible, "masked": np.where(visible, last, hidden), "weights": result.weights[0]}  # (H, Nq, Nk)
    unmasked = {"masked": last, "weights": without_mask.weights[0], "output": without_mask.output[0]}
    if values is not None:
        steps["v"] = values
    if "v" in given:
        steps["output"] = result.output[0]  # (H, Nq, Dv)
        if len(visible) > 1:
            steps["joined"] = np.concatenate(list(result.output[0]), axis=-1)  # (Nq, H Dv)
    return steps, unmasked


def _words(captured: Captured, result: Steps, steps: dict[str, NDArray[Any]]) -> dict[str, str]:
    """What the formulas of the steps name: the scale, the softcap and the sink of this attention."""
    root = 1 / result.scale**2 if result.scale > 0 else 0.0
    by_root = abs(root - round(root)) < 1e-6 * root
    words = {"scaled": f"scores / sqrt({round(root)})" if by_root else f"{result.scale:.6g} scores"}
    last = "capped" if "capped" in steps else "scaled"
    words["last"] = f"{last} + bias" if "bias" in steps else last
    words["softcap"] = "" if captured.softcap is None else f"{captured.softcap:g}"
    words["sink"] = (
        "" if captured.sinks is None else f" and a sink of {float(captured.sinks[0]):.4f}, which has no value"
    )
    return words


def _every_head(arrays: dict[str, NDArray[Any]], count: int) -> dict[str, NDArray[Any]]:
    """Grouped heads written out: each key/value head once for every query head that it serves."""
    return {name: np.repeat(a, count // len(a), axis=0) if a.ndim == 3 else a for name, a in arrays.items()}


def _visible(mask: Mask, captured: Captured, row: int) -> NDArray[np.bool_]:
    """The table of one batch row for each head (H, Nq, Nk); True = may see."""
    count, nq, nk = captured.pairs
    if mask.batch[:1] not in ((), (1,), (captured.rows,)):
        raise MaskError(
            f"explain: the mask differs between {mask.batch[0]} batch rows, but the arrays have {captured.rows}.\n"
            "Fix: mask.for_row(b) for the mask of row b."
        )
    if mask.batch[1:] not in ((), (1,), (count,)):
        raise MaskError(f"explain: the mask is for {mask.batch[1]} heads, but there are {count}.")
    check_packed_totals("explain", mask, nk)
    table = mask.dense(nq, nk)
    if mask.batch:
        table = table[row if mask.batch[0] > 1 else 0]
    return np.broadcast_to(table, (count, nq, nk))


def _alone(value: NDArray[Any]) -> NDArray[Any]:
    """One head needs no axis for heads."""
    return value[0] if value.ndim == 3 and len(value) == 1 else value


def _numbered(n: int) -> tuple[str, ...]:
    return tuple(str(i) for i in range(n))


def _labels(tokens: Sequence[str] | str | None, n: int) -> tuple[str, ...]:
    if tokens is None:
        return _numbered(n)
    how = ""
    if isinstance(tokens, str):
        tokens, how = split(tokens)
    if not isinstance(tokens, Iterable):
        raise CallError(f"explain: tokens is {tokens!r:.60}; expected one label for each key. Fix: a list of texts.")
    tokens = list(tokens)
    if len(tokens) != n:
        first = [printable(token) for token in tokens[:8]]
        if len(tokens) > 8:
            first.append("...")
        shown = f", {how}: {' | '.join(first)}" if how else ""
        raise CallError(f"explain: {len(tokens)} tokens for {n} keys{shown}.\nFix: a list with one label for each key.")
    return tuple(str(token) for token in tokens)
