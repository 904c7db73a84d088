"""Linear layers whose weights are stored for generating, which reads every weight once per token.

    float32   as loaded; and, where that is faster, each weight as the sum of two float16 numbers, exact to 2**-22, by FBGEMM (x86)
    bf16      weights and inputs rounded to bf16; torch's own product, or that of float32 where it is faster
    float16   weights rounded to float16, inputs and sums in float32
    int8      weights rounded to 8 bits with a scale per output; on x86 inputs as two 7-bit numbers with a scale per token

float16 and int8 are multiplied by FBGEMM on x86. Elsewhere inputs stay float32: 8-bit weights are multiplied by torch's own product
or widened in blocks, whichever is faster, and those of float16 are widened.

A scale per token keeps tokens independent: no output depends on later tokens, on padding, or on other rows of the batch.
Source: Zafrir et al. 2019 (8-bit weights and activations); Khudia et al. 2021 (FBGEMM).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowtri.compat.torch_private import forward_level, has_hooks
from lowtri.errors import CallError
from lowtri.nn.few_tokens import FewTokensNorm
from lowtri.nn.products import MEASURED, WEIGHTS, Choices, Product, rows_index

__all__ = ["QuantizedLinear", "quantize"]


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is rounded or packed; it computes no gradients, and its weight cannot be saved.

    Args:
        linear: the layer to copy.
        weights: ``"float32"``, ``"bf16"``, ``"float16"`` or ``"int8"``.
        choices: which product runs for how many rows; by default as measured in this process.

    Attributes:
        products: the name of the product for 1, up to 4, up to 16, and more rows.
    """

    bias: Tensor | None
    products: tuple[str, ...]
    _products: tuple[Product, ...]

    def __init__(self, linear: nn.Linear, weights: str, choices: Choices = MEASURED) -> None:
        super().__init__()
        self.in_features, self.out_features, self.weights = linear.in_features, linear.out_features, weights
        weight = linear.weight.detach()  # (out, in)
        _check(weight, weights)
        form = WEIGHTS[weights]
        stored = form.store(weight)
        ways = choices.ways(weights, weight)
        self.products = tuple(way.name for way in ways)
        made = {way: way.make(stored) for way in set(ways)}
        self._products = tuple(made[way] for way in ways)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().float(), persistent=False)
        self.register_state_dict_pre_hook(_no_state)
        self.register_load_state_dict_pre_hook(_no_state)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out), in the dtype of x."""
        if x.requires_grad and torch.is_grad_enabled():
            raise CallError(
                f"QuantizedLinear: x requires gradients, but {self.weights} weights compute none.\n"
                "Fix: train the original model, and quantize it afterwards; or torch.no_grad()."
            )
        if forward_level() >= 0:
            raise CallError(
                "QuantizedLinear: no derivatives are computed in forward mode either. Fix: the original model."
            )
        if not x.is_cpu:
            raise CallError(f"QuantizedLinear: x is on {x.device}, but quantized weights run on the CPU. Fix: x.cpu()")
        if not x.ndim or x.shape[-1] != self.in_features or not x.is_floating_point():
            raise CallError(
                f"QuantizedLinear: x is {tuple(x.shape)} {x.dtype}; expected (..., {self.in_features}) of floats."
            )
        if x.ndim == 1:  # FBGEMM multiplies matrices only
            return self.forward(x[None])[0]
        float32 = x.dtype is torch.float32
        y = self._products[rows_index(x)](x if float32 else x.float())
        if self.bias is not None:
            y = y + self.bias
        return y if float32 else y.to(x.dtype)

    def extra_repr(self) -> str:
        products = "/".join(self.products)
        return f"in_features={self.in_features}, out_features={self.out_features}, weights={self.weights}, {products}"


def quantize(model: nn.Module, weights: str, choices: Choices = MEASURED) -> None:
    """Replace every linear layer inside of a model, in place; a model that cannot be quantized is not changed.

    Where there are several ways to compute a product, ``choices`` are those that were measured in this process, or are now.
    """
    if weights not in WEIGHTS:
        raise CallError(f"quantize: weights is {weights!r:.60}; expected one of {', '.join(WEIGHTS)}.")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            if type(module).forward is not nn.Linear.forward or has_hooks(module):
                raise CallError(
                    f"quantize: {name} is a {type(module).__name__} with a forward or hooks of its own, which would be lost.\n"
                    "Fix: quantize plain nn.Linear layers: merge adapters before, and register hooks afterwards."
                )
            _check(module.weight.detach(), weights)
    for module in list(model.modules()):
        join: Callable[[], None] | None = getattr(module, "join_projections", None)
        if join is not None:
            join()
    choices.learn(weights, [module.weight.detach() for module in model.modules() if isinstance(module, nn.Linear)])
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, QuantizedLinear(child, weights, choices))
            elif type(child) is nn.RMSNorm and not has_hooks(child):
                setattr(module, name, FewTokensNorm(child))
    model.requires_grad_(False).eval()


def _check(weight: Tensor, weights: str) -> None:
    """Raise unless a weight can be stored so."""
    if not weight.is_cpu:
        raise CallError(f"quantize: a weight is on {weight.device}. Fix: a model with its weights on the CPU.")
    if not bool(weight.isfinite().all()):
        raise CallError("quantize: a weight holds NaN or infinity. Fix: the weights of an intact checkpoint.")
    if weights == "float16" and (largest := weight.abs().max().item()) > torch.finfo(torch.float16).max:
        raise CallError(f"quantize: a weight is {largest:.3g}, beyond float16's range. Fix: weights='bf16'")


def _no_state(*_: Any) -> None:
    raise CallError(
        "state_dict: quantized weights cannot be saved or loaded.\n"
        "Fix: save the original model, and quantize it after loading; it takes seconds."
    )
