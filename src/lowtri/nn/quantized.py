"""Linear layers whose weights are stored for generating, which reads every weight once per token.

    float32   each weight as the sum of two float16 numbers, exact to 2**-22, by FBGEMM (x86); and as it was, for prompts
    bf16      weights and inputs rounded to bf16, torch's own matrix product
    float16   weights rounded to float16, inputs and sums in float32, by FBGEMM (x86)
    int8      weights rounded to 8 bits with a scale per output, inputs as two 7-bit numbers with a scale per token, by FBGEMM (x86)

A scale per token keeps tokens independent: no output depends on later tokens, on padding, or on other rows of the batch.
Source: Zafrir et al. 2019 (8-bit weights and activations); Khudia et al. 2021 (FBGEMM).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lowtri.compat import torch_quantized
from lowtri.compat.torch_private import forward_level, has_hooks
from lowtri.errors import CallError
from lowtri.nn.few_tokens import FewTokensNorm, passes

__all__ = ["WEIGHTS", "QuantizedLinear", "quantize"]

Product: TypeAlias = Callable[[Tensor], Tensor]  # (..., in) to (..., out), both float32

# AVX2 multiplies unsigned by signed bytes and adds two products in 16 bits: 8-bit weights leave 7 bits for an input. In
# language models a few inputs are so large that 7 bits lose the others, so each input is the sum of two such numbers.
_FEW_ROWS = 4
_LEVELS = 63  # of a 7-bit number, on either side of zero
_STEPS = 128  # between two of them; the second number reaches from -64 to 64, and 2 * 128 * 127 is a number of 16 bits
_LEAST = 1e-30  # the unit of a row of zeros


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is rounded or packed; it computes no gradients, and its weight cannot be saved.

    Args:
        linear: the layer to copy.
        weights: ``"float32"``, ``"bf16"``, ``"float16"`` or ``"int8"``.
    """

    bias: Tensor | None
    _product: Product

    def __init__(self, linear: nn.Linear, weights: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self.weights = linear.in_features, linear.out_features, weights
        weight = linear.weight.detach()  # (out, in)
        _check(weight, weights)
        self._product = WEIGHTS[weights](weight)
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
        float32 = x.dtype is torch.float32
        y = self._product(x if float32 else x.float())
        if self.bias is not None:
            y = y + self.bias
        return y if float32 else y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, weights={self.weights}"


def quantize(model: nn.Module, weights: str) -> None:
    """Replace every linear layer inside of a model, in place; a model that cannot be quantized is not changed."""
    if weights not in WEIGHTS:
        raise CallError(f"quantize: weights is {weights!r:.60}; expected one of {', '.join(WEIGHTS)}.")
    if weights != "bf16":
        torch_quantized.require()
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
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, QuantizedLinear(child, weights))
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


def _float32(weight: Tensor) -> Product:
    weight = weight.to(torch.float32, copy=True)  # a tied embedding may be changed in place
    exponent = math.frexp(weight.abs().max().item())[1]
    unit = 2.0 ** max(exponent - 15, -126)  # the greatest weight is then near float16's greatest number
    scaled = weight / unit  # exact
    high = scaled.half().float()
    packed = torch_quantized.pack_float16(torch.cat([high, (scaled - high) * 2**11]))

    def product(x: Tensor) -> Tensor:
        if x.shape[:-1].numel() > _FEW_ROWS:  # a product of matrices, which is faster with the weight as it was
            return nn.functional.linear(x, weight)
        high, low = torch_quantized.linear_float16(x, packed).chunk(2, -1)
        return torch.add(high, low, alpha=2**-11).mul_(unit)

    return product


def _bf16(weight: Tensor) -> Product:
    rounded = weight.bfloat16()

    def product(x: Tensor) -> Tensor:
        x = x.bfloat16()
        if x.shape[:-1].numel() > _FEW_ROWS:  # many CPUs have no fast bf16 product of matrices
            return nn.functional.linear(x.float(), rounded.float()).bfloat16().float()
        return nn.functional.linear(x, rounded).float()

    return product


def _float16(weight: Tensor) -> Product:
    packed = torch_quantized.pack_float16(weight)
    return lambda x: torch_quantized.linear_float16(x, packed)


def _int8(weight: Tensor) -> Product:
    scales = weight.float().abs().amax(1).clamp_min(1e-30) / 127  # (out,)
    packed = torch_quantized.pack_int8(weight, scales)

    def product(x: Tensor) -> Tensor:
        few = passes(x)
        if few is not None:
            parts, unit, rows = x.new_empty(2, *x.shape), x.new_empty(*x.shape[:-1], 1), x.shape[:-1].numel()
            x_at, unit_at = x.data_ptr(), unit.data_ptr()
            few.split(x_at, x_at, parts.data_ptr(), unit_at, unit_at, rows, x.shape[-1], _LEVELS, _STEPS, _LEAST)
            parts = torch_quantized.linear_int8(parts, packed, 1.0, _LEVELS + 1)  # (2, ..., out)
            few.join(parts.data_ptr(), unit_at, rows, parts.shape[-1], 1 / _STEPS)
            return parts[0]
        unit = (x.abs().amax(-1, keepdim=True) / _LEVELS).clamp_min(_LEAST)  # (..., 1)
        x = x / unit  # from -_LEVELS to _LEVELS
        rounded = x.round()
        parts = torch.stack([rounded, (x - rounded).mul_(_STEPS)])
        high, low = torch_quantized.linear_int8(parts, packed, 1.0, _LEVELS + 1)
        return torch.add(high, low, alpha=1 / _STEPS).mul_(unit)

    return product


def _no_state(*_: Any) -> None:
    raise CallError(
        "state_dict: quantized weights cannot be saved or loaded.\n"
        "Fix: save the original model, and quantize it after loading; it takes seconds."
    )


WEIGHTS: dict[str, Callable[[Tensor], Product]] = {
    "float32": _float32,
    "bf16": _bf16,
    "float16": _float16,
    "int8": _int8,
}
