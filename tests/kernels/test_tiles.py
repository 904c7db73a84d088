"""Attention in bf16 on tile registers: on AMX where this CPU has it, else on its emulation; the code for AMX is compiled either way."""

from __future__ import annotations

from functools import partial
from typing import Any

import amx_operations  # noqa: F401 - of the emulation
import build_kernels
import numpy as np
import pytest
import torch
from amx_emulated import with_tiles
from attention_cases import on_threads
from gradient_cases import bf16, compare, inputs, results
from numba import types

import lowtri
from lowtri.backends import cpu
from lowtri.backends.cpu.decode import CpuDecode
from lowtri.errors import EngineError
from lowtri.kernels import target, threads
from lowtri.kernels.abi import Abi
from lowtri.kernels.amx import (
    configure_tiles,
    restore_tiles,
    stationary_b_product,
    stationary_b_product_add,
    tile_product,
    tile_product_add,
)
from lowtri.kernels.device import RecordType
from lowtri.kernels.isa import PERMISSION, Amx
from lowtri.kernels.spec import KernelSpec
from lowtri.kernels.values import Matrix, Packed
from lowtri.ops.arguments import describe

SPEC = KernelSpec("bfloat16", "amx", with_tiles())
AMX = Amx.features - {PERMISSION}


# The product.


def tdpbf16ps(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The instruction: c (16, 16), a (16, 32), and b (16, 16, 2), all float32; even and odd numbers are summed separately."""
    sums = np.zeros((2, 16, 16), np.float32)
    for k in range(16):
        for parity in range(2):
            sums[parity] += a[:, 2 * k + parity, None] * b[k, None, :, parity]
    return c + (sums[0] + sums[1])


PRODUCT = Abi(
    "product", ("a", "b", "c", "memory"), {name: np.int64 for name in ("rows", "steps", "columns", "a_row", "add")}
)


def multiply(call: Any) -> None:
    configure_tiles(call.memory, call.spec)
    row = 4 * call.columns
    a = Matrix(call.a, call.a_row, 64)
    b, c = Packed(call.b, row), Packed(call.c, row)
    if call.steps == 2 and call.columns == 32:
        if call.add:
            stationary_b_product_add(a, b, c, call.rows, call.spec)
        else:
            stationary_b_product(a, b, c, call.rows, call.spec)
    elif call.add:
        tile_product_add(a, b, c, call.rows, call.steps, call.columns, call.spec)
    else:
        tile_product(a, b, c, call.rows, call.steps, call.columns, call.spec)
    restore_tiles(call.memory, call.spec)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("rows", "steps", "columns", "add"),
    [
        *((16, 1, 32, 0), (40, 2, 64, 0), (31, 1, 64, 0), (80, 3, 32, 1)),
        *((16, 2, 32, 0), (45, 2, 32, 0), (48, 2, 32, 1)),  # B in registers
    ],
)
def test_the_product_meets_the_same_pairs_in_the_same_order_as_the_instruction(rows, steps, columns, add) -> None:
    a, b = bf16((rows, 32 * steps + 8)), bf16((16 * steps, columns, 2), 1)  # rows of a lie apart
    c = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2))
    before, expected = c.numpy().copy(), np.empty((rows, columns), np.float32)
    wide_a, wide_b = a.float().numpy(), b.float().numpy()
    for i in (min(first, rows - 16) for first in range(0, rows, 16)):
        for j in range(0, columns, 16):
            block = before[i : i + 16, j : j + 16] if add else np.zeros((16, 16), np.float32)
            for n in range(steps):
                block = tdpbf16ps(block, wide_a[i : i + 16, 32 * n :][:, :32], wide_b[16 * n :][:16, j : j + 16])
            expected[i : i + 16, j : j + 16] = block
    record, memory = np.zeros(1, PRODUCT.dtype), np.zeros(16, np.int64)
    for name, x in (("a", a), ("b", b), ("c", c)):
        record[name] = x.data_ptr()
    record["memory"], record["a_row"] = memory.ctypes.data, 2 * a.shape[1]
    record["rows"], record["steps"], record["columns"], record["add"] = rows, steps, columns, add
    code = build_kernels.compiled(multiply, types.void(RecordType(PRODUCT.dtype, SPEC)))
    threads.run_team(code, record.ctypes.data, 1)
    np.testing.assert_allclose(c.numpy(), expected, rtol=1e-5, atol=1e-5)
    if SPEC.isa.name == "amx-emulated":
        assert (c.numpy() == expected).all()


# Attention.


SHAPES = [  # Nq, Nk, D, Dv
    *((130, 130, 64, 64), (33, 70, 1, 16), (97, 100, 31, 32), (65, 5, 80, 130)),
    *((20, 300, 128, 128), (200, 200, 32, 48), (9, 113, 130, 1)),
]
MASKS = {
    "full": "full",
    "window": "causal & window(40)",
    "sinks": "causal & (window(9) | first(3))",
    "by head": lowtri.heads([lowtri.causal(), lowtri.full(), lowtri.window(5), lowtri.mask("~causal")]),
}


@pytest.mark.parametrize(
    "shape", [SHAPES[0], *(pytest.param(each, marks=pytest.mark.sweep) for each in SHAPES[1:])], ids=str
)
def test_outputs_and_gradients_of_every_layout(tiles: None, shape: tuple[int, int, int, int]) -> None:
    compare(inputs(shape), "causal & window(90)" if shape[1] > 64 else "full")


def test_gradients_of_tokens_before_heads(tiles: None) -> None:
    """As projections give them, in sizes without padding: gradients of k and v have their layout."""
    compare([x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs((64, 64, 32, 32))], "causal")


@pytest.mark.sweep
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(tiles: None, mask: str) -> None:
    compare(inputs((131, 131, 64, 32)), MASKS[mask])


@pytest.mark.sweep
def test_rows_that_see_nothing_softcap_bias_and_sinks(tiles: None) -> None:
    empty = lowtri.causal() & lowtri.keys(np.arange(150) >= 70)
    bias, sinks = torch.randn(1, 4, 150, 150, generator=torch.Generator().manual_seed(3)), torch.ones(4)
    compare(inputs((150, 150, 32, 32)), empty)
    compare(inputs((150, 150, 32, 32)), empty, softcap=3.0, bias=bias, sinks=sinks)
    compare(inputs((150, 150, 32, 32)), "causal", scale=-0.2)


@pytest.mark.sweep
def test_inputs_that_lie_apart(tiles: None) -> None:
    """Heads last, rows of an odd number of elements, neighbours apart, and a gradient that is one number everywhere."""
    tensors = inputs((97, 97, 64, 64))
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    odd = [torch.nn.functional.pad(x, (0, 1))[..., :-1] for x in tensors]
    columns = [x.mT.contiguous().mT for x in tensors]
    expected = lowtri.attention(*tensors[:3], "causal", engine="cpu")
    for other in (apart, odd, columns):
        assert torch.equal(lowtri.attention(*other[:3], "causal", engine="cpu"), expected)
        compare(other, "causal")
    tensors[3] = torch.ones((), dtype=torch.bfloat16).expand(tensors[3].shape)
    compare(tensors, "causal")


@pytest.mark.sweep
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", range(4), ids=["q", "k", "v", "gradient"])
def test_hidden_values_that_are_not_finite_change_no_bit(tiles: None, place: int, value: float) -> None:
    mask = lowtri.causal() & lowtri.documents(lengths=[70, 60])
    good = inputs((130, 130, 64, 80))
    bad = [x.clone() for x in good]
    bad[place][0, 0, 100, 0] = value
    before, after = (results(x, mask, "cpu") for x in (good, bad))
    for expected, actual in zip(before, after, strict=True):
        assert torch.equal(expected[:, :, :70], actual[:, :, :70]) and torch.equal(expected[1], actual[1])
    assert not all(x.isfinite().all() for x in after), "what is visible must come out"


@pytest.mark.sweep
def test_huge_scores_select_the_greatest(tiles: None) -> None:
    q, k, v, _ = inputs((70, 100, 32, 32))
    k[...] = 0
    k[..., 0] = torch.linspace(-1, 1, 100)
    q[...] = 0
    q[..., 0] = 2e38  # in units of log 2 the greatest float32
    for sign, best in ((1, 99), (-1, 0)):
        output = lowtri.attention(sign * q, k, v, "full", scale=1.0, engine="cpu")
        expected = v[:, :, best].repeat_interleave(2, 1)[:, :, None]
        assert (output - expected).abs().max() <= 2**-7 * expected.abs().max()


@pytest.mark.sweep
def test_the_log_sum_exp_has_the_precision_of_the_exponential(tiles: None) -> None:
    q, k, v, _ = inputs((100, 500, 64, 64))
    lse = lowtri.attention(q, k, v, "full", return_lse=True, engine="cpu")[1]
    exact = lowtri.attention(*(x.double() for x in (q, k, v)), "full", return_lse=True, engine="reference")[1]
    assert (lse.double() - exact).abs().max() <= 2e-4


@pytest.mark.sweep
def test_threads_change_nothing_and_pack_each_tile_once(tiles: None) -> None:
    runs = on_threads((1, 2, 2), partial(results, inputs((200, 200, 64, 64)), "causal & window(120)", "cpu"))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


@pytest.mark.sweep
def test_a_window_over_many_queries_takes_one_copy_of_the_values_at_most(tiles: None) -> None:
    n, d = 65_536, 16
    q, k, v = (bf16((1, 1, n, d), seed) for seed in range(3))
    call, _ = describe(q, k, v, "causal & window(64)")
    launch = cpu.prepare(call).launch
    copies = launch._bytes - launch._scratch - 2 * n * d
    assert 0 <= copies <= 2**18 * call.threads + n  # a thread's memory; less than 8 bytes for each 96 keys
    output = lowtri.attention(q, k, v, "causal & window(64)", engine="cpu")
    last = lowtri.attention(q[:, :, -8:], k[:, :, -128:], v[:, :, -128:], "causal & window(64)", engine="reference")
    assert (output[:, :, -8:].double() - last.double()).abs().max() <= 0.05


@pytest.mark.sweep
@pytest.mark.parametrize("nq", [7, 8, 15])
def test_few_queries_go_to_the_kernel_that_is_faster(tiles: None, nq: int) -> None:
    q, k, v, _ = inputs((nq, 300, 64, 64))
    assert isinstance(cpu.prepare(describe(q, k, v, "causal")[0]), CpuDecode) == (nq < 8)
    exact = lowtri.attention(*(x.double() for x in (q, k, v)), "causal", engine="reference")
    plain, actual = (lowtri.attention(q, k, v, "causal", engine=engine) for engine in ("formula", "cpu"))
    assert (actual - exact).abs().max() <= 2 * (plain - exact).abs().max() + 2**-7


# The instruction set.


def test_amx_is_chosen_where_the_system_grants_it() -> None:
    def name(*arguments: Any) -> str:
        return target.instruction_set(*arguments).name

    assert name(None, AMX | {PERMISSION}, "x86_64") == "amx"
    assert name(None, AMX, "x86_64") == "avx512-bf16"
    assert name("avx512", AMX | {PERMISSION}, "x86_64") == "avx512"
    assert name("amx-emulated", frozenset(), "aarch64") == "amx-emulated"
    with pytest.raises(EngineError, match=r"'amx', which the operating system refuses\. It has: avx512-bf16, "):
        target.instruction_set("amx", AMX, "x86_64")
    with pytest.raises(EngineError, match=r"'amx', which this CPU does not have\."):
        target.instruction_set("amx", AMX - {"amx-bf16"}, "x86_64")


@pytest.mark.x86
@pytest.mark.parametrize(("wanted", "asks"), [(None, True), ("amx", True), ("avx512", False), ("amx-emulated", False)])
def test_tile_data_is_requested_only_if_amx_may_be_used(
    monkeypatch: pytest.MonkeyPatch, wanted: str | None, asks: bool
) -> None:
    monkeypatch.setattr(target, "cpu_features", lambda cpuid, xgetbv: AMX)
    monkeypatch.setenv("LOWTRI_ISA", wanted) if wanted else monkeypatch.delenv("LOWTRI_ISA", raising=False)
    requests = []
    monkeypatch.setattr(target, "_amx_permission", lambda: requests.append(1) or True)
    assert (PERMISSION in target.features()) == asks == bool(requests)
    monkeypatch.setattr(target, "_amx_permission", lambda: False)
    assert target.features() == AMX
    monkeypatch.setattr(target, "cpu_features", lambda cpuid, xgetbv: frozenset({"avx2", "fma"}))
    monkeypatch.setattr(target, "_amx_permission", lambda: pytest.fail("this CPU has no AMX"))
    assert target.features() == {"avx2", "fma"}
