"""Which pairs a table of numbers hides: the kernel and NumPy's passes against the definition, bit for bit."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from subprocesses import printed
from test_contract_by_isa import runs_here

import lowtri
from lowtri.backends.cpu import tables
from lowtri.backends.cpu.tables import write_hidden_bits
from lowtri.dispatch import dense_tables
from lowtri.kernels import library
from lowtri.kernels.isa import ALL

DTYPES = ("float16", "float32", "float64", "bfloat16")
LOWEST = {name: torch.finfo(getattr(torch, name)).min for name in DTYPES}
GUARD = 0xA5  # in the bytes behind each row of bits, which nobody may write


def special_numbers(dtype: str) -> Any:
    """What decides: both zeros, infinities and NaN, denormal numbers, and the neighbours of the lowest one."""
    limits = torch.finfo(getattr(torch, dtype))
    numbers = [0.0, -0.0, math.inf, -math.inf, math.nan, -1.0, 1.0, limits.tiny, -limits.tiny, limits.min, limits.max]
    wide = torch.tensor([*numbers, limits.min * (1 - limits.eps), -65280.0, -65504.0, -65536.0], dtype=torch.float64)
    negative_nan = torch.tensor([math.nan], dtype=torch.float64).copysign(torch.tensor(-1.0))
    # Half of the least normal number is denormal; bf16 has the least one of all, too.
    return torch.cat([wide, negative_nan, torch.tensor([limits.smallest_normal / 2, -limits.smallest_normal / 4])]).to(
        getattr(torch, dtype)
    )


def definition(numbers: Any, greatest_hidden: float) -> tuple[Any, bool]:
    wide = numbers.double().numpy()
    hidden = wide <= greatest_hidden
    return np.packbits(hidden, axis=-1, bitorder="little"), bool((~hidden & (wide != 0)).any())


def written(write: Any, numbers: Any, greatest_hidden: float) -> tuple[Any, Any]:
    batch, rows, keys = numbers.shape
    size = -(-keys // 8)
    memory = np.full((batch, rows, size + 9), GUARD, np.uint8)
    shown = write(numbers, greatest_hidden, memory[..., :size])
    assert (memory[..., size:] == GUARD).all()
    return memory[..., :size], shown


LAYOUTS = {
    "contiguous": lambda x: x,
    "rows of a wider table": lambda x: torch.cat([x, x], 2)[..., : x.shape[2]],
    "every other row": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "batch inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "one row repeated": lambda x: x[:, :1].expand(x.shape),
    "not aligned": lambda x: torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].view(x.shape) if x.numel() else x,
}


@st.composite
def numbers_and_limits(draw: Any) -> tuple[Any, float]:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.integers(0, 3)), draw(st.integers(0, 9)), draw(st.integers(0, 150))
    special = special_numbers(dtype)
    if draw(st.booleans()):  # tables without a bias
        special = special[:4] if draw(st.booleans()) else special[[0, 1, 3]]
    source = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    numbers = special[torch.randint(len(special), shape, generator=source)]
    limit = draw(st.sampled_from([-math.inf, LOWEST[dtype], LOWEST["float16"], LOWEST["bfloat16"]]))
    return LAYOUTS[draw(st.sampled_from([*LAYOUTS]))](numbers), max(
        limit, LOWEST[dtype]
    ) if limit > -math.inf else limit


@given(numbers_and_limits(), st.booleans())
@example((torch.zeros(2, 3, 0), -math.inf), True)
@example(
    (torch.full((1, 1, 65), -65504.0).bfloat16(), -65504.0), False
)  # bf16 has no such number: -65536 hides, -65280 does not
def test_the_kernel_and_numpy_write_the_definition(case: tuple[Any, float], as_array: bool) -> None:
    numbers, limit = case
    expected = definition(numbers, limit)
    is_half = numbers.dtype.itemsize == 2
    if numbers.dtype != torch.bfloat16 and (as_array or not is_half):  # only tensors of half types are read as such
        numbers = numbers.numpy()
    for write in (write_hidden_bits, dense_tables._write_with_numpy):
        bits, shown = written(write, numbers, limit)
        assert np.array_equal(bits, expected[0]) and shown is expected[1]


def test_every_special_number_at_every_place() -> None:
    for dtype in DTYPES:
        for keys in (1, 31, 32, 33, 70):
            for special in special_numbers(dtype):
                numbers = torch.zeros(1, keys, keys, dtype=special.dtype)
                numbers[0].fill_diagonal_(special)
                bits, shown = written(write_hidden_bits, numbers, LOWEST[dtype])
                expected = definition(numbers, LOWEST[dtype])
                assert np.array_equal(bits, expected[0]) and shown is expected[1], (dtype, keys, special)


def test_what_the_kernel_does_not_read() -> None:
    numbers, bits = np.zeros((1, 8, 8), np.float32), np.empty((1, 8, 1), np.uint8)
    assert write_hidden_bits(numbers, -math.inf, bits) is False
    for other in (numbers.transpose(0, 2, 1), numbers.astype(">f4"), numbers.astype(np.longdouble), numbers[..., ::-1]):
        assert write_hidden_bits(other, -math.inf, bits) is None
        read = dense_tables.read_numbers(other[None], 8, 8, always=True)
        assert read is not None and read.mask == lowtri.full()


def test_without_kernels_numpy_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.where(np.tri(200, dtype=bool), 0, -np.inf).astype(np.float32)[None]
    expected = written(write_hidden_bits, numbers, -math.inf)
    monkeypatch.setattr(library, "unusable", lambda: "there are none")
    assert write_hidden_bits(numbers, -math.inf, expected[0]) is None
    found = dense_tables._hidden_bits(numbers[None], -math.inf, False)
    assert found is not None and np.array_equal(found[0][0], expected[0]) and found[1] is expected[1] is False


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_of_a_team_share_the_rows(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_threads", lambda nbytes: threads)
    monkeypatch.setattr(tables, "_BYTES_AT_ONCE", 2**10)
    tables._launch.cache_clear()
    numbers = special_numbers("float32")[torch.randint(18, (3, 100, 333), generator=torch.Generator().manual_seed(0))]
    bits, shown = written(write_hidden_bits, numbers, -math.inf)
    tables._launch.cache_clear()
    assert np.array_equal(bits, definition(numbers, -math.inf)[0]) and shown
    numbers[numbers > -math.inf] = 0
    numbers[2, 99, 332] = 5  # alone, in the last task
    assert written(write_hidden_bits, numbers.nan_to_num(0, neginf=-math.inf), -math.inf)[1]


def test_calls_from_several_threads() -> None:
    source = torch.Generator().manual_seed(0)
    cases = [special_numbers("float32")[torch.randint(18, (1, 70, 90), generator=source)] for _ in range(6)]
    cases += [torch.zeros(1, 70, 90)]
    expected = [definition(x, -math.inf) for x in cases]
    wrong: list[int] = []

    def read(start: int) -> None:
        for i in range(200):
            place = (start + i) % len(cases)
            bits, shown = written(write_hidden_bits, cases[place], -math.inf)
            if not np.array_equal(bits, expected[place][0]) or shown is not expected[place][1]:
                wrong.append(place)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


ON_ANOTHER = """
import numpy as np
from lowtri.backends.cpu.tables import write_hidden_bits

source = np.random.default_rng(0)
for dtype in ("f2", "f4", "f8"):
    lowest = np.finfo(dtype).min
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, -np.nan, lowest, 1, -1, np.finfo(dtype).smallest_subnormal], dtype)
    for count in (4, 10):
        for keys in (1, 63, 64, 200):
            numbers = special[[0, 1, 3, 6] if count == 4 else slice(None)][source.integers(count, size=(2, 9, keys))]
            bits = np.empty((2, 9, -(-keys // 8)), np.uint8)
            shown = write_hidden_bits(numbers, lowest, bits)
            assert np.array_equal(bits, np.packbits(numbers <= lowest, axis=-1, bitorder="little")), (dtype, keys)
            assert shown is (count == 10 or bool((~(numbers <= lowest) & (numbers != 0)).any())), (dtype, keys)
print("the same")
"""


COMPILED = [isa.name for isa in ALL if isa.cpu != "native" and runs_here(isa.name) and library.can_use(isa.name)]


@pytest.mark.parametrize("isa", COMPILED)
def test_every_instruction_set_writes_the_same(isa: str) -> None:
    assert printed("-c", ON_ANOTHER, LOWTRI_ISA=isa) == "the same"
