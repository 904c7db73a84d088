"""`Model`: what an audit cannot find out about a model by itself, said once for `audit`, `assert_causal`, `infer_mask` and pytest.

Beside it: what a callable is made of, and what the arguments of `Model`, `audit` and `infer_mask` must be.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lowtri.errors import CallError
from lowtri.extras import require
from lowtri.masks.tile import short_repr

_MOST_IDS = 2**24  # they are drawn from a list of all of them: 128 MB


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
        alone: a function that runs one document of a packed row alone: it gets the document's part of the sequence, as ``call``
            gets the whole (by its name, where the example is a dict), and nothing else of the example.
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
        _require_values("Model", {name: value for name, value in vars(self).items() if value is not None}, _OF_MODEL)
        if self.prefill is not None and self.step is None:
            raise CallError(
                "Model: prefill= was given without step=.\nFix: say how decoding continues, step(state, x)."
            )

    @property
    def layout(self) -> Axes:
        """The letters of the axes, of the sequence and of the answer."""
        return _layout(self.axes) or Axes()

    @property
    def name(self) -> str:
        """The name of the function, or of the module's class."""
        return getattr(self.call, "__name__", None) or type(self.call).__name__


def as_model(model: Any) -> Model:
    """The model itself as a `Model`, which it may already be."""
    return model if isinstance(model, Model) else Model(model)


def read_model(function: str, model: Any, redraw: bool | float = False, seed: int = 0, **arguments: Any) -> Model:
    """The model as a `Model`, with redrawn weights where `redraw` says so.

    Raises:
        CallError: if it, or one of the arguments of `audit` or `infer_mask`, cannot be used.
    """
    adapter = as_model(model)
    call = adapter.call
    if isinstance(call, type):
        raise CallError(f"{function}: model is the class {call.__name__}.\nFix: make one of it, {call.__name__}(...).")
    if not callable(call):
        kind = f"the text {call!r}" if isinstance(call, str) else f"a {type(call).__name__}"
        raise CallError(
            f"{function}: model is {kind}, expected a module or a function.\nFix: load or build the model first."
        )
    module = module_behind(call)
    tensors = [] if module is None else [*module.named_parameters(), *module.named_buffers()]
    empty = next((name for name, value in tensors if value.is_meta), None)
    if empty is not None:
        raise CallError(
            f"{function}: {empty} of the model is on the device meta, which stores no values.\n"
            "Fix: load its weights, or make it with .to_empty(device='cpu') and initialise it."
        )
    _require_values(function, {"redraw": redraw, "seed": seed, **arguments}, _OF_AUDIT)
    takes, mark = parameters(call), adapter.pads
    if mark is not None and takes and mark not in takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        raise CallError(
            f"{function}: pads={mark!r}, but the model takes ({', '.join(takes)}).\n"
            "Fix: name the one that marks real positions."
        )
    return replace(adapter, call=_redrawn(function, call, redraw, seed)) if redraw else adapter


def _redrawn(function: str, model: Any, redraw: bool | float, seed: int) -> Any:
    """A copy whose matrices are drawn anew; vectors (norms, biases) stay."""
    require(f"{function}: redraw=", "torch")
    import torch

    if not isinstance(model, torch.nn.Module):
        raise CallError(f"{function}: redraw= needs a torch module, got {type(model).__name__}.\nFix: drop redraw=.")
    redrawn = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in redrawn.parameters():
            if parameter.dim() >= 2 and parameter.is_floating_point():
                fresh = torch.randn(parameter.shape, generator=generator) * (0.15 if redraw is True else float(redraw))
                parameter.copy_(fresh.to(parameter))
    return redrawn


def parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    """What a callable takes, by name; empty where Python cannot say, as for a builtin."""
    try:
        return inspect.signature(getattr(model, "forward", model)).parameters
    except (TypeError, ValueError):
        return {}


def owners(function: Any) -> list[Any]:
    """A function and the objects that it works on: what it is a part or a method of, and what it closes over."""
    if isinstance(function, functools.partial):
        return owners(function.func)
    found = [function, getattr(function, "__self__", None)]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            found.append(cell.cell_contents)
    return [owner for owner in found if owner is not None]


def module_behind(model: Any) -> Any:
    """The torch module that a model is, is a method of, or closes over; None for anything else."""
    return next((owner for owner in owners(model) if hasattr(owner, "named_modules")), None)


def _layout(axes: Any) -> Axes | None:
    """What the axes of a `Model` say; None where they say nothing."""
    parts = axes.replace(" ", "").split("->") if isinstance(axes, str) else []
    for letters in parts:
        if not letters.isalpha() or len(set(letters)) < len(letters) or "N" not in letters:
            return None
    return Axes(*parts) if 1 <= len(parts) <= 2 else None


def is_whole(value: Any, least: float, most: float = math.inf) -> bool:
    """Whether a value is one whole number between these.

    >>> is_whole(3, 1), is_whole(True, 1), is_whole([3], 1)
    (True, False, False)
    """
    try:
        return not isinstance(value, bool) and least <= operator.index(value) <= most
    except TypeError:  # no whole number, or an array of several
        return False


def _are_keys(inputs: Any) -> bool:
    names = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    return bool(names) and all(isinstance(name, (str, int)) for name in names)


class _Argument(NamedTuple):
    """What an argument must be, and how an error says so."""

    fits: Callable[[Any], bool]
    expected: str


_OF_MODEL = {  # where they are not None
    **dict.fromkeys(
        ("step", "prefill", "output", "alone"),
        _Argument(callable, "something to call.\nFix: a function, or drop {name}=."),
    ),
    "pads": _Argument(
        lambda value: isinstance(value, str) and value != "",
        "a name.\nFix: the keyword that marks real positions.",
    ),
    "vocab_size": _Argument(
        lambda value: is_whole(value, 2, _MOST_IDS),
        "a whole number from 2 to 2**24.\nFix: how many ids the model knows.",
    ),
    "inputs": _Argument(_are_keys, 'a key of the example or a list of keys.\nFix: inputs="input_ids", say.'),
    "axes": _Argument(
        lambda value: _layout(value) is not None,
        "a letter for each axis, N the positions and B the batch.\n"
        'Fix: axes="BDN" for channels before time; "BDN->BNV" says the answer\'s axes, too.',
    ),
}
_OF_AUDIT = {
    "seed": _Argument(lambda value: is_whole(value, 0), "a whole number of at least 0."),
    "layers": _Argument(lambda value: value is None or is_whole(value, 1), "a whole number of at least 1, or None."),
    "length": _Argument(
        lambda value: value is None or is_whole(value, 0), "a whole number, 0 for no longer example, or None."
    ),
    "redraw": _Argument(
        lambda value: isinstance(value, (bool, int, float)) and 0 <= value < math.inf,
        "True, False or a standard deviation above 0.",
    ),
}


def _require_values(owner: str, values: Mapping[str, Any], arguments: Mapping[str, _Argument]) -> None:
    for name, argument in arguments.items():
        if name in values and not argument.fits(values[name]):
            got = f"{name}={short_repr(values[name])}"
            raise CallError(f"{owner}: {got}, expected {argument.expected.format(name=name)}")
