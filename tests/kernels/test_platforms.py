"""Kernels for other systems: what the object files and this machine's library are, by their headers."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import wheels

from lowtri.kernels import library, select
from lowtri.kernels.variants import symbol

OBJECT = """
    import sys
    from lowtri.kernels.compilation import jobs_of, object_of
    from lowtri.kernels.isa import ALL, Baseline

    name, isa, symbol = sys.argv[1:]
    job = next(job for one in ALL if one.name == isa for job in jobs_of(one) if job.symbol == symbol)
    sys.stdout.buffer.write(object_of(job, name.split("-")[0], Baseline()))
"""
# neon-bf16 also shows that LLVM knows the instructions: without the feature it stops at code for BFDOT.
KERNELS = {
    "aarch64": ("neon-bf16", "lowtri_multiply_bfloat16_pairs_neon_bf16"),
    "x86_64": ("avx2", "lowtri_read_float32_direct_avx2"),
}


def test_this_machines_library_is_of_its_platform_and_exports_its_functions() -> None:
    name = symbol("read", select.SPECS["forward", "float32", "direct"])
    platform, names = wheels.exports(Path(library.code(name).file).read_bytes())
    assert platform == library.this_platform() and name in names


@pytest.mark.sweep
@pytest.mark.compiler
@pytest.mark.parametrize("platform", [*wheels.PLATFORMS, "linux-x86_64"])
def test_object_files_are_of_the_platform_that_they_are_compiled_for(platform: str) -> None:
    isa, name = KERNELS[platform.split("-")[1]]
    command = [sys.executable, "-c", textwrap.dedent(OBJECT), platform, isa, name]
    done = subprocess.run(command, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert wheels.exports(done.stdout) == (platform, {name})


def test_other_files_are_of_no_platform() -> None:
    with pytest.raises(ValueError, match="neither ELF, Mach-O nor PE"):
        wheels.exports(b"#!/bin/sh\n" + bytes(100))
