"""Kernels for other systems: what the object files and this machine's library are, by their headers."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import wheels

from lowtri.kernels import library
from lowtri.kernels.spec import KernelSpec, symbol
from lowtri.kernels.target import ISA

OBJECT = """
    import sys
    tools, name, isa, symbol = sys.argv[1:]
    sys.path.insert(0, tools)
    from build_kernels import jobs_of, object_of
    from lowtri.kernels.isa import ALL, Baseline

    job = next(job for one in ALL if one.name == isa for job in jobs_of(one) if job.symbol == symbol)
    sys.stdout.buffer.write(object_of(job, name.split("-")[0], Baseline()))
"""
TOOLS = str(Path(wheels.__file__).parent)
# neon-bf16 also shows that LLVM knows the instructions: without the feature it stops at code for BFMMLA.
KERNELS = {
    "aarch64": ("neon-bf16", "lowtri_multiply_bfloat16_bf16x2_neon_bf16"),
    "x86_64": ("avx2", "lowtri_read_float32_direct_avx2"),
}


def test_this_machines_library_is_of_its_platform_and_exports_its_functions() -> None:
    name = symbol("read", KernelSpec("float32", "direct", ISA))
    platform, names = wheels.exports(Path(library.code(name).file).read_bytes())
    assert platform == library.this_platform() and name in names


def compiled(platform: str) -> bytes:
    """The object file of the function that is compiled for the platform."""
    command = [sys.executable, "-c", textwrap.dedent(OBJECT), TOOLS, platform, *KERNELS[platform.split("-")[1]]]
    done = subprocess.run(command, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout


@pytest.mark.compiler
def test_arm_multiplies_blocks_of_bf16() -> None:
    """Four rows and sixteen columns: 16 blocks, and no dot product of pairs. Source: Arm Architecture Reference Manual."""
    content = compiled("linux-aarch64")
    instructions = np.frombuffer(content[: len(content) // 4 * 4], "<u4") & 0xFFE0FC00  # without the registers
    bfmmla, bfdot = 0x6E40EC00, 0x6E40FC00
    assert (instructions == bfmmla).sum() >= 16 and not (instructions == bfdot).any()


@pytest.mark.sweep
@pytest.mark.compiler
@pytest.mark.parametrize("platform", [*wheels.PLATFORMS, "linux-x86_64"])
def test_object_files_are_of_the_platform_that_they_are_compiled_for(platform: str) -> None:
    assert wheels.exports(compiled(platform)) == (platform, {KERNELS[platform.split("-")[1]][1]})


def test_other_files_are_of_no_platform() -> None:
    with pytest.raises(ValueError, match="neither ELF, Mach-O nor PE"):
        wheels.exports(b"#!/bin/sh\n" + bytes(100))
