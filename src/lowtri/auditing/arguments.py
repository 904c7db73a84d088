"""What the arguments of `audit` and `infer_mask` must be, and the copy with redrawn weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

from lowtri.auditing.adapter import Model, is_whole
from lowtri.auditing.model_under_test import module_behind, parameters
from lowtri.errors import CallError
from lowtri.extras import require


def check_arguments(function: str, adapter: Model, arguments: Mapping[str, Any]) -> None:
    """Raise CallError, with its name, for an argument of `audit` or `infer_mask` that cannot be used."""
    model = adapter.call
    if isinstance(model, type):
        raise CallError(
            f"{function}: model is the class {model.__name__}.\nFix: make one of it, {model.__name__}(...)."
        )
    if not callable(model):
        kind = f"the text {model!r}" if isinstance(model, str) else f"a {type(model).__name__}"
        raise CallError(
            f"{function}: model is {kind}, expected a module or a function.\nFix: load or build the model first."
        )
    module = module_behind(model)
    tensors = [] if module is None else [*module.named_parameters(), *module.named_buffers()]
    empty = next((name for name, value in tensors if value.is_meta), None)
    if empty is not None:
        raise CallError(
            f"{function}: {empty} of the model is on the device meta, which stores no values.\n"
            "Fix: load its weights, or make it with .to_empty(device='cpu') and initialise it."
        )
    for name, fits, expected in _EXPECTED:
        value = arguments.get(name)
        if name in arguments and not fits(value) and (value is not None or not expected.endswith("None")):
            raise CallError(f"{function}: {name}={value!r}, expected {expected}.")
    if arguments.get("redraw"):
        require(f"{function}: redraw=", "torch")
    takes, mark = parameters(model), adapter.pads
    if mark is not None and takes and mark not in takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        raise CallError(
            f"{function}: pads={mark!r}, but the model takes ({', '.join(takes)}).\n"
            "Fix: name the one that marks real positions."
        )


def _whole(least: float) -> Callable[[Any], bool]:
    return lambda value: is_whole(value, least)


# Arguments, what their values must be, and how an error says so; those that end with None may be None.
_EXPECTED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("seed", _whole(0), "a whole number of at least 0"),
    ("layers", _whole(1), "a whole number of at least 1, or None"),
    ("length", _whole(0), "a whole number, 0 for no longer example, or None"),
    (
        "redraw",
        lambda value: isinstance(value, (bool, int, float)) and 0 <= value < math.inf,
        "True, False or a standard deviation above 0",
    ),
)


def redrawn(model: Any, redraw: bool | float, seed: int) -> Any:
    """A copy whose matrices are drawn anew; vectors (norms, biases) stay. The model itself where `redraw` is false."""
    if not redraw:
        return model
    import torch

    if not isinstance(model, torch.nn.Module):
        raise CallError(f"audit: redraw= needs a torch module, got {type(model).__name__}.\nFix: drop redraw=.")
    redrawn_copy = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in redrawn_copy.parameters():
            if parameter.dim() >= 2 and parameter.is_floating_point():
                fresh = torch.randn(parameter.shape, generator=generator) * (0.15 if redraw is True else float(redraw))
                parameter.copy_(fresh.to(parameter))
    return redrawn_copy
