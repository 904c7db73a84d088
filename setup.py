"""Builds the library of kernels, and gives wheels the tag of its platform; pyproject.toml says everything else."""

import os
import subprocess
import sys

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


class BuildKernels(build_py):
    """Compiles the kernels first, also for an editable installation. LOWTRI_BUILD has options of tools/build_kernels.py."""

    def run(self):
        options = os.environ.get("LOWTRI_BUILD", "").split()
        subprocess.run([sys.executable, os.path.join("tools", "build_kernels.py"), *options], check=True)
        super().run()


class PlatformWheel(bdist_wheel):
    """One wheel for every Python of a platform: the library uses nothing of Python."""

    def get_tag(self):
        platform = super().get_tag()[2]
        if "--linker zig" in os.environ.get("LOWTRI_BUILD", ""):  # which links with glibc 2.17
            platform = platform.replace("linux_x86_64", "manylinux2014_x86_64")
        return "py3", "none", platform


class PlatformDistribution(Distribution):
    """The package has compiled code, so wheels are installed where such packages are."""

    def has_ext_modules(self):
        return True


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel})
