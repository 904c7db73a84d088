"""`Model`: what an audit cannot find out about a model by itself, said once for `audit`, `assert_causal`, `infer_mask` and pytest."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lowtri.errors import CallError
from lowtri.masks.tile import short_repr

_MOST_IDS = 2**24  # they are drawn from a list of all of them: 128 MB

__all__ = ["Axes", "Model", "as_model"]


class Axes(NamedTuple):
    """Where the batch and the positions are, in an input and in an answer; None where that is to be found out."""

    input: str | None = None
    output: str | None = None


@dataclass(frozen=True)
class Model:
    """A model and what cannot be found out by itself: how it decodes, which tensor is its answer, where its positions are.

    A torch module, a model of transformers and a function of arrays need none of this: pass them to :func:`lowtri.audit` as
    they are.

    >>> import numpy as np
    >>> from lowtri import Model, audit
    >>> model = Model(lambda x: {"hidden": x, "sums": np.cumsum(x, axis=0)}, output=lambda answer: answer["sums"])
    >>> audit(model, np.ones((6, 4))).verdict
    'no leak found'

    Args:
        call: the model: a torch module, or any function from an array of ids or vectors to an array with one row for each position.
        step: a function that decodes, ``step(state, x) -> (output, state)``; the first state is None. x is one position, ids
            (B,) or (B, 1) or vectors (B, D) or (B, 1, D), or several, (B, n) or (B, n, D): what it takes is found out.
        prefill: how decoding starts, if not by ``step``: ``prefill(x) -> (output, state)`` of a prompt, (B, n) or (B, n, D).
        output: a function that selects the tensor with one row for each position from what ``call`` returns; by default the
            returned tensor itself, its ``.logits``, or its first element.
        inputs: which entries of a tuple or dict example are the sequence, a key or a list of keys; "decoder_input_ids" audits
            the decoder of an encoder-decoder. Arrays with one entry for each row of the batch stay with their rows.
        axes: what each axis of the sequence is, if that cannot be told from the shapes: ``B`` the batch, ``N`` the positions,
            any other letter a feature. "BDN" has the channels before the time, "NBD" the batch second, "HND" no batch. After an
            arrow the same of the answer: "BDN->BNV".
        alone: a function that runs one document of a packed row alone.
        pads: the keyword that marks real positions (1 = real; a name that ends with ``key_padding_mask``: 1 = pad).
        vocab_size: how many ids to draw from; by default from the model's embedding or config, else the ids in the example.

    Raises:
        CallError: if an argument is not of its kind.
    """

    call: Any
    step: Callable[[Any, Any], Any] | None = None
    prefill: Callable[[Any], Any] | None = None
    output: Callable[[Any], Any] | None = None
    inputs: str | int | Sequence[str | int] | None = None
    axes: str | None = None
    alone: Callable[..., Any] | None = None
    pads: str | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("step", "prefill", "output", "alone"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise CallError(
                    f"Model: {name}={short_repr(value)}, expected something to call.\nFix: a function, or drop {name}=."
                )
        if self.prefill is not None and self.step is None:
            raise CallError(
                "Model: prefill= was given without step=.\nFix: say how decoding continues, step(state, x)."
            )
        if self.pads is not None and not (isinstance(self.pads, str) and self.pads):
            raise CallError(
                f"Model: pads={short_repr(self.pads)}, expected a name.\nFix: the keyword that marks real positions."
            )
        if self.vocab_size is not None and not is_whole(self.vocab_size, 2, _MOST_IDS):
            raise CallError(
                f"Model: vocab_size={short_repr(self.vocab_size)}, expected a whole number from 2 to 2**24.\n"
                "Fix: how many ids the model knows."
            )
        if self.inputs is not None:
            names = list(self.inputs) if isinstance(self.inputs, (list, tuple)) else [self.inputs]
            if not names or not all(isinstance(name, (str, int)) for name in names):
                raise CallError(
                    f"Model: inputs={short_repr(self.inputs)}, expected a key of the example or a list of keys.\n"
                    'Fix: inputs="input_ids", say.'
                )
        self.layout  # noqa: B018 (read for its errors)

    @property
    def layout(self) -> Axes:
        """The letters of the axes, of the sequence and of the answer."""
        if self.axes is None:
            return Axes()
        parts = self.axes.replace(" ", "").split("->") if isinstance(self.axes, str) else []
        for letters in parts:
            if not letters.isalpha() or len(set(letters)) < len(letters) or "N" not in letters:
                parts = []
        if not 1 <= len(parts) <= 2:
            raise CallError(
                f"Model: axes={short_repr(self.axes)}, expected a letter for each axis, N the positions and B the batch.\n"
                'Fix: axes="BDN" for channels before time; "BDN->BNV" says the answer\'s axes, too.'
            )
        return Axes(parts[0], parts[1] if len(parts) == 2 else None)

    @property
    def name(self) -> str:
        """The name of the function, or of the module's class."""
        return getattr(self.call, "__name__", None) or type(self.call).__name__


def is_whole(value: Any, least: float, most: float = math.inf) -> bool:
    """Whether a value is one whole number between these.

    >>> is_whole(3, 1), is_whole(True, 1), is_whole([3], 1)
    (True, False, False)
    """
    try:
        return not isinstance(value, bool) and least <= operator.index(value) <= most
    except TypeError:  # no whole number, or an array of several
        return False


def as_model(model: Any) -> Model:
    """The model itself as a `Model`, which it may already be."""
    return model if isinstance(model, Model) else Model(model)
