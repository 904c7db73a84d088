"""How the kernels read the arrays of a call: dtypes, strides and addresses, which kernel that is, and its record's fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from lowtri.backends.cpu.launch import Fields, Launch, tile_threads
from lowtri.kernels import abi
from lowtri.kernels.spec import Array, KernelSpec
from lowtri.masks.plan import Plan
from lowtri.ops.call import ArrayInfo, Call, Inputs
from lowtri.ops.distance_bias import first_pair

Strides: TypeAlias = tuple[int, ...]  # in elements

_FEW_QUERIES = 16  # the other kernels compute groups of 16 queries whole
# With products on tile registers a group takes less time than 16 queries one by one: half of it, estimated from the numbers of
# instructions; not measured on a CPU with AMX yet.
_FEW_QUERIES_TILES = 8


class ArrayLayout:
    """The arrays of a call as the kernels read them.

    Half types are read directly, or cast to float32 if the CPU lacks the instructions. The decode kernel reads contiguous queries.

    Attributes:
        cast: whether q, k and v are cast to float32.
        spec: of the kernel; the backward kernel has that of the forward.
        dtype, compute_dtype: of the arrays that the kernels read, and of sums, log-sum-exps, biases and gradients.
        arrays: q, k and v.
        unchanged: whether the kernels read the tensors as they are, and there are no others.
    """

    def __init__(self, call: Call, selection: Selection) -> None:
        family, self.spec, self.cast = selection
        self.call, self.decodes = call, family == "decode"
        self.compute_dtype = "float64" if call.dtype == "float64" else "float32"
        self.dtype = "float32" if self.cast else call.dtype
        self.arrays = [pack(x) for x in (call.q, call.k, call.v)] if self.cast else [call.q, call.k, call.v]
        if self.decodes:
            self.arrays[0] = pack(call.q)
        bias = call.bias
        self.bias_strides = () if bias is None else pack(bias).strides if self._casts(bias) else bias.strides
        self.unchanged = not (call.is_numpy or self.cast or call.bias or call.sinks)
        self.unchanged &= not self.decodes or call.q.strides == packed(call.q.shape)

    def inputs(self, inputs: Inputs) -> Inputs:
        """The arrays in dtypes that the kernels read; ``inputs`` themselves where they are ``unchanged``, which callers ask first."""
        q, k, v, bias, sinks = inputs
        if self.cast:
            q, k, v = (to_dtype(x, "float32") for x in (q, k, v))
        elif self.decodes:
            q = np.ascontiguousarray(q) if self.call.is_numpy else q.contiguous()
        if bias is not None and self.call.bias is not None and self._casts(self.call.bias):
            bias = to_dtype(bias, self.compute_dtype)
        return Inputs(q, k, v, bias, None if sinks is None else to_dtype(sinks, self.compute_dtype))

    def bias_address(self, bias: Any, steps: tuple[int, ...]) -> int:
        """The address of the bias, or of its gradient, of the first query and the first key."""
        if bias is None or self.call.distance_low is None:
            return address(bias)
        start = first_pair(self.call)
        assert start is not None, "supports() has rejected other positions"
        return address(bias) + start * steps[-1] * (8 if self.compute_dtype == "float64" else 4)

    def fields(self) -> Fields:
        q, k, v = (x.strides for x in self.arrays)
        return of_call(self.call, q, k, v, self.bias_strides)

    def launch(self, family: str, fields: Fields, plan: Any) -> Launch:
        """The launch of the forward kernel or of its gradients."""
        return Launch(getattr(abi, family.upper()), self.spec, fields, tile_threads(family, self.call, plan), plan)

    def _casts(self, bias: ArrayInfo) -> bool:
        return bias.dtype != self.compute_dtype


class Selection(NamedTuple):
    """The kernel of a call: its family, forward (with its gradients) or decode; and whether q, k and v are cast to float32 for it."""

    family: str
    spec: KernelSpec
    cast: bool


def select(call: Call) -> Selection:
    """The kernel that runs a call: decode for few queries without gradients, if their rows can be read in whole vectors."""
    dtype, arrays = call.dtype, [call.q, call.k, call.v]
    forward = _spec_of("forward", dtype, arrays)
    cast = forward is None
    if forward is None:
        dtype, arrays = "float32", [pack(x) for x in arrays]
        forward = _spec_of("forward", dtype, arrays)
        assert forward is not None, "contiguous arrays in float32 are read on every CPU"
    if not call.needs_grad and call.q.shape[2] < (_FEW_QUERIES_TILES if forward.on_tiles else _FEW_QUERIES):
        decode = _spec_of("decode", dtype, [pack(arrays[0]), *arrays[1:]])
        if decode is not None:
            return Selection("decode", decode, cast)
    return Selection("forward", forward, cast)


def _spec_of(family: str, dtype: str, arrays: list[ArrayInfo]) -> KernelSpec | None:
    """The spec of the kernel that reads arrays of this dtype and layout, or None."""
    # Imported late: the import finds out which CPU this is, and raises if LOWTRI_ISA names another.
    from lowtri.kernels.target import spec_of

    q, k, v = (Array(x.strides, x.shape[3]) for x in arrays)
    return spec_of(family, dtype, q, k, v)


def of_call(call: Call, q: Strides, k: Strides, v: Strides, bias: Strides) -> Fields:
    """The fields that every kernel reads: sizes, strides, options."""
    batch, heads, kv_heads, nq, nk, d, dv = call.sizes
    return {
        **{"batch": batch, "heads": heads, "group": heads // kv_heads, "nq": nq, "nk": nk, "d": d, "dv": dv},
        **{"q_strides": strides(q), "k_strides": strides(k), "v_strides": strides(v)},
        "bias_strides": of_bias(call, None if call.bias is None else call.bias.shape, bias),
        "options": {"scale": call.scale, "softcap": call.softcap or 0.0},
    }


def of_plan(plan: Plan) -> Fields:
    """The fields of the plan."""
    masks_b, masks_h = plan.mask_index.shape
    return {
        "rows": plan.rows,
        "mask_index": address(plan.mask_index),
        "mask_index_b": masks_h if masks_b > 1 else 0,
        "mask_index_h": 1 if masks_h > 1 else 0,
        "row_start": address(plan.row_start),
        "runs": address(plan.runs),
        "tile_bits": address(plan.tile_bits),
        "bits": address(plan.bits),
    }


def broadcast(shape: Sequence[int] | None, of: Strides, axes: Sequence[str] = "bhqk") -> Fields:
    """The strides of a bias, 0 along broadcast axes; all 0 without a bias."""
    if shape is None:
        return dict.fromkeys(axes, 0)
    return {axis: step if size > 1 else 0 for axis, size, step in zip(axes, shape, of, strict=True)}


def of_bias(call: Call, shape: Sequence[int] | None, of: Strides, axes: Sequence[str] = "bhqk") -> Fields:
    """The strides of a bias of this call, or of its gradient; one over distances q - k ascends with q and descends with k."""
    fields = broadcast(shape, of, axes)
    if shape is not None and call.distance_low is not None:
        fields |= {"q": of[-1], "k": -of[-1]}
    return fields


# Arrays, NumPy's or torch's, and their strides.


def strides(of: Strides) -> Fields:
    """The strides of an array (B, H, N, D)."""
    return dict(zip("bhnd", of, strict=True))


def packed(shape: tuple[int, ...]) -> Strides:
    """The strides of a contiguous array of this shape."""
    steps = [1]
    for size in reversed(shape[1:]):
        steps.append(steps[-1] * size)
    return tuple(reversed(steps))


def like_array(x: ArrayInfo, size: int) -> Strides:
    """The strides of an array without gaps that has the sizes of x (B, H, N, D) but for D, and the order of x in memory."""
    (_, heads, n, _), (_, h_step, n_step, _) = x.shape, x.strides
    if h_step < n_step and heads > 1:  # tokens before heads
        return heads * n * size, size, heads * size, 1
    return heads * n * size, n * size, size, 1


def pack(x: ArrayInfo) -> ArrayInfo:
    """The layout of a contiguous array of the same shape."""
    return x._replace(strides=packed(x.shape))


def to_dtype(x: Any, dtype: str) -> Any:
    """The array in this dtype: itself, or a contiguous copy."""
    if isinstance(x, np.ndarray):
        return x if x.dtype == dtype else np.ascontiguousarray(x, dtype)
    import torch

    kind = getattr(torch, dtype)
    return x if x.dtype is kind else x.detach().to(kind, memory_format=torch.contiguous_format)


def empty(like: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Any:
    """An array of the kind of ``like``; NumPy's are contiguous."""
    if isinstance(like, np.ndarray):
        return np.empty(shape, dtype)
    return like.new_empty_strided(shape, strides, dtype=torch_dtype(dtype))


def torch_dtype(dtype: str) -> Any:
    import torch

    return getattr(torch, dtype)


def address(x: Any) -> int:
    """The address of an array's first element, 0 for None."""
    if x is None:
        return 0
    pointer: int = x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()
    return pointer
