"""Builds the library of kernels, and gives wheels the tag of its platform; pyproject.toml says everything else."""

import os
import subprocess
import sys

from setuptools import setup
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

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel})
