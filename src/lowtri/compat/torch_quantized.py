"""torch's operators for linear layers with stored weights, which torch registers without documenting them: FBGEMM's (x86 CPUs), and
one for 8-bit weights that every CPU has.

``torch.ao.nn.quantized.dynamic.Linear``, the public module over them, scales the activations of a whole batch together, so that
one row changes the others; these operators take the scale as an argument. ``.default`` skips torch's search among the
overloads, which takes as long as a small product.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtri.errors import EngineError

_NAMES = (
    "linear_prepack",
    "linear_with_input_q_dq_qweight_dq_output_fp32",
    "linear_prepack_fp16",
    "linear_dynamic_fp16",
)


def why_missing() -> str | None:
    """Why FBGEMM's operators cannot run here; None if they can."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return "this build of torch has no FBGEMM, which supports x86 CPUs only"
    missing = [name for name in _NAMES if not hasattr(torch.ops.quantized, name)]
    missing = [f"ops.quantized.{name}" for name in missing] + ["quantize_per_channel"] * (
        not hasattr(torch, "quantize_per_channel")
    )
    return f"torch {torch.__version__} has no torch.{missing[0]}" if missing else None


def int8_product() -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """``torch._weight_int8pack_mm``: (x (rows, in), weight (out, in) int8, scales (out,)) to (rows, out), as in ``gpt-fast``.

    There is no public function of 8-bit weights and float32 inputs. None if this torch lacks it.
    """
    return getattr(torch, "_weight_int8pack_mm", None)


def pack_int8(weight: Tensor, scales: Tensor) -> Any:
    """A weight (out, in), rounded to int8 multiples of the scale of its row, in FBGEMM's layout."""
    zeros = torch.zeros(len(scales), dtype=torch.int64)

    def pack() -> Any:
        with warnings.catch_warnings():  # torch 2.13 announces that a later one removes these tensors; see why_missing
            warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")
            quantized = torch.quantize_per_channel(weight.float(), scales.double(), zeros, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(quantized, None)

    return _packed(pack)


def linear_int8(x: Tensor, packed: Any, scale: float, zero: int) -> Tensor:
    """x (..., in) float32, rounded to uint8 with this scale and zero point, times a packed weight: (..., out) float32."""
    output: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default(x, scale, zero, packed)
    return output


def pack_float16(weight: Tensor) -> Any:
    """A weight (out, in), rounded to float16, in FBGEMM's layout."""
    return _packed(lambda: torch.ops.quantized.linear_prepack_fp16(weight.float(), None))


def linear_float16(x: Tensor, packed: Any) -> Tensor:
    """x (..., in) float32 times a packed weight, accumulated in float32: (..., out) float32."""
    output: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, packed)
    return output


def _packed(pack: Callable[[], Any]) -> Any:
    """Packing reads the engine from a global of torch; running a packed weight does not."""
    if reason := why_missing():
        raise EngineError(f"{reason}.\nFix: weights 'bf16', which run on any CPU.")
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        return pack()
    finally:
        torch.backends.quantized.engine = engine
