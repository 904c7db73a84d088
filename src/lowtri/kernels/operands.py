"""Rows of arrays as operands of a product, in each of the four ways in which a kernel reads rows.

Operands consist of words (see :mod:`lowtri.kernels.product`), or are those of :mod:`lowtri.kernels.tiles`. These functions convert rows
where necessary and return the operand's address; for operands that may be strided, they also return the row step and the depth step, in
words.

On tile registers, A has rows padded to whole depths of 32, and B pairs. Rows that are contiguous and whole are read from the array;
others are copied first, padded with zeros: padding on one side only would not do, since 0 * NaN is NaN.

Transposed tiles are shared by all threads, and there is one copy for all key/value heads: each is packed once, by the first thread that
needs it. A tile has a state: 0 not packed, 1 being packed, 2 packed. A thread that needs a tile while another one packs it packs a copy
of its own, so that no thread ever waits. Memory of tiles that no query sees is never touched.

Neighbouring tiles of queries see mostly the same keys, and a thread computes them one after the other. So each thread keeps the key
tiles that it converted last, in slots: tile n is in slot ``n % slots``. The first words of the memory say which tile a slot has: its
number among the tiles of all heads, plus 1; or 0. A tile of queries that sees more key tiles than there are slots would find none of
them again; it uses one slot, which then stays in the first cache.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.kernels import scratch
from lowtri.kernels.blocks import words_to_blocks
from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.operations.baseline import constant
from lowtri.kernels.rows import (
    fill,
    interleave_input_rows,
    interleave_rows,
    padded,
    product_rows,
    round_row,
    round_up,
    transpose_in,
    widen_rows,
)
from lowtri.kernels.scratch import KEYS, MOST_SLOTS
from lowtri.kernels.simd import (
    I16,
    I64,
    as_number,
    load,
    pointer,
    read_int64,
    shuffled,
    store,
    transpose,
    transposed,
    write_int64,
)
from lowtri.kernels.spec import QUERIES

__all__ = [
    *("clear_pack_cache", "finite_rows_operand", "head_operand", "key_operand", "packed_keys"),
    *("packed_values", "row_operand", "store_rounded_block", "transposed_queries"),
    *("transposed_tile",),
]

# Rows of bf16 as operands on tile registers.


@intrinsic
def copy_number(typing, source, target):
    """Copy a number of 16 bits."""

    def emit(c, b, s, a):
        b.store(b.load(pointer(b, a[0], I16), align=2), pointer(b, a[1], I16), align=2)
        return c.get_dummy_value()

    return types.void(types.intp, types.intp), emit


@device_function
def copy_rows(source, row_step, step, n, size, target, rows, spec):
    """Copy n rows of an array of bf16 to rows of a multiple of 32 numbers; zeros fill them, and ``rows`` rows in all."""
    row = 2 * round_up(size, 32)
    fill(target, rows * row // 4, 0.0, spec)
    for i in range(n):
        from_row, to_row, d = source + 2 * i * row_step, target + i * row, 0
        if step == 1:
            while d + 32 <= size:
                store(to_row + 2 * d, load(from_row + 2 * d, spec))
                d += 32
        while d < size:
            copy_number(from_row + 2 * d * step, to_row + 2 * d)
            d += 1


@device_function
def rows_for_a(source, row_step, step, n, size, target, spec):
    """Rows of keys or values as operand A, at least 16: their address, and bytes from one to the next. ``target`` is scratch."""
    if step == 1 and size % 32 == 0 and n >= 16:
        return source, 2 * row_step
    copy_rows(source, row_step, step, n, size, target, max(n, 16), spec)
    return target, 2 * round_up(size, 32)


@device_function
def queries_in_pairs(source, row_step, step, n, size, rows, target, spec):
    """n <= 64 rows of queries as operand B, for each 32 of them (words, 32), pairs along the head; ``rows`` is scratch for 64 rows.

    Lanes past n repeat the last row.
    """
    words, row = source, row_step
    if step != 1 or size % 32 or row_step % 2:
        copy_rows(source, row_step, step, n, size, rows, n, spec)
        words, row = rows, round_up(size, 32)
    size = round_up(size, 32) // 2
    for first in range(0, QUERIES, 16):
        top = min(first, n - 1)
        last, lanes = min(n - 1 - top, 15), spec.unit_row * size * (first // 32) + 4 * (first % 32)
        for pair in range(0, size, 16):
            block = words + 2 * top * row + 4 * pair
            transpose(block, 2 * row, last, target + spec.unit_row * pair + lanes, spec.unit_row, spec)


@intrinsic
def transpose_block(typing, source, source_row, count, zeros, target, target_row, spec):
    """Transpose 32 rows of 32 numbers of bf16. Rows from ``count`` on are read from ``zeros``; row steps in bytes.

    The numbers of two rows are interleaved in each quarter of a vector, which gives the pairs of 16 columns in two vectors; blocks of
    16 x 16 pairs are then transposed.
    """
    kind, quarters = spec.value.vector, (0, 8, 16, 24)

    def emit(c, b, s, a):
        source, source_row, count, zeros, target, target_row, _ = a
        rows = []
        for i in range(32):
            n = ir.Constant(I64, i)
            address = b.select(b.icmp_signed("<", n, count), b.add(source, b.mul(n, source_row)), zeros)
            rows.append(b.load(pointer(b, address, ir.VectorType(I16, 32)), align=2))
        for first in (0, 4):
            columns = [quarter + first + n for quarter in quarters for n in range(4)]
            order = [lane for column in columns for lane in (column, column + 32)]
            pairs = [b.bitcast(shuffled(b, *rows[i : i + 2], order), kind.ir) for i in range(0, 32, 2)]
            for column, vector in zip(columns, transposed(b, pairs), strict=True):
                address = b.add(target, b.mul(target_row, ir.Constant(I64, column)))
                b.store(vector, pointer(b, address, kind.ir), align=4)
        return c.get_dummy_value()

    return types.void(*[types.intp] * 6, spec), emit


@device_function
def pack_blocks(rows, row, n, columns, zeros, target, spec):
    """n rows of at least ``columns`` numbers, transposed: for each 32 of them a block (columns, 32), zeros past n."""
    if columns < 32:
        fill(target, round_up(n, 32) * columns // 2, 0.0, spec)
        for i in range(n):
            for d in range(columns):
                copy_number(rows + 2 * (i * row + d), target + 64 * (i // 32 * columns + d) + 2 * (i % 32))
        return
    for j in range(0, n, 32):
        for d in range(0, columns, 32):
            column = min(d, columns - 32)  # the last block overlaps the one before
            block = target + 64 * (j // 32 * columns + column)
            transpose_block(rows + 2 * (j * row + column), 2 * row, n - j, zeros, block, 64, spec)


@device_function
def pack_transposed(source, row_step, step, n, size, copy, zeros, target, spec):
    """n rows of keys or values, transposed: for each 32 of them a block (product_rows(size), 32), zeros past n.

    ``copy`` is scratch for the rows; ``zeros`` are 32 zeros.
    """
    rows, row = source, row_step
    if step != 1 or size % 16 or size < 32:
        copy_rows(source, row_step, step, n, size, copy, n, spec)
        rows, row = copy, round_up(size, 32)
    pack_blocks(rows, row, n, product_rows(size, spec), zeros, target, spec)


@device_function
def pack_rounded(source, n, size, copy, zeros, target, spec):
    """:func:`pack_transposed` for rows of float32, padded to a multiple of 32."""
    row = round_up(size, 32)
    fill(copy, n * row // 2, 0.0, spec)
    for i in range(n):
        round_row(source + 4 * i * row, size, as_number(1.0, spec), copy + 2 * i * row, spec)
    pack_blocks(copy, row, n, product_rows(size, spec), zeros, target, spec)


@intrinsic
def store_rounded_block(typing, source, source_row, total, target, target_row, spec):
    """16 rows of 32 numbers: the columns of (32, 16), over a vector of totals, rounded to bf16. 0 where the total is."""

    def emit(c, b, s, a):
        source, source_row, total, target, target_row, _ = a
        operations, kind = spec.value.operations, spec.value.vector.ir
        positive = b.fcmp_ordered(">", total, constant(kind, 0.0))
        factor, pairs = b.fdiv(constant(kind, 1.0), total), []
        for i in range(0, 32, 2):
            both = []
            for d in (i, i + 1):
                address = b.add(source, b.mul(source_row, ir.Constant(I64, d)))
                both.append(b.select(positive, b.fmul(b.load(pointer(b, address, kind), align=4), factor), total))
            pairs.append(operations.pair(b, *both))
        for i, row in enumerate(transposed(b, pairs)):
            address = b.add(target, b.mul(target_row, ir.Constant(I64, i)))
            b.store(row, pointer(b, address, kind), align=2)
        return c.get_dummy_value()

    return types.void(types.intp, types.intp, total, types.intp, types.intp, spec), emit


# The operands of all specs.


@by_spec
def transposed_queries(spec):
    """n rows of an array as an operand (words, 64) with queries in lanes; ``rows`` is scratch for (n, size)."""

    def direct(source, row_step, step, n, size, rows, target, spec):
        transpose_in(source, row_step, step, n, size, round_up(n, 16), target, spec)

    def pairs(source, row_step, step, n, size, rows, target, spec):
        transpose_in(source, row_step // 2, step, n, size // 2, round_up(n, 16), target, spec)

    def blocks(source, row_step, step, n, size, rows, target, spec):
        columns = round_up(n, 16)
        transpose_in(source, row_step // 2, step, n, size // 2, columns, target, spec)
        words_to_blocks(target, size // 2, columns)

    def widened(source, row_step, step, n, size, rows, target, spec):
        widen_rows(source, row_step, step, n, size, rows, size, spec)
        transpose_in(rows, size, 1, n, size, round_up(n, 16), target, spec)

    def tiles(source, row_step, step, n, size, rows, target, spec):
        queries_in_pairs(source, row_step, step, n, size, rows, target, spec)

    of_pairs = blocks if spec.in_blocks else pairs
    return {"direct": direct, "pairs": of_pairs, "widened": widened, "tiles": tiles}[spec.operand]


@by_spec
def head_operand(spec):
    """Rows of keys or values as an operand with words along the head, the A of K Q^T; ``target`` is scratch for (n, size).

    On tiles the row step is in bytes.
    """

    def direct(source, row_step, step, n, size, target, spec):
        return source, row_step, step

    def pairs(source, row_step, step, n, size, target, spec):
        return source, row_step // 2, step

    def widened(source, row_step, step, n, size, target, spec):
        widen_rows(source, row_step, step, n, size, target, padded(spec, size), spec)
        return target, padded(spec, size), 1

    def tiles(source, row_step, step, n, size, target, spec):
        rows, row = rows_for_a(source, row_step, step, n, size, target, spec)
        return rows, row, 1

    return {"direct": direct, "pairs": pairs, "widened": widened, "tiles": tiles}[spec.operand]


@by_spec
def key_operand(spec):
    """Rows of keys or values as an operand with words along the keys, the B of P V: its address, and words from one row to the next.

    Rows are whole vectors, padded with 0. ``target`` and ``zeros`` are scratch.
    """

    def direct(source, row_step, step, n, size, zeros, target, spec):
        if step == 1 and size % spec.lanes == 0:
            return source, row_step
        widen_rows(source, row_step, step, n, size, target, padded(spec, size), spec)
        return target, padded(spec, size)

    def pairs(source, row_step, step, n, size, zeros, target, spec):
        interleave_input_rows(source, row_step, n, size, zeros, target, spec)
        return target, size

    def widened(source, row_step, step, n, size, zeros, target, spec):
        widen_rows(source, row_step, step, n, size, target, padded(spec, size), spec)
        return target, padded(spec, size)

    return {"direct": direct, "pairs": pairs, "widened": widened}[spec.operand]


@by_spec
def row_operand(spec):
    """Packed rows as an operand of a product that sums over rows; ``pairs`` is scratch, and may be ``rows`` itself."""

    def numbers(rows, n, size, pairs, spec):
        return rows

    def in_pairs(rows, n, size, pairs, spec):
        interleave_rows(rows, n, size, pairs, spec)
        return pairs

    def whole_depths(rows, n, size, pairs, spec):
        interleave_rows(rows, n, size, pairs, spec)
        used, depths = (n + 1) // 2, round_up(n, 32) // 2
        fill(pairs + 4 * size * used, size * (depths - used), 0.0, spec)
        return pairs

    return {"pairs": in_pairs, "tiles": whole_depths}.get(spec.operand, numbers)


@by_spec
def finite_rows_operand(spec):
    """Padded rows of keys or values, packed, as an operand: see :func:`key_operand`. ``copy`` and ``target`` are scratch."""

    def words(rows, n, size, copy, zeros, target, spec):
        return row_operand(rows, n, padded(spec, size), rows, spec), padded(spec, size)

    def tiles(rows, n, size, copy, zeros, target, spec):
        pack_rounded(rows, n, size, copy, zeros, target, spec)
        return target, 0

    return tiles if spec.on_tiles else words


# Transposed tiles, shared by all threads.

_PACKING, _PACKED = ir.Constant(I64, 1), ir.Constant(I64, 2)


@intrinsic
def is_packed(typing, state):
    """Whether the tile is packed; if so, this thread sees its numbers."""

    def emit(c, b, s, a):
        return b.icmp_unsigned("==", b.load_atomic(pointer(b, a[0], I64), "acquire", 8), _PACKED)

    return types.boolean(types.intp), emit


@intrinsic
def claim(typing, state):
    """Whether this thread is the one that packs the tile."""

    def emit(c, b, s, a):
        result = b.cmpxchg(pointer(b, a[0], I64), ir.Constant(I64, 0), _PACKING, "acq_rel", "acquire")
        return b.extract_value(result, 1)

    return types.boolean(types.intp), emit


@intrinsic
def publish(typing, state):
    """Mark the tile as packed, for all threads."""

    def emit(c, b, s, a):
        b.store_atomic(_PACKED, pointer(b, a[0], I64), "release", 8)
        return c.get_dummy_value()

    return types.void(types.intp), emit


@device_function
def transposed_tile(call, rows, step, size, head, key0, own, copy, zeros, spec):
    """The address of the transposed rows from ``key0`` on, in blocks of 32 keys: (keys / 32, product_rows(size), 32).

    Args:
        rows: address of key 0 of this head.  step: the strides of the array.  head: the number of the key/value head.
        own, copy: this thread's memory for a tile, and for a copy of its rows.  zeros: address of 32 zeros.
    """
    tile, tiles, columns = key0 // KEYS, (call.nk + KEYS - 1) // KEYS, product_rows(size, spec)
    state = call.scratch + call.offsets.packed_states + 8 * (head * tiles + tile)
    packed = call.scratch + call.offsets.packed + 2 * KEYS * columns * (head * tiles + tile)
    first = tile * KEYS
    if not is_packed(state):
        claimed = claim(state)
        if not claimed:
            packed = own
        source, n = rows + 2 * first * step.n, min(KEYS, call.nk - first)
        pack_transposed(source, step.n, step.d, n, size, copy, zeros, packed, spec)
        if claimed:
            publish(state)
    return packed + 2 * (key0 - first) * columns


# Tiles that a thread keeps.

key_bytes = device_function(scratch.key_bytes)
slot_count = device_function(scratch.slot_count)


@by_spec
def clear_pack_cache(spec):
    """Mark all slots as empty: the scratch memory has the tiles of an earlier run."""

    def nothing(keys, values, spec):
        pass

    def of_values(keys, values, spec):
        for slot in range(MOST_SLOTS):
            write_int64(values + 8 * slot, 0)

    def of_both(keys, values, spec):
        for slot in range(MOST_SLOTS):
            write_int64(keys + 8 * slot, 0)
            write_int64(values + 8 * slot, 0)

    return {"pairs": of_values, "widened": of_both}.get(spec.operand, nothing)


@device_function
def slot_of(memory, head, tile, tile_bytes, tiles, seen):
    """The slot of a head's key tile, one of ``seen``: its address, and whether the tile is to be converted now."""
    slots, number = slot_count(tile_bytes), head * tiles + tile + 1
    slot = tile % slots if seen <= slots else 0
    is_new = read_int64(memory + 8 * slot) != number
    if is_new:
        write_int64(memory + 8 * slot, number)
    return memory + 8 * MOST_SLOTS + tile_bytes * slot, is_new


@by_spec
def packed_keys(spec):
    """``keys`` keys from ``key0`` on as an operand with words along the head, its row step and depth step.

    Args:
        rows: address of key 0 of this head.  step: the strides of the array.  head: the number of the key/value head.
        seen: how many key tiles the queries see.  memory: the slots; on tiles, scratch for a tile's rows.
    """

    def in_place(call, rows, step, head, key0, keys, seen, memory, spec):
        return head_operand(rows + spec.input_bytes * key0 * step.n, step.n, step.d, keys, call.d, memory, spec)

    def kept(call, rows, step, head, key0, keys, seen, memory, spec):
        tile, tiles, size = key0 // KEYS, (call.nk + KEYS - 1) // KEYS, padded(spec, call.d)
        words, is_new = slot_of(memory, head, tile, key_bytes(KEYS, size, spec), tiles, seen)
        first = tile * KEYS
        if is_new:
            source, n = rows + spec.input_bytes * first * step.n, min(KEYS, call.nk - first)
            head_operand(source, step.n, step.d, n, call.d, words, spec)
        return words + key_bytes(key0 - first, size, spec), size, 1

    return kept if spec.operand == "widened" else in_place


@by_spec
def packed_values(spec):
    """The values from ``key0`` on as an operand with words along the keys, and the words of a row; the rest as in :func:`packed_keys`.

    In pairs, key0 is an even number of keys after its tile's first; on tiles, a multiple of 32.

    Args:
        zeros: a row of 0, the neighbour of an odd last key.  copy: scratch for a tile's rows, padded.
    """

    def in_place(call, rows, step, head, key0, keys, seen, zeros, copy, memory, spec):
        return key_operand(rows + spec.input_bytes * key0 * step.n, step.n, step.d, keys, call.dv, zeros, copy, spec)

    def kept(call, rows, step, head, key0, keys, seen, zeros, copy, memory, spec):
        tile, tiles, size = key0 // KEYS, (call.nk + KEYS - 1) // KEYS, padded(spec, call.dv)
        words, is_new = slot_of(memory, head, tile, key_bytes(KEYS, size, spec), tiles, seen)
        first = tile * KEYS
        if is_new:
            source, n = rows + spec.input_bytes * first * step.n, min(KEYS, call.nk - first)
            key_operand(source, step.n, step.d, n, call.dv, zeros, words, spec)
        return words + key_bytes(key0 - first, size, spec), size

    def shared(call, rows, step, head, key0, keys, seen, zeros, copy, memory, spec):
        return transposed_tile(call, rows, step, call.dv, head, key0, memory, copy, zeros, spec), 0

    return {"direct": in_place, "tiles": shared}.get(spec.operand, kept)
