"""Builds the library of kernels, and gives wheels the tag of its platform; pyproject.toml says everything else."""

import os
import shutil
import subprocess
import sys

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


class BuildKernels(build_py):
    """Compiles the kernels first, also for an editable installation. LOWTRI_BUILD has options of tools/build_kernels.py."""

    def run(self):
        self._empty_build_lib()
        options = os.environ.get("LOWTRI_BUILD", "").split()
        subprocess.run([sys.executable, os.path.join("tools", "build_kernels.py"), *options], check=True)
        super().run()

    def _empty_build_lib(self):
        """Remove what an earlier build left: setuptools would install it, modules included that exist no longer."""
        base, folder = (os.path.realpath(x) for x in (self.get_finalized_command("build").build_base, self.build_lib))
        if not self.editable_mode and os.path.isdir(folder) and folder.startswith(base + os.sep):
            shutil.rmtree(folder)


# The wheels' tags: zig links with glibc 2.17, and for macOS 11.
TAGS = {
    "linux-x86_64": "manylinux2014_x86_64",
    "linux-aarch64": "manylinux2014_aarch64",
    "macos-aarch64": "macosx_11_0_arm64",
    "windows-x86_64": "win_amd64",
}


class PlatformWheel(bdist_wheel):
    """One wheel for every Python of a platform: the library uses nothing of Python."""

    def get_tag(self):
        platform, options = super().get_tag()[2], os.environ.get("LOWTRI_BUILD", "").split()
        if "--platform" in options:
            platform = TAGS[options[options.index("--platform") + 1]]
        elif "zig" in options:
            platform = platform.replace("linux_x86_64", TAGS["linux-x86_64"])
        return "py3", "none", platform


class PlatformDistribution(Distribution):
    """The package has compiled code, so wheels are installed where such packages are."""

    def has_ext_modules(self):
        return True


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel})
