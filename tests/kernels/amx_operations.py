"""The operations of AMX's tile registers on vectors, instruction by instruction; importing this file adds them to lowtri's.

Tile registers are memory on the stack. The product of two bf16 numbers is exact in float32, so sums are rounded as on AMX, with or
without fused multiply-add; denormal numbers, which AMX counts as 0, keep their value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amx_emulated import AmxEmulated
from llvmlite import ir

from lowtri.compat.numba_private import alloca_once, for_range
from lowtri.kernels import operations
from lowtri.kernels.isa import Baseline
from lowtri.kernels.operations import TILE_ROWS, Operations, halves_of_pairs, pair_weights

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_ROW = ir.VectorType(ir.FloatType(), 16)  # a tile's row, of numbers or of pairs
_TILE = ir.ArrayType(_ROW, TILE_ROWS)
_BASELINE = Operations(Baseline())


class AmxEmulatedOperations(Operations):
    def pair(self, b: Any, low: Any, high: Any) -> Any:
        """16 pairs from two vectors of floats, rounded."""
        return _call_once_defined(b, _pair, [low, high], low.type)

    def pair_weights(self, b: Any, low: Any, high: Any) -> Any:
        return pair_weights(b, low, high)

    def tile_registers(self, b: Any, count: int) -> list[Any]:
        return [alloca_once(b, _TILE) for _ in range(count)]

    def tile_zero(self, b: Any, tile: Any) -> None:
        _call_once_defined(b, _zero, [tile])

    def tile_load(self, b: Any, tile: Any, address: Any, row_step: Any) -> None:
        _call_once_defined(b, _load, [tile, address, row_step])

    def tile_store(self, b: Any, tile: Any, address: Any, row_step: Any) -> None:
        _call_once_defined(b, _store, [tile, address, row_step])

    def tile_dot(self, b: Any, tile: Any, x: Any, y: Any) -> None:
        _call_once_defined(b, _dot, [tile, x, y])

    def tile_configure(self, b: Any, memory: Any) -> None:
        pass

    def tile_restore(self, b: Any, memory: Any) -> None:
        pass


def _call_once_defined(b: Any, emit: Callable[..., Any], arguments: list[Any], result: Any = None) -> Any:
    """Call a function that is defined once in a module and not inlined: a kernel has many such operations, and compiles faster so."""
    name = f"lowtri_emulated{emit.__name__}"
    function = b.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result or ir.VoidType(), [x.type for x in arguments])
        function = ir.Function(b.module, kind, name)
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        body = ir.IRBuilder(function.append_basic_block())
        value = emit(body, *function.args)
        body.ret_void() if value is None else body.ret(value)
    return b.call(function, arguments)


def _pair(b: Any, low: Any, high: Any) -> Any:
    return _BASELINE.pair(b, low, high)


def _zero(b: Any, tile: Any) -> None:
    with for_range(b, ir.Constant(_I64, TILE_ROWS)) as loop:
        b.store(ir.Constant(_ROW, None), _row(b, tile, loop.index))


def _load(b: Any, tile: Any, address: Any, row_step: Any) -> None:
    with for_range(b, ir.Constant(_I64, TILE_ROWS)) as loop:
        source = b.inttoptr(b.add(address, b.mul(loop.index, row_step)), _ROW.as_pointer())
        b.store(b.load(source, align=2), _row(b, tile, loop.index))


def _store(b: Any, tile: Any, address: Any, row_step: Any) -> None:
    with for_range(b, ir.Constant(_I64, TILE_ROWS)) as loop:
        target = b.inttoptr(b.add(address, b.mul(loop.index, row_step)), _ROW.as_pointer())
        b.store(b.load(_row(b, tile, loop.index)), target, align=4)


def _dot(b: Any, tile: Any, x: Any, y: Any) -> None:
    sums = [alloca_once(b, _ROW) for _ in range(2)]  # of the even and of the odd numbers of the depth
    fma = _BASELINE.fma
    with for_range(b, ir.Constant(_I64, TILE_ROWS)) as rows:
        for total in sums:
            b.store(ir.Constant(_ROW, None), total)
        words = b.bitcast(_row(b, x, rows.index), ir.FloatType().as_pointer())
        with for_range(b, ir.Constant(_I64, 16)) as depth:
            word = b.load(b.gep(words, [depth.index]))
            lanes = b.insert_element(ir.Constant(_ROW, ir.Undefined), word, ir.Constant(_I32, 0))
            lanes = b.shuffle_vector(lanes, lanes, ir.Constant(ir.VectorType(_I32, 16), None))
            others = halves_of_pairs(b, b.load(_row(b, y, depth.index)))
            for one, other, total in zip(halves_of_pairs(b, lanes), others, sums, strict=True):
                b.store(fma(b, one, other, b.load(total)), total)
        target = _row(b, tile, rows.index)
        b.store(b.fadd(b.load(target), b.fadd(*(b.load(total) for total in sums))), target)


def _row(b: Any, tile: Any, row: Any) -> Any:
    """A pointer to a tile's row."""
    return b.gep(tile, [ir.Constant(_I64, 0), row])


operations.OPERATIONS[AmxEmulated] = AmxEmulatedOperations
