"""The user's functions of FlexAttention: checks that they can be called, and errors that name them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lowtri.errors import CallError
from lowtri.masks.mask import Mask

__all__ = ["check_function", "tensor_function"]

_ARGUMENTS = {"mask_mod": ("b", "h", "q", "k"), "score_mod": ("score", "b", "h", "q", "k")}


def check_function(name: str, argument: str, function: Any) -> None:
    """Raise unless a mask_mod or score_mod can be called with its arguments."""
    arguments = _ARGUMENTS[argument]
    wanted = f"{argument}({', '.join(arguments)})"
    if not callable(function) or isinstance(function, Tensor | Mask | BlockMask):
        fix = f"a function {wanted}"
        if isinstance(function, BlockMask):
            fix = "block_mask="
        elif isinstance(function, Mask | str) and argument == "mask_mod":
            fix = "lowtri.integrations.flex.block_mask for a mask of lowtri"
        raise CallError(f"{name}: {argument} is {type(function).__name__}. Fix: {fix}.")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        given = inspect.signature(function)
        fix = "create_block_mask for a mask_mod" if argument == "score_mod" and len(given.parameters) == 4 else wanted
        raise CallError(
            f"{name}: {argument} takes {given}, but it is called with ({', '.join(arguments)}). Fix: {fix}."
        ) from None
    except ValueError:  # a built-in function without a signature
        pass


def tensor_function(argument: str, function: Callable[..., Any]) -> Callable[..., Tensor]:
    """The function, with errors for results that are no tensors, and for branches on values."""

    def checked(*values: Any) -> Tensor:
        try:
            result = function(*values)
        except RuntimeError as error:
            if "data-dependent control flow" not in str(error) and ".item()" not in str(error):
                raise
            raise CallError(
                f"flex_attention: {argument} reads the value of an index, as in `if`, `and` or a list's index.\n"
                "Fix: torch.where, & and |, and tensors in place of lists; it is called with all indices at once."
            ) from error
        if not isinstance(result, Tensor):
            raise CallError(
                f"flex_attention: {argument} gives {type(result).__name__}. Fix: a tensor, made of its arguments."
            )
        if argument == "score_mod" and result.dtype == torch.bool:
            raise CallError(
                "flex_attention: score_mod gives torch.bool, but it must give scores. Fix: torch.where(condition, score, -inf)."
            )
        return result

    return checked
