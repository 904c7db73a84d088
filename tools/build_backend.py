"""The build backend: setuptools, which needs Numba besides, and a linker where the machine has none. torch is not needed."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

import setuptools

LEAST_SETUPTOOLS = 77  # as in pyproject.toml: older ones cannot read its license
if int(setuptools.__version__.split(".")[0]) < LEAST_SETUPTOOLS:  # without build isolation nobody has checked it
    sys.exit(
        f"lowtri: building needs setuptools {LEAST_SETUPTOOLS} or newer, and {setuptools.__version__} is installed.\n"
        f"Fix: pip install 'setuptools>={LEAST_SETUPTOOLS}', or leave out --no-build-isolation"
    )

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def _compiler() -> list[str]:
    """Numba, and Zig's linker where there is no other or LOWTRI_BUILD names it."""
    has_linker = any(map(shutil.which, ("cc", "gcc", "clang"))) and "zig" not in os.environ.get("LOWTRI_BUILD", "")
    return ["numba>=0.62"] if has_linker else ["numba>=0.62", "ziglang>=0.13"]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_compiler()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_compiler()]
