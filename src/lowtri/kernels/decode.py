"""Few queries against a long cache: each key and value is read once for all the query heads it serves.

Here memory is the limit and not arithmetic, so nothing is turned: scores are dot products along the head, 16 keys at a time, and
the output is a sum of value rows. The cache is dealt out in parts, so that one sequence can fill the machine; the last task to
finish a head joins its parts, in their order, so that the result does not depend on who was faster.

Source: the split over keys of Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.exponent import exp2
from lowtri.kernels.few import FOUR, dots, in_fours, mix
from lowtri.kernels.halves import store_halves
from lowtri.kernels.inner import inlined, inner
from lowtri.kernels.lanes import greatest_lane, sum_lanes
from lowtri.kernels.passes import (
    LN2,
    LOG2E,
    ROW,
    all_finite,
    cap,
    fill,
    halve,
    in_log2,
    number,
    times,
)
from lowtri.kernels.simd import (
    bits_float,
    fetch_add,
    fma,
    load,
    maximum,
    mul,
    only,
    read,
    read_byte,
    splat,
    store,
    write,
)
from lowtri.kernels.walk import ALL

__all__ = ["FIELDS", "KEYS", "decode", "decode_half", "part_floats", "room"]

KEYS = 128  # keys in a block of online softmax
PORTION = 32  # keys whose values stay in the first cache between the query heads of a group

# The descriptor: addresses, sizes, and strides in numbers, all int64. q and the output are packed (B, Hq, Nq, size); visible is a
# table of bytes (B|1, Hq|1, Nq, Nk), or 0 where everybody sees everything.
FIELDS = (
    *("self", "next_task", "next_room", "tasks", "room", "room_bytes", "parts", "joined", "results"),
    *("batch", "heads", "group", "nq", "nk", "d", "dv"),
    *("q", "k", "k_b", "k_h", "k_n", "v", "v_b", "v_h", "v_n", "o", "lse", "sinks"),
    *("bias", "bias_b", "bias_h", "bias_q", "bias_k", "visible", "visible_b", "visible_h", "scale", "softcap"),
)
# fmt: off
(
    SELF, NEXT_TASK, NEXT_ROOM, TASKS, ROOM, ROOM_BYTES, PARTS, JOINED, RESULTS,
    BATCH, HEADS, GROUP, NQ, NK, D, DV,
    Q, K, K_B, K_H, K_N, V, V_B, V_H, V_N, O, LSE, SINKS,
    BIAS, BIAS_B, BIAS_H, BIAS_Q, BIAS_K, VISIBLE, VISIBLE_B, VISIBLE_H, SCALE, SOFTCAP,
) = range(len(FIELDS))
# fmt: on


def room(rows: int, d: int, dv: int) -> int:
    """Bytes that one thread works in: scores and their pairs, a row of zeros, and queries in fours."""
    return 4 * rows * (KEYS + KEYS // 2) + 4 * dv + 4 * -(-rows // FOUR) * FOUR * d


def part_floats(rows: int, dv: int) -> int:
    """Floats that one part leaves behind: shifts, sums and outputs, (rows,), (rows,) and (rows, Dv)."""
    return -(-2 * rows // 16) * 16 + rows * dv


@inner
def sees(t, b, h, i, j):
    """Whether query i of head h sees key j."""
    return t[VISIBLE] == 0 or read_byte(t[VISIBLE] + b * t[VISIBLE_B] + h * t[VISIBLE_H] + i * t[NK] + j) != 0


@inner
def score_block(t, b, kv, key0, keys, queries, scores, half):
    """Scores (rows, KEYS) of one block in units of log 2; -inf where hidden and past the end. Rows are (head of the group, query)."""
    group, nq, d = t[GROUP], t[NQ], t[D]
    rows, size, hidden = group * nq, 4 if half is None else 2, splat(np.float32(-np.inf))
    scale, softcap = np.float32(bits_float(t[SCALE])) * LOG2E, np.float32(bits_float(t[SOFTCAP]))
    from_k = t[K] + size * (b * t[K_B] + kv * t[K_H] + key0 * t[K_N])
    for j in range(0, keys, 16):
        last = min(keys - j, 16) - 1
        real = ALL >> np.uint64(63 - last)
        at = from_k + size * j * t[K_N]
        for row in range(0, rows, FOUR):
            to, others = scores + 4 * (row * KEYS + j), min(FOUR, rows - row) - 1
            dots(at, size * t[K_N], last, queries + size * row * d, others, size * d // 64, to, 4 * KEYS, half)
        for row in range(rows):
            to = scores + 4 * (row * KEYS + j)
            store(to, only(real, np.uint64(0), mul(load(to), splat(scale)), hidden))
    for j in range(-(-keys // 16) * 16, KEYS, 16):
        for row in range(rows):
            store(scores + 4 * (row * KEYS + j), hidden)
    if softcap > 0:
        cap(scores, rows * KEYS * 4 // ROW, softcap)
    if t[BIAS] or t[VISIBLE] or softcap > 0:
        for row in range(rows):
            h, i = kv * group + row // nq, row % nq
            for j in range(KEYS):
                place = scores + 4 * (row * KEYS + j)
                if j >= keys or not sees(t, b, h, i, key0 + j):
                    write(place, np.float32(-np.inf))
                elif t[BIAS]:
                    at = b * t[BIAS_B] + h * t[BIAS_H] + i * t[BIAS_Q] + (key0 + j) * t[BIAS_K]
                    write(place, read(place) + in_log2(read(t[BIAS] + 4 * at)))


@inner
def weigh_block(scores, rows, m, l, output, dv):
    """One block of online softmax, a row at a time: scores become weights, and the output so far the new shift."""
    for row in range(rows):
        line = scores + 4 * row * KEYS
        most = load(line)
        for at in range(64, 4 * KEYS, 64):
            most = maximum(load(line + at), most)
        old = read(m + 4 * row)
        new = max(old, greatest_lane(most))
        if new > old:
            factor = np.float32(0.0) if old == -np.inf else np.float32(2.0) ** (old - new)
            write(m + 4 * row, new)
            write(l + 4 * row, read(l + 4 * row) * factor)
            times(output + 4 * row * dv, dv, factor)
        shift = splat(-new if new > -np.inf else np.float32(0.0))
        one, total = splat(np.float32(1.0)), splat(np.float32(0.0))
        for at in range(0, 4 * KEYS, 64):
            weights = exp2(fma(load(line + at), one, shift))
            store(line + at, weights)
            total = fma(weights, one, total)
        write(l + 4 * row, read(l + 4 * row) + sum_lanes(total))


@inner
def mix_block(weights, from_v, v_n, keys, rows, dv, output, pairs, zeros, half):
    """Output += weights x values, in portions that stay in the first cache while all the rows use them."""
    if half is not None:
        halve(weights, rows * KEYS, pairs)
    size = 4 if half is None else 2
    from_weights, step = (weights, 4 * KEYS) if half is None else (pairs, 2 * KEYS)
    for key in range(0, keys, PORTION):
        some = min(PORTION, keys - key)
        mix(from_weights + size * key, step, rows, from_v + size * key * v_n, size * v_n, some, zeros, output, dv, half)


@inner
def add_seen(t, b, kv, key0, keys, from_v, weights, output, half):
    """Output += weights x values, pair by pair: what is hidden is not touched, so a NaN there leaves no trace."""
    nq, dv, size = t[NQ], t[DV], 4 if half is None else 2
    for row in range(t[GROUP] * nq):
        for j in range(keys):
            if sees(t, b, kv * t[GROUP] + row // nq, row % nq, key0 + j):
                weight = read(weights + 4 * (row * KEYS + j))
                for d in range(dv):
                    to = output + 4 * (row * dv + d)
                    write(to, read(to) + weight * number(from_v + size * (j * t[V_N] + d), half))


@inlined
def attend_part(t, here, b, kv, part, careful, half):
    """One part of the cache for all queries of a group: shifts, sums and outputs go to the part's place in ``results``."""
    rows, nk, dv, size = t[GROUP] * t[NQ], t[NK], t[DV], 4 if half is None else 2
    scores = here
    pairs = scores + 4 * rows * KEYS
    zeros = pairs + 4 * rows * (KEYS // 2)
    queries = zeros + 4 * dv
    lead = -(-2 * rows // 16) * 16
    m = t[RESULTS] + 4 * ((b * (t[HEADS] // t[GROUP]) + kv) * t[PARTS] + part) * (lead + rows * dv)
    l, output = m + 4 * rows, m + 4 * lead
    for row in range(rows):
        write(m + 4 * row, np.float32(-np.inf))
        write(l + 4 * row, np.float32(0.0))
    fill(output, rows * dv, np.float32(0.0))
    fill(zeros, dv, np.float32(0.0))
    d = t[D]
    in_fours(t[Q] + size * (b * t[HEADS] + kv * t[GROUP]) * t[NQ] * d, rows, size * d // 4, queries)
    blocks = -(-nk // KEYS)
    for block in range(blocks * part // t[PARTS], blocks * (part + 1) // t[PARTS]):
        key0 = block * KEYS
        keys = min(KEYS, nk - key0)
        score_block(t, b, kv, key0, keys, queries, scores, half)
        weigh_block(scores, rows, m, l, output, dv)
        from_v = t[V] + size * (b * t[V_B] + kv * t[V_H] + key0 * t[V_N])
        if careful:
            add_seen(t, b, kv, key0, keys, from_v, scores, output, half)
        else:
            mix_block(scores, from_v, t[V_N], keys, rows, dv, output, pairs, zeros, half)
    return output, rows * dv


@inner
def join(t, b, kv, half):
    """The parts of one head, in their order, with the sink: output and log-sum-exp to memory."""
    nq, dv, rows = t[NQ], t[DV], t[GROUP] * t[NQ]
    lead = -(-2 * rows // 16) * 16
    first = t[RESULTS] + 4 * (b * (t[HEADS] // t[GROUP]) + kv) * t[PARTS] * (lead + rows * dv)
    step = 4 * (lead + rows * dv)
    for row in range(rows):
        h, i = kv * t[GROUP] + row // nq, row % nq
        most, total = np.float32(-np.inf), np.float32(0.0)
        if t[SINKS]:
            most = read(t[SINKS] + 4 * h) * LOG2E
        for part in range(t[PARTS]):
            most = max(most, read(first + part * step + 4 * row))
        if t[SINKS] and most > -np.inf:
            total = np.float32(2.0) ** (read(t[SINKS] + 4 * h) * LOG2E - most)
        sums = first + 4 * lead + 4 * row * dv  # part 0 gathers
        for part in range(t[PARTS]):
            shift = read(first + part * step + 4 * row)
            factor = np.float32(0.0) if shift == -np.inf else np.float32(2.0) ** (shift - most)
            total += read(first + part * step + 4 * (rows + row)) * factor
            from_part = sums + part * step
            for d in range(0, 4 * dv, 64):
                so_far = load(sums + d) if part else splat(np.float32(0.0))
                store(sums + d, fma(load(from_part + d), splat(factor), so_far))
        times(sums, dv, np.float32(1.0) / total if total != 0 else np.float32(0.0))
        line = (b * t[HEADS] + h) * nq + i
        for d in range(0, dv, 16):
            if half is None:
                store(t[O] + 4 * (line * dv + d), load(sums + 4 * d))
            else:
                store_halves(t[O] + 2 * (line * dv + d), load(sums + 4 * d))
        write(t[LSE] + 4 * line, most * LN2 + np.log(total) if total != 0 else np.float32(-np.inf))


@inlined
def take_tasks(t, half):
    """Take tasks until none is left: parts of one head are neighbours."""
    here = t[ROOM] + t[ROOM_BYTES] * fetch_add(t[SELF] + 8 * NEXT_ROOM, 1)
    kv_heads = t[HEADS] // t[GROUP]
    while True:
        task = fetch_add(t[SELF] + 8 * NEXT_TASK, 1)
        if task >= t[TASKS]:
            return
        part, head = task % t[PARTS], task // t[PARTS]
        b, kv = head // kv_heads, head % kv_heads
        careful = False
        while True:
            output, floats = attend_part(t, here, b, kv, part, careful, half)
            if careful or all_finite(output, floats):
                break
            careful = True  # somebody met a NaN or inf among the values; what was hidden must leave no trace: again, pair by pair
        if fetch_add(t[JOINED] + 8 * head, 1) == t[PARTS] - 1:
            join(t, b, kv, half)
            fetch_add(t[JOINED] + 8 * head, -t[PARTS])  # 0 again, for the next launch


def decode(descriptor):
    """The kernel for float32."""
    take_tasks(descriptor, None)


def decode_half(descriptor):
    """The kernel for bf16, where the CPU multiplies pairs of them."""
    take_tasks(descriptor, 1)
