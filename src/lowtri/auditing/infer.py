"""Which mask a model has: the simplest formula that agrees with everything measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtri.auditing.adapter import read_model
from lowtri.auditing.context import Context, movement
from lowtri.auditing.declared import DeclaredMask, blocks
from lowtri.auditing.example import Bools, read_example
from lowtri.auditing.model_under_test import ModelUnderTest
from lowtri.auditing.reading import find_separator, read_context
from lowtri.compat.transformers_private import attention_name
from lowtri.errors import CallError, UndecidedError
from lowtri.masks import Mask, documents, full, table
from lowtri.masks import mask as read_mask

Labels: TypeAlias = NDArray[Any]

_PARTS = 3  # atoms of a formula, at most
_NO_FORMULA = "no formula of three parts"


@dataclass(frozen=True)
class _Atom:
    text: str
    pairs: Bools  # (1 or B, N, N)
    mask: Mask


@dataclass(frozen=True)
class InferredMask:
    """The mask that a model was measured to have; `str()` is its text.

    Attributes:
        mask: the formula, or a table where no formula of three parts agrees.
        text: its text; of the layers where their attention was read, all have the same, and outputs depend on nothing that such
            layers do not reach; else from end to end. Where the rows of the batch have different masks, the text of each; where
            no formula agrees, "no formula of three parts".
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
    def line(self) -> str:
        """The text and the layers in one line."""
        nearest = [f"nearest: {self.nearest}, but for {len(self.differs)} pairs"] if self.differs else []
        return "; ".join([self.text, *self._by_layer, *nearest])

    @property
    def message(self) -> str:
        """The text, the layers, and the pairs that no formula explains."""
        lines, n = [self.text], self.seen.shape[-1]
        if self.differs and n <= 48:
            drawing = table(self.seen.any(axis=0)).draw(n)
            lines += ["", *("  " + line for line in drawing.splitlines()), ""]
        lines += self._by_layer
        if self.differs:
            pairs = ", ".join(f"({q}, {k})" for q, k in self.differs[:5])
            lines.append(f"nearest formula: {self.nearest}, which differs at {len(self.differs)} pairs: {pairs}")
        return "\n".join(lines)

    @property
    def _by_layer(self) -> list[str]:
        kinds = set(self.layers)
        if len(kinds) > 1:
            return [_described(self.layers)]
        return [f"each layer: {kind}, but outputs depend on more" for kind in kinds if kind != self.text]


def fitted(seen: Bools, care: Bools, labels: Any = None) -> InferredMask:
    """The simplest formula that agrees with `seen`, (1 or B, N, N), at the pairs `care`; else a table.

    Args:
        labels: the document of each position, (1 or B, N); by default the stretches that no measured pair crosses.
    """
    seen, care = np.broadcast_arrays(seen, care)
    blocked = np.array([blocks(pairs) for pairs in seen & care]) if labels is None else labels
    atoms = list(_atoms(seen, care, blocked, labels is not None))
    found = _simplest(seen, care, atoms) or _within_documents(seen, care, blocked)
    if found is not None and "<" not in found[0]:
        return InferredMask(found[1], found[0], (), seen, found[0])
    # An array has no formula, but each row may have one.
    text = _by_row(seen, care, blocked if found is not None else labels)
    if found is not None:
        return InferredMask(found[1], text or _NO_FORMULA, (), seen, text or _NO_FORMULA)
    formula = table(seen[0] if (seen == seen[:1]).all() else seen[:, None])
    if text:
        return InferredMask(formula, text, (), seen, text)
    wrong = [((atom.pairs != seen) & care) for atom in atoms]
    best = int(np.argmin([int(table.sum()) for table in wrong]))
    pairs = tuple((int(q), int(k)) for q, k in np.argwhere(wrong[best].any(axis=0)))
    return InferredMask(formula, _NO_FORMULA, (), seen, atoms[best].text, pairs)


def _by_row(seen: Bools, care: Bools, labels: Any) -> str:
    """The formula of each row of the batch, where each has one; else nothing."""
    rows = []
    for row in range(len(seen)) if len(seen) > 1 else ():
        fit = fitted(seen[[row]], care[[row]], None if labels is None else labels[[row]])
        if fit.differs or "<" in fit.text:
            return ""
        rows.append(f"row {row}: {fit.text}")
    return "; ".join(rows)


def _simplest(seen: Bools, care: Bools, atoms: Sequence[_Atom]) -> tuple[str, Mask] | None:
    """The text and the formula of the fewest atoms, simplest first."""
    for parts in range(1, _PARTS + 1):
        for text, formula in _solutions(seen, care, atoms, parts):
            return f"causal & {text}" if text.startswith("window(") and parts == 1 else text, formula
    return None


def _within_documents(seen: Bools, care: Bools, labels: Labels) -> tuple[str, Mask] | None:
    """A formula whose positions count from the start of each document: the documents are searched as the rows of a batch."""
    begins = np.ones(labels.shape, bool)
    begins[:, 1:] = labels[:, 1:] != labels[:, :-1]
    come_again = any(len(set(row.tolist())) < count for row, count in zip(labels, begins.sum(1).tolist(), strict=True))
    if not begins[:, 1:].any() or come_again or (seen & care & (labels[:, :, None] != labels[:, None, :])).any():
        return None
    rows, starts = np.nonzero(begins)
    stops = np.append(starts[1:], 0)
    stops = np.where(stops > starts, stops, labels.shape[1])
    n = int((stops - starts).max())
    own_seen, own_care = np.zeros((2, len(rows), n, n), bool)
    for document, (row, start, stop) in enumerate(zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True)):
        inside = slice(start, stop)
        own_seen[document, : stop - start, : stop - start] = seen[row, inside, inside]
        own_care[document, : stop - start, : stop - start] = care[row, inside, inside]
    found = _simplest(own_seen, own_care, list(_atoms(own_seen, own_care, np.zeros((len(rows), n), int), True)))
    if found is None:
        return None
    same = (labels == labels[:1]).all()
    lengths = (stops - starts)[rows == 0].tolist()
    formula = documents(lengths=lengths, inner=found[0]) if same else documents(labels, inner=found[0])
    return repr(formula), formula


def _solutions(seen: Bools, care: Bools, atoms: Sequence[_Atom], parts: int) -> Iterator[tuple[str, Mask]]:
    """Formulas of that many atoms which agree with `seen` at the pairs `care`."""
    if parts == 1:
        yield from ((atom.text, atom.mask) for atom in atoms if not ((atom.pairs != seen) & care).any())
        return
    for atom in atoms:
        inside = np.broadcast_to(atom.pairs, care.shape)
        within, without = care & inside, care & ~inside
        # All that is seen lies in the atom; all of the atom is seen; nothing of it is.
        for sign, fits, rest in (
            ("&", not (seen & without).any(), within),
            ("|", not (~seen & within).any(), without),
            ("-", not (seen & within).any(), without),
        ):
            if not fits or (rest == care).all() or not rest.any():
                continue
            for text, formula in _solutions(seen, rest, atoms, parts - 1):
                compound = any(f" {other} " in text for other in "&|-" if other != sign or sign == "-")
                if sign == "-":
                    yield f"{f'({text})' if ' | ' in text else text} - {atom.text}", formula - atom.mask
                else:
                    joined = atom.mask & formula if sign == "&" else atom.mask | formula
                    yield f"{atom.text} {sign} {f'({text})' if compound else text}", joined


def _atoms(seen: Bools, care: Bools, labels: Labels, given: bool) -> Iterator[_Atom]:
    """What formulas are made of, simplest first, with the numbers at which the measured pairs have an edge."""
    n = seen.shape[-1]
    edges = np.argwhere((seen[..., 1:] != seen[..., :-1]) & care[..., 1:])[:, 1:]  # (query, the key before the edge)
    back = sorted({int(q - k) for q, k in edges if q - k >= 0} - {0})
    ahead = sorted({int(k - q) for q, k in edges if k > q})
    starts = sorted({int(k) + 1 for _, k in edges})
    texts = ["full", "causal", *(f"window({w})" for w in {1, *back})]
    texts += [f"first({k})" for k in starts]
    yield from (_atom(text, n) for text in texts)
    if given:
        yield from _documents(labels)
    yield from (_atom(f"chunks({c})", n) for c in range(2, n))
    yield from (_atom(f"strided({s})", n) for s in range(2, n))
    yield from (_atom(f"band({b}, {a})", n) for a in {*ahead, 0, n} for b in {*(b - 1 for b in back), *back, 0, n} if a)
    if not given:
        yield from _documents(labels)


def _atom(text: str, n: int, formula: Mask | None = None) -> _Atom:
    formula = read_mask(text) if formula is None else formula
    return _Atom(text, np.array(formula.dense(n), bool).reshape(-1, n, n), formula)


def _documents(labels: Labels) -> list[_Atom]:
    formula = documents(labels)
    if (labels == labels[:1]).all():
        row = labels[0].tolist()
        lengths = [len(list(group)) for _, group in groupby(row)]
        if len(lengths) < 2:
            return []
        formula = documents(lengths=lengths) if len(set(row)) == len(lengths) else documents(labels[0])
    return [_atom(repr(formula), labels.shape[1], formula)]


def infer_mask(
    model: Any, example: Any, *, labels: Any = None, redraw: bool | float = False, seed: int = 0
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
        model, example, redraw, seed: as in `audit`; the model may be a :class:`lowtri.Model`.
        labels: the document of each position, (N,) or (B, N), where documents are packed; by default read off the pairs.

    Returns:
        InferredMask: its `text` is what `lowtri.mask`, `block_mask` and the kernels take. A window that is longer than the
        example is not seen: the answer is about the lengths that were tried.

    Raises:
        CallError: if an argument cannot be used, or the model does not repeat itself.
        UndecidedError: if no output depends on any input.
    """
    adapter = read_model("infer_mask", model, redraw, seed)
    inputs, signature = read_example(example, adapter)
    tested = ModelUnderTest(adapter.call, signature, adapter, seed=seed)
    if labels is not None:
        labels = np.asarray(labels)
        if labels.shape not in ((inputs.n,), (inputs.batch, inputs.n)):
            shapes = f"({inputs.n},) or ({inputs.batch}, {inputs.n})"
            raise CallError(
                f"infer_mask: labels= has the shape {labels.shape}, expected {shapes}.\nFix: the document of each position."
            )
        labels = np.broadcast_to(labels, (inputs.batch, inputs.n))
    with tested.prepared(inputs):
        context = read_context(tested, inputs, DeclaredMask(full()))
        if context.noise.broken:
            raise CallError(
                f"infer_mask: {context.noise.broken}.\nFix: make the model repeat itself: eval mode, seeds."
            )
        inferred = described_mask(context, _measured(context), labels)
    if inferred is None:
        raise UndecidedError(
            f"infer_mask: no output depends on any of the {inputs.n} inputs, so every mask agrees.\n"
            "Fix: Model(output=) selects the tensor that depends on them; redraw=True measures a copy with larger weights."
        )
    return inferred


def described_mask(context: Context, seen: Bools, labels: Any = None) -> InferredMask | None:
    """The mask for the pairs (B, N, N) that were measured, and those of the layers; None where no output depends on any input."""
    real = context.real
    layers = _layers(context) if context.tested.module is not None else []
    care = real[:, :, None] & real[:, None, :]
    if context.separator is not None:  # it was not changed, so what it moves is not known
        care = care & (context.inputs.sequences[0] != context.separator)[:, None, :]
    texts = tuple(fitted(pairs, care, labels).text for pairs in layers)
    of_layers = len(set(texts)) == 1 and not (seen & care & ~_reach(layers)).any()
    if not (seen & care).any() and not of_layers:
        return None
    fit = fitted(layers[0] if of_layers else seen, care, labels)
    if fit.text == _NO_FORMULA and context.separator is None:
        fit = _between_separators(context, seen, care) or fit
    return replace(fit, layers=texts, seen=seen)


def _between_separators(context: Context, seen: Bools, care: Bools) -> InferredMask | None:
    """The formula of documents that end (or begin) at one of the example's tokens; None where there are none.

    To change such a token joins two documents, which says nothing about who sees it: what it moves is left out.
    """
    if not context.inputs.discrete:
        return None
    ids = context.inputs.sequences[0]
    for token in np.unique(ids):
        without = care & (ids != token)[:, None, :]
        for begins in (np.roll(ids == token, 1, axis=1), ids == token):
            begins[:, 0] = False
            if not begins.any():
                continue
            labels = np.cumsum(begins, axis=1)
            fit = fitted(seen, without, labels)
            mask = DeclaredMask(fit.mask)
            if fit.text == _NO_FORMULA or not mask.names_documents:
                continue
            declared = mask.pairs(context.n, context.inputs.batch)
            if find_separator(replace(context, mask=mask, declared=declared)) == token:
                return fit
    return None


def _reach(layers: Sequence[Bools]) -> Bools:
    """Which inputs can reach each output through these layers, one after another, and past them, (1 or B, N, N)."""
    reach = own = np.eye(layers[0].shape[-1], dtype=bool)[None]
    for pairs in layers:
        reach = (pairs | own) @ reach
    return reach


def _measured(context: Context) -> Bools:
    """Which inputs move each output, (B, N, N): in float64 where there is a copy, so that rounding moves nothing."""
    copy64 = context.float64
    context = context if isinstance(copy64, str) else copy64
    seen = np.zeros((context.inputs.batch, context.n, context.n), bool)
    for salt, kind in enumerate(("random", "random", "extreme")):
        fresh = context.fresh(salt, kind)
        for key in range(context.n):
            rows = context.tested(context.inputs.change(np.arange(context.n) == key, fresh))
            moved = np.nan_to_num(movement(context.base, rows), nan=np.inf)
            seen[:, :, key] |= moved > context.noise.dependence
    return seen


def _layers(context: Context) -> list[Bools]:
    """The pairs (1 or B, N, N) of each layer's attention, in the order of the calls; none where no attention was read."""
    from lowtri.auditing.torch_hooks import attention_tables

    model, inputs = context.tested.module, context.inputs
    for attention in ("", "sdpa", "eager") if hasattr(model, "set_attn_implementation") else ("",):
        condition = replace(context.condition, attention=attention if attention != attention_name(model) else "")
        read = inputs.having({"output_attentions": True} if attention == "eager" else {})
        try:
            with context.under(condition).applied():
                tables = attention_tables(partial(context.tested.answer, read))
        except Exception:
            continue
        tables = [pairs for pairs in tables if pairs.shape[-2:] == (context.n, context.n)]
        if tables:
            return tables
    return []


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
