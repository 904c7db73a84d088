"""Linear layers whose weights are stored for generating, which reads every weight once per token.

    float32   as loaded; and, where that is faster, each weight as the sum of two float16 numbers, exact to 2**-22, by FBGEMM (x86)
    bf16      weights and inputs rounded to bf16; torch's own product, or that of float32 where it is faster
    float16   weights rounded to float16, inputs and sums in float32
    int8      weights rounded to 8 bits with a scale per output; on x86 inputs as two 7-bit numbers with a scale per token

float16 and int8 are multiplied by FBGEMM on x86. Elsewhere inputs stay float32: 8-bit weights are multiplied by torch's own product
or widened in blocks, whichever is faster, and those of float16 are widened.

A scale per token keeps tokens independent: no output depends on later tokens, on padding, or on other rows of the batch.
Source: Zafrir et al. 2019 (8-bit weights and activations); Khudia et al. 2021 (FBGEMM).

Which of several ways to compute a product is faster depends on the CPU and on torch's libraries, so they are timed where the model
runs, on its own matrices, in its order, for some tenths of a second.
"""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lowtri.compat import torch_private as torch_quantized
from lowtri.compat.torch_private import forward_level, has_hooks
from lowtri.errors import CallError, EngineError
from lowtri.ops.tensors import active_mode, is_dense_cpu

if TYPE_CHECKING:
    from lowtri.kernels.token_rows import TokenRows

Product: TypeAlias = Callable[[Tensor], Tensor]  # (..., in) to (..., out), both float32
Runs: TypeAlias = Sequence[Sequence[Callable[[], object]]]  # for each way the same products

_ROWS = (1, 4, 16, 64)  # numbers of rows that are timed; others are computed as the next larger one, more as the last
_FEW, _MANY = _ROWS[:2], _ROWS[2:]
_SAMPLE = 2**23  # weights that are timed: 32 MB in float32, since generating reads its weights from memory
_MATRIX = 2**21  # of one matrix, at most
_TURNS, _SECONDS = 4, 0.2  # no further turn begins after so long
_GAIN = 0.9  # a way replaces an earlier one if it takes at most so much of its time: noise does not decide

# AVX2 multiplies unsigned by signed bytes and adds two products in 16 bits: 8-bit weights leave 7 bits for an input. In
# language models a few inputs are so large that 7 bits lose the others, so each input is the sum of two such numbers.
_LEVELS = 63  # of a 7-bit number, on either side of zero
_STEPS = 128  # between two of them; the second number reaches from -64 to 64, and 2 * 128 * 127 is a number of 16 bits
_LEAST = 1e-30  # the unit of a row of zeros
_BLOCK = 2**17  # weights that are widened at once: 512 KB in float32


class Way(NamedTuple):
    """A way to compute the products with a stored weight."""

    name: str
    make: Callable[[Tensor], Product]
    rows: tuple[int, ...] = _ROWS  # the timed numbers of rows for which it is a candidate
    fbgemm: bool | None = None  # True: a candidate where torch has FBGEMM (x86); False: only where it does not


class Form(NamedTuple):
    """How weights are stored, and the ways to multiply by them, the preferred one first."""

    store: Callable[[Tensor], Tensor]
    ways: tuple[Way, ...]

    def usable(self) -> list[Way]:
        """The ways that this machine can choose from."""
        has = torch_quantized.why_no_fbgemm() is None
        return [way for way in self.ways if way.fbgemm in (None, has)]


def seconds(ways: Runs, clock: Callable[[], float] | None = None) -> list[list[float]]:
    """The least seconds of each run. A way runs from its first to its last one, by turns with the others.

    One thread is timed in CPU time, which other load on the machine does not lengthen. (On Windows it counts in steps of 16 ms.)

    >>> now = [0.0]
    >>> def takes(seconds):
    ...     return lambda: now.append(now.pop() + seconds)
    >>> seconds([[takes(1.0), takes(2.0)], [takes(0.5), takes(4.0)]], lambda: now[0])
    [[1.0, 2.0], [0.5, 4.0]]
    """
    if clock is None:
        clock = time.process_time if torch.get_num_threads() == 1 and os.name == "posix" else time.perf_counter
    least, begun = [[math.inf] * len(runs) for runs in ways], clock()
    for turn in range(_TURNS):
        if turn and clock() - begun > _SECONDS:  # threads without a core of their own take a hundred times as long
            break
        for runs, times in zip(ways, least, strict=True):
            for i, run in enumerate(runs):
                start = clock()
                run()
                times[i] = min(times[i], clock() - start)
    return least


class Choices:
    """The way that runs, by the kind of weights, the matrix's shape and the number of threads; measured once, so it stays the same.

    Args:
        measure: the seconds of each run of each way.
    """

    def __init__(self, measure: Callable[[Runs], list[list[float]]] = seconds) -> None:
        self._measure = measure
        self._known: dict[tuple[str, torch.Size, int], tuple[Way, ...]] = {}

    def ways(self, weights: str, matrix: Tensor) -> tuple[Way, ...]:
        """The way for each timed number of rows with a matrix (out, in)."""
        key = (weights, matrix.shape, torch.get_num_threads())
        if key not in self._known:
            self.learn(weights, [matrix])
        return self._known[key]

    def learn(self, weights: str, matrices: Iterable[Tensor]) -> None:
        """Time the ways for the shapes that are not known yet, on the first matrices of the model."""
        form, threads = WEIGHTS[weights], torch.get_num_threads()
        ways = form.usable()
        sample: list[Tensor] = []
        chosen: dict[torch.Size, list[Way]] = {}
        for matrix in matrices:
            enough = matrix.shape in chosen and (len(ways) == 1 or sum(x.numel() for x in sample) > _SAMPLE)
            if not enough and (weights, matrix.shape, threads) not in self._known:
                chosen[matrix.shape] = []
                sample.append(matrix)
        parts = [form.store(matrix[: max(1, _MATRIX // max(matrix.shape[1], 1))]) for matrix in sample]
        made = {way: [way.make(part) for part in parts] for way in ways} if len(ways) > 1 else {}
        for rows in _ROWS if sample else ():
            candidates = [way for way in ways if rows in way.rows]
            times = [[0.0] * len(sample)]
            if len(candidates) > 1:
                inputs = [torch.ones(rows, part.shape[1], dtype=torch.float32, device="cpu") for part in parts]
                runs = [[partial(f, x) for f, x in zip(made[way], inputs, strict=True)] for way in candidates]
                with torch.no_grad():
                    times = self._measure(runs)
            for shape, found in chosen.items():
                best, least = candidates[0], math.inf
                for way, taken in zip(candidates, times, strict=True):
                    total = sum(t for matrix, t in zip(sample, taken, strict=True) if matrix.shape == shape)
                    if total <= _GAIN * least:
                        best, least = way, total
                found.append(best)
        for shape, found in chosen.items():
            self._known.setdefault((weights, shape, threads), tuple(found))


def _two_float16(weight: Tensor) -> Product:
    """Each weight as the sum of two float16 numbers, exact to 2**-22."""
    exponent = math.frexp(weight.abs().max().item())[1]
    unit = 2.0 ** max(exponent - 15, -126)  # the greatest weight is then near float16's greatest number
    scaled = weight / unit  # exact
    high = scaled.half().float()
    packed = torch_quantized.pack_float16(torch.cat([high, (scaled - high) * 2**11]))

    def product(x: Tensor) -> Tensor:
        high, low = torch_quantized.linear_float16(x, packed).chunk(2, -1)
        return torch.add(high, low, alpha=2**-11).mul_(unit)

    return product


def _widened(weight: Tensor) -> Product:
    """The product in float32; many CPUs have no fast bf16 product of matrices."""
    return lambda x: nn.functional.linear(x.bfloat16().float(), weight.float()).bfloat16().float()


def _scales(weight: Tensor) -> Tensor:
    """The unit of each row of 8-bit numbers, (out,)."""
    return weight.float().abs().amax(1).clamp_min(_LEAST) / 127


def _int8(weight: Tensor) -> Product:
    scales = _scales(weight)
    packed = torch_quantized.pack_int8(weight, scales)

    def product(x: Tensor) -> Tensor:
        few = compiled_row_ops(x)
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


def _in_blocks(weight: Tensor, scales: Tensor | None = None) -> Product:
    """Weights of few bits, widened in blocks that stay in the cache, so that each is read from memory as it is stored."""
    blocks = weight.split(max(1, _BLOCK // max(weight.shape[1], 1)))

    def product(x: Tensor) -> Tensor:
        y = torch.cat([nn.functional.linear(x, block.float()) for block in blocks], -1)
        return y if scales is None else y.mul_(scales)

    return product


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight (out, in) as 8-bit numbers, and the unit of each row."""
    scales = _scales(weight)
    return (weight.float() / scales[:, None]).round_().to(torch.int8), scales


def _int8_of_torch(weight: Tensor) -> Product:
    numbers, scales = _rounded(weight)
    multiply = torch_quantized.int8_product()
    if multiply is None:
        return _in_blocks(numbers, scales)
    return lambda x: multiply(x.reshape(-1, x.shape[-1]), numbers, scales).view(*x.shape[:-1], len(scales))


WEIGHTS = {
    "float32": Form(
        lambda weight: weight.to(torch.float32, copy=True),  # a tied embedding may be changed in place
        # Two products for each weight: this can be faster only where reading the weights takes the time.
        (
            Way("torch", lambda weight: partial(nn.functional.linear, weight=weight)),
            Way("two_float16", _two_float16, _FEW, fbgemm=True),
        ),
    ),
    # To widen a weight reads and writes five times its bytes: this can be faster only where computing takes the time.
    "bf16": Form(
        lambda weight: weight.bfloat16(),
        (
            Way("torch", lambda weight: lambda x: nn.functional.linear(x.bfloat16(), weight).float()),
            Way("widened", _widened, _MANY),
        ),
    ),
    "float16": Form(
        lambda weight: weight,
        (
            Way(
                "fbgemm",
                lambda weight: partial(torch_quantized.linear_float16, packed=torch_quantized.pack_float16(weight)),
                fbgemm=True,
            ),
            Way("blocks", lambda weight: _in_blocks(weight.half()), fbgemm=False),
        ),
    ),
    "int8": Form(
        lambda weight: weight,
        (
            Way("fbgemm", _int8, fbgemm=True),
            Way("torch", _int8_of_torch, fbgemm=False),
            Way("blocks", lambda weight: _in_blocks(*_rounded(weight)), fbgemm=False),
        ),
    ),
}

MEASURED = Choices()  # of this process


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
        y = self._products[min(bisect_left(_ROWS, x.shape[:-1].numel()), len(_ROWS) - 1)](x if float32 else x.float())
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
        join: Callable[[], None] | None = getattr(module, "fuse_projections", None)
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


# For the few tokens of a step: compiled operations on their rows, and several linear layers as one. A step of generation calls
# hundreds of small operators, and a call takes some microseconds more than its work. With many tokens the calls do not matter, and
# torch computes on all threads.

_ONE_THREAD = 2**15  # numbers: the grain size of torch's operators, which compute larger arrays on several threads


def compiled_row_ops(x: Tensor) -> TokenRows | None:
    """The compiled operations on rows, if they can read x (..., columns), in float32; None if torch's operators have to run."""
    if torch.compiler.is_compiling() or not 0 < x.numel() <= _ONE_THREAD or x.dtype is not torch.float32:
        return None
    if not x.is_contiguous() or not is_dense_cpu(x) or active_mode() is not None:
        return None
    return _compiled()


class FewTokensNorm(nn.RMSNorm):
    """An RMSNorm; torch's operators compute gradients, and the norm without a weight or an epsilon."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__(norm.normalized_shape, norm.eps, device="meta")
        self.weight = norm.weight

    def forward(self, x: Tensor) -> Tensor:
        few, weight, epsilon = compiled_row_ops(x), self.weight, self.eps
        if few is None or weight is None or epsilon is None or x.requires_grad or weight.requires_grad:
            return super().forward(x)
        if compiled_row_ops(weight) is None or weight.shape != x.shape[-1:]:
            return super().forward(x)
        y, columns = torch.empty_like(x), x.shape[-1]
        few.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // columns, columns, epsilon)
        return y


@cache
def _compiled() -> TokenRows | None:
    try:
        from lowtri.kernels import library, target
        from lowtri.kernels.token_rows import TokenRows

        return TokenRows(target.ISA, library.code)
    except EngineError:  # there are no kernels for this machine
        return None


def fuse_linears(*layers: nn.Linear) -> nn.Linear:
    """One layer whose outputs are those of the layers, one after the other."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    weight = torch.cat([layer.weight.detach() for layer in layers])  # (sum of out, in)
    result = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
    result.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        result.bias = nn.Parameter(torch.cat([bias.detach() for bias in biases]), requires_grad=False)
    return result
