"""Runs the tests that depend on other libraries with the newest releases that exist: torch (its CPU build), transformers and NumPy,
on the newest Python found. The output says which versions ran, and which could not be had and why.

    python tools/newest.py .venv-newest            # make test-newest
    PYTHON_NEWEST=/usr/bin/python3.X               this Python and no other
    TORCH_NEWEST=torch==...                        this torch, whatever it brings (on Linux, PyPI's brings CUDA: gigabytes)

It is run by a Python in which lowtri is installed from this checkout, with its compiled kernels, which depend on no Python.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/compat", "tests/integrations", "tests/generation", "tests/auditing")
TIME_LIMIT = 600  # seconds, for the tests
RELEASES = 3  # of torch that are looked at for a CPU build: the last of each minor version, the newest first
EXTRAS = {"test", "torch", "cli", "transformers", "plot", "compile", "translate"}
PLAIN = re.compile(r"^\d+(\.\d+)*$")


def run(*command: str | Path) -> str | None:
    """What a command prints; None if it fails."""
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def version_key(version: str) -> tuple[int, ...]:
    """Numbers that sort releases.

    >>> sorted(["2.9.1", "2.13.0"], key=version_key)
    ['2.9.1', '2.13.0']
    """
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0]))


def pythons() -> list[str]:
    """Each Python from 3.10 on that is found, the newest first."""
    if named := os.environ.get("PYTHON_NEWEST"):
        return [named]
    found = [shutil.which(f"python3.{minor}") for minor in range(30, 9, -1)]
    installed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found += [str(path) for path in installed.glob("3.*/bin/python")]
    found.append(sys.executable)
    by_version: dict[tuple[int, ...], str] = {}
    for path in (path for path in found if path):
        version = run(path, "-c", "import platform, venv, ensurepip; print(platform.python_version())")
        key = version_key(version) if version and PLAIN.match(version.strip()) else ()
        if key >= (3, 10) and key[:2] not in {other[:2] for other in by_version}:
            by_version[key] = path
    return [by_version[key] for key in sorted(by_version, reverse=True)]


def releases(python: Path, package: str) -> list[str]:
    """The releases of a package in the configured index for this Python, the newest first."""
    printed = run(python, "-m", "pip", "index", "versions", package) or ""
    listed = re.search(r"Available versions: (.*)", printed)
    return [] if listed is None else [x for x in listed[1].split(", ") if PLAIN.match(x.split("+")[0])]


def brings_accelerator(found: dict[str, Any]) -> bool:
    """Whether a distribution of torch, as pip's report has it, is a build for an accelerator on this machine.

    >>> brings_accelerator({"version": "2.13.0+cpu", "requires_dist": []})
    False
    >>> brings_accelerator({"version": "2.15.0", "requires_dist": ['nvidia-nccl-cu13==2.30; platform_system == "Linux"']})
    True
    """
    local = found["version"].partition("+")[2]
    if local:
        return bool(local != "cpu")
    if platform.system() != "Linux":
        return False
    needed = [x for x in found.get("requires_dist", []) if re.match(r"(nvidia|cuda|triton|pytorch-triton)", x)]
    other_machine = f'platform_machine == "{"x86_64" if platform.machine() != "x86_64" else "aarch64"}"'
    return any(other_machine not in requirement for requirement in needed)


def cpu_torch(python: Path) -> tuple[str | None, str]:
    """The newest torch whose CPU build pip would install into this Python, and why no newer one."""
    reasons: list[str] = []
    last = {version_key(release)[:2]: release for release in reversed(releases(python, "torch"))}
    for release in sorted(last.values(), key=version_key, reverse=True)[:RELEASES]:
        options = ("--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-")
        report = run(python, "-m", "pip", "install", *options, f"torch=={release}")
        if report is None:
            reasons.append(f"{release} is excluded by pip's configuration, or has no file for this machine")
            continue
        found = json.loads(report)["install"][0]["metadata"]
        if not brings_accelerator(found):
            return f"torch=={found['version']}", "; ".join(reasons)
        reasons.append(f"{release} has only a build for an accelerator in the configured index")
    return None, "; ".join(reasons) or "the configured index has none for this Python"


def make_venv(venv: Path) -> tuple[Path, str, list[str]]:
    """An environment with the newest Python that has a CPU build of torch: its Python, the torch, and what could not be had."""
    missed: list[str] = []
    for path in pythons():
        shutil.rmtree(venv, ignore_errors=True)
        if run(path, "-m", "venv", venv) is None:
            missed.append(f"{path}: it makes no environment")
            continue
        python = venv / ("Scripts/python.exe" if platform.system() == "Windows" else "bin/python")
        named = os.environ.get("TORCH_NEWEST")
        torch, reason = (named, "") if named else cpu_torch(python)
        version = (run(python, "-c", "import platform; print(platform.python_version())") or "").strip()
        if reason:
            missed.append(f"torch on Python {version}: {reason}")
        if torch:
            return python, torch, missed
    sys.exit("\n".join(["no CPU build of torch can be had:", *missed, "Fix: TORCH_NEWEST=torch==... takes any build."]))


def requirements() -> list[str]:
    """What the tests need besides torch, by the extras of lowtri, without upper bounds of our own."""
    found: list[str] = []
    for requirement in metadata.requires("lowtri") or []:
        extra = re.search(r'extra == "([\w-]+)"', requirement)
        named = requirement.split(";")[0].strip()
        if (extra is None or extra[1] in EXTRAS) and not re.match(r"(lowtri|torch)\b", named):
            found.append(named)
    return found


def link_checkout(python: Path) -> None:
    """Let the environment find this checkout as an editable installation, as the environment that runs this file does."""
    folder = Path((run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])") or "").strip())
    (folder / "lowtri_checkout.pth").write_text(f"{ROOT / 'src'}\n", encoding="utf-8")
    described = metadata.distribution("lowtri")
    target = folder / f"lowtri-{described.version}.dist-info"
    target.mkdir(exist_ok=True)
    for name in ("METADATA", "entry_points.txt"):
        (target / name).write_text(described.read_text(name) or "", encoding="utf-8")


def main() -> None:
    venv = Path(sys.argv[1]).absolute()
    python, torch, missed = make_venv(venv)
    packages = [torch, "transformers", "numpy", *requirements()]
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--upgrade", *packages], check=True)
    link_checkout(python)
    shown = (
        "import platform; from importlib.metadata import version as v; print(platform.python_version(), *map(v, {!r}))"
    )
    names = ("torch", "transformers", "numpy")
    numbers = (run(python, "-c", shown.format(names)) or "").split()
    for name, number in zip(names, numbers[1:], strict=True):
        newest = releases(python, name)
        if name != "torch" and newest and version_key(newest[0]) > version_key(number):
            missed.append(f"{name} {newest[0]}: another package does not allow it")
    words = ", ".join(f"{name} {number}" for name, number in zip(("Python", *names), numbers, strict=True))
    report = [f"test-newest ran: {words}", *(f"test-newest could not have {line}" for line in missed)]
    print(*report, sep="\n", flush=True)
    command = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-m", "not sweep", *TESTS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        status = subprocess.run(command, cwd=ROOT, env=environment, timeout=TIME_LIMIT, check=False).returncode
    except subprocess.TimeoutExpired:
        sys.exit(f"test-newest: the tests take more than {TIME_LIMIT} seconds")
    print(*report, sep="\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
