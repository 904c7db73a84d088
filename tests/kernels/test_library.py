"""The library of compiled kernels: what it may call, that it is refused with a reason, and the features of the CPU."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import build_kernels
import llvmlite.binding as llvm
import pytest
from numba import types
from subprocesses import printed

import lowtri
from lowtri.dispatch.choose import _warn_without_kernels
from lowtri.errors import EngineError
from lowtri.kernels import abi, library, target
from lowtri.kernels.device import RecordType, device_function
from lowtri.kernels.isa import ALL, Amx
from lowtri.kernels.spec import KernelSpec, symbol
from lowtri.kernels.target import arm_features, cpu_features

SPEC = KernelSpec("float32", "direct", target.ISA)
READ = symbol("read", SPEC)  # which every library has

# A library that cannot be used.


@pytest.fixture
def native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the library of an installed package, with a small library in it: not a checkout."""
    file = Path(library.code(READ).file)
    shutil.copy(file, tmp_path / "kernels.so")
    index = {
        "version": lowtri.__version__,
        "platform": library.this_platform(),
        "sources": "0",
        "isas": ["baseline"],
        "library": "kernels.so",
        "bytes": file.stat().st_size,
        "symbols": [READ],
    }
    (tmp_path / "index.json").write_text(json.dumps(index))
    monkeypatch.setattr(library, "_NATIVE", tmp_path)
    monkeypatch.setattr(library, "_BUILDER", tmp_path / "absent")
    for cached in (library.index, library.code, library.sources_hash):
        cached.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    for cached in (library.index, library.code, library.sources_hash):
        cached.cache_clear()


def change(folder: Path, **fields: Any) -> None:
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | fields))


def test_a_library_is_used_without_its_sources_being_looked_at(native: Path) -> None:
    assert library.unusable() is None and library.built() == {"baseline"}
    assert not library.can_use("avx2")


@pytest.mark.x86
def test_a_library_asks_the_cpu_for_its_features(native: Path) -> None:
    assert library.cpuid(0, 0)[0] > 0


def truncate(folder: Path) -> None:
    (folder / "kernels.so").write_bytes((folder / "kernels.so").read_bytes()[:5000])


def damage(folder: Path) -> None:
    (folder / "kernels.so").write_bytes(b"\0" * json.loads((folder / "index.json").read_text())["bytes"])


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda folder: (folder / "index.json").unlink(), "lowtri was installed without its compiled kernels"),
        (lambda folder: (folder / "index.json").write_text("{"), "lowtri was installed without its compiled kernels"),
        (lambda folder: (folder / "kernels.so").unlink(), "lowtri was installed without its compiled kernels"),
        (lambda folder: change(folder, version="0.0.1"), "the compiled kernels are those of lowtri 0.0.1, not of "),
        (
            lambda folder: change(folder, platform="macos-aarch64"),
            "the compiled kernels are for macos-aarch64, and this",
        ),
        (truncate, "the file of the compiled kernels has 5000 bytes instead of "),
        (damage, "the compiled kernels cannot be loaded: "),
    ],
)
def test_a_library_that_cannot_be_used_says_why_and_torch_runs(native: Path, harm: Any, reason: str) -> None:
    harm(native)
    words = library.unusable()
    assert (
        words is not None
        and words.startswith(reason)
        and words.endswith("Fix: pip install --force-reinstall --no-deps . in the checkout of lowtri")
    )
    import torch

    q = torch.randn(1, 2, 600, 32)
    _warn_without_kernels.cache_clear()
    sentence = (
        f"lowtri: there are no kernels, attention runs on torch's own or on the formula, correct and slower: {words}."
    )
    with pytest.warns(UserWarning, match=re.escape(sentence)):
        choice = lowtri.which_engine(q, q, q, "causal")
    lowtri.attention(q, q, q, "window(8)")  # warned of once: a second warning would be an error
    assert choice.engine == "sdpa" and choice.answers["cpu"] == f"no: {words}"
    with pytest.raises(EngineError, match="Fix: pip install --force-reinstall"):
        library.code(READ)


def test_a_kernel_that_was_not_built_is_named(native: Path) -> None:
    with pytest.raises(EngineError, match="the kernel lowtri_forward_x is missing: the library was built without it"):
        library.code("lowtri_forward_x")


@pytest.mark.compiler
def test_a_stale_library_of_a_checkout_is_not_used(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (native / "build.py").write_text("")
    monkeypatch.setattr(library, "_BUILDER", native / "build.py")
    assert library.index() == {"reason": "the kernels' sources have changed since they were compiled"}
    assert library.unusable() is None and library.can_use("avx2"), "Numba is installed: kernels are compiled"
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    assert str(library.unusable()).endswith("Fix: make, or pip install numba")
    library.index.cache_clear()
    change(native, sources=library.sources_hash())
    assert library.unusable() is None and library.built() == {"baseline"}


# What kernels may do.


def undefined(file: bytes) -> set[str]:
    """The symbols that a shared library of 64-bit Linux takes from others (ELF: the section of type 11 and its names)."""
    begin, size, count = struct.unpack_from("<40xQ10x2H", file)
    sections = [struct.unpack_from("<4xI16x2QI", file, begin + size * n) for n in range(count)]
    _, at, length, linked = next(section for section in sections if section[0] == 11)
    names = sections[linked][1]
    entries = [struct.unpack_from("<I2xH", file, at + n) for n in range(24, length, 24)]  # the first one is empty
    return {file[names + name : file.index(0, names + name)].decode() for name, section in entries if section == 0}


@pytest.mark.skipif(sys.platform != "linux", reason="reads the file format of Linux")
def test_compiled_kernels_need_the_c_library_only() -> None:
    """Of the functions outside of the file, by its symbols. Those that start with two underscores are the loader's own."""
    allowed = build_kernels.C_LIBRARY | {"rintf"}  # LLVM calls it on the baseline, which has no instruction that rounds
    for spec in (SPEC, KernelSpec("bfloat16", "widened", target.ISA)):
        names = undefined(Path(library.code(symbol("forward", spec)).file).read_bytes())
        assert names & {"logf", "memset"}
        assert {name for name in names if not name.startswith(("_ITM_", "__"))} <= allowed


@device_function
def unchecked(values, index):
    return values[index]


def raising(call: Any) -> None:
    unchecked((call.nq, call.nk), call.head_dim)


@pytest.mark.compiler
def test_a_function_that_can_raise_is_not_built() -> None:
    record = RecordType(abi.FORWARD.dtype, SPEC)
    with pytest.raises(RuntimeError, match=r"lowtri_raising.* can raise an exception: status "):
        build_kernels.object_file(raising, types.void(record), "lowtri_raising")


def calling(call: Any) -> None:
    print(call.nq)


@pytest.mark.compiler
def test_a_function_that_calls_python_is_not_built() -> None:
    record = RecordType(abi.FORWARD.dtype, SPEC)
    with pytest.raises(RuntimeError, match=r"lowtri_calling calls numba_gil"):
        build_kernels.object_file(calling, types.void(record), "lowtri_calling")


SURFACE = """
    import sys
    import numpy as np, torch, lowtri
    from lowtri.cli.main import main
    from lowtri.nn import Decoder, DecoderConfig

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        q, k, v = (torch.randn(1, 2, 70, 32).to(dtype).requires_grad_() for _ in range(3))
        lowtri.attention(q, k, v, "causal & window(9)", engine="cpu").sum().backward()
        lowtri.attention(q[:, :, -1:].detach(), k.detach(), v.detach(), "causal", engine="cpu")
    x = np.ones((2, 5, 8), np.float32)
    lowtri.attention(x, x, x, "causal")
    cache = lowtri.KVCache(lowtri.causal() & lowtri.window(4))
    lowtri.attention(q, *cache.append(k, v)[:2], "causal")
    model = Decoder(DecoderConfig(vocab_size=11, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    list(lowtri.generate(model, [1, 2, 3], max_new_tokens=3))
    model(torch.tensor([[1, 2, 3, 4]])).logsumexp(-1).sum().backward()
    lowtri.audit(model, torch.randint(0, 11, (1, 9)))
    lowtri.explain(tuple(np.ones((3, 3, 4), np.float32)), mask="causal")
    main(["doctor", "--no-measure"])
    print({"numba", "llvmlite"} & set(sys.modules))
"""


def test_nothing_that_runs_imports_a_compiler() -> None:
    assert printed("-c", SURFACE).splitlines()[-1] == "set()"


def test_progress_is_shown_where_pip_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTRI_PROGRESS", str(tmp_path / "terminal"))
    build_kernels.progress("[ 1/34] one")
    build_kernels.progress("[ 2/34] two")
    assert (tmp_path / "terminal").read_text() == "[ 1/34] one\n[ 2/34] two\n"
    monkeypatch.setenv("LOWTRI_PROGRESS", str(tmp_path / "absent" / "terminal"))
    build_kernels.progress("[ 3/34] a terminal that is gone stops nothing")


# The features of the CPU.


@pytest.mark.x86
def test_the_features_are_those_that_llvm_sees() -> None:
    known = frozenset().union(*(isa.features for isa in ALL)) - {"amx-permission"}
    seen = frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)
    assert cpu_features(library.cpuid, library.xgetbv) & known == seen & known


def registers(leaf: int, subleaf: int) -> tuple[int, ...]:
    """A CPU with every feature."""
    return {(0, 0): (7, 0, 0, 0), (0x80000000, 0): (0x80000001, 0, 0, 0), (7, 0): (1, *[2**32 - 1] * 3)}.get(
        (leaf, subleaf), (2**32 - 1,) * 4
    )


@pytest.mark.parametrize(
    ("saved", "best"), [(0x600E7, "amx"), (0xE7, "avx512-bf16"), (0x7, "avx2"), (0x3, "baseline"), (0, "baseline")]
)
def test_registers_that_the_system_does_not_save_are_not_used(saved: int, best: str) -> None:
    has = cpu_features(registers, lambda: saved)
    has |= {"amx-permission"} if Amx.features - {"amx-permission"} <= has else set()
    assert target.instruction_set(None, has, "x86_64").name == best


@pytest.mark.x86
def test_the_vendor_is_a_name() -> None:
    intel = {0: (0x20, 0x756E6547, 0x6C65746E, 0x49656E69)}
    assert target.cpu_vendor(lambda leaf, subleaf: intel[leaf]) == "GenuineIntel"
    amd = {0: (0x10, 0x68747541, 0x444D4163, 0x69746E65)}
    assert target.cpu_vendor(lambda leaf, subleaf: amd[leaf]) == "AuthenticAMD"
    assert re.fullmatch(r"[A-Za-z ]{12}", target.vendor())


def test_an_old_cpu_is_not_asked_for_leaves_that_it_lacks() -> None:
    def old(leaf: int, subleaf: int) -> tuple[int, ...]:
        assert leaf in (0, 1, 0x80000000)
        return {0: (1, 0, 0, 0), 1: (0, 0, 1, 0)}.get(leaf, (0, 0, 0, 0))  # SSE3, and no XGETBV

    assert cpu_features(old, lambda: pytest.fail("there is no XGETBV")) == {"sse3"}


class CLibrary:
    """What ARM systems answer: Linux by bits of the auxiliary vector, macOS by names."""

    def __init__(self, bits: int = 0, names: tuple[str, ...] = ()) -> None:
        def getauxval(kind: int) -> int:
            assert kind == 26
            return bits

        def sysctlbyname(name: bytes, value: Any, size: Any, new: None, length: Any) -> int:
            ctypes.memmove(value, (1).to_bytes(4, "little"), 4)
            size._obj.value = 4
            return 0 if name.decode() in names else -1

        self.getauxval, self.sysctlbyname = getauxval, sysctlbyname


@pytest.mark.parametrize(
    ("system", "answers", "best"),
    [
        ("linux", CLibrary(bits=1 << 14), "neon-bf16"),
        ("linux", CLibrary(bits=~(1 << 14)), "neon"),
        ("darwin", CLibrary(names=("hw.optional.arm.FEAT_BF16",)), "neon-bf16"),
        ("darwin", CLibrary(), "neon"),
        ("win32", None, "neon"),
    ],
)
def test_arm_systems_say_whether_there_are_bf16_instructions(system: str, answers: Any, best: str) -> None:
    has = arm_features(system, answers)
    assert target.instruction_set(None, has, "arm64").name == best
    assert target.instruction_set(None, has, "arm64", lambda name: name == "neon").name == "neon", "an older library"
