#!/usr/bin/env python
"""Runs lowtri's tests on 64-bit ARM: under qemu-user on an x86-64 Linux, or as they are on an ARM machine.

    python tools/arm.py                           a sample of the tests, on code for three CPUs; what has passed is not repeated
    python tools/arm.py --quick                   of every test at most two cases, of every property three examples
    python tools/arm.py --whole                   all of them, for hours
    python tools/arm.py --cpus neoverse-v1 --jobs contract,kernels
    python tools/arm.py --python neoverse-v1 -- -c 'import lowtri; print(lowtri)'

On x86-64 it makes what it needs in a folder (build/arm, or --root), as an ordinary user: Python 3.11 and its libraries from Debian's
packages for arm64, a qemu that knows these CPUs, and wheels for aarch64. Nothing is installed on this machine and nothing is mounted:
qemu looks up files in the unpacked packages first (its option -L), and the interpreter that tests see is a script that starts qemu, so
that processes which tests start are emulated, too. Kernels are compiled here, by tools/build_kernels.py; no compiler is emulated.

The emulator runs on x86, whose memory order is stronger than ARM's: a missing barrier would not show. Times are those of an emulator.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "tools" / "arm_requirements.txt"
MIRROR = os.environ.get("DEBIAN_MIRROR", "https://deb.debian.org/debian")
PYTHON = "python3.11"  # of Debian 12
PACKAGES = (PYTHON, "libgomp1", "libstdc++6", "libatomic1")
QEMU = 8  # the first version with neoverse-v1
PLATFORMS = ("manylinux_2_34", "manylinux_2_31", "manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")


STOP = threading.Event()


class Cpu(NamedTuple):
    """A CPU that kernels are compiled for, and the one that is emulated."""

    name: str  # by LLVM
    emulated: str  # by qemu
    library: tuple[str, ...]  # options of tools/build_kernels.py
    isa: str  # the instruction set that lowtri must choose
    jobs: tuple[str, ...] = ()  # those that run its code; all if empty


# torch's wheel needs the atomic instructions of ARMv8.1, which cortex-a72 lacks: its code runs on a CPU that has them. The last library
# is that of the wheels, whose code runs on every 64-bit ARM and chooses among the instruction sets.
# The first two have the same instructions and differ in their order: on them run the jobs that compute with kernels.
KERNELS = ("contract", "kernels", "decoder")
AMOUNTS = ("quick", "a sample", "whole")  # of the cases of each test, from few to all
CPUS = (
    Cpu("cortex-a72", "neoverse-n1", ("--isas", "neon", "--cpu", "cortex-a72"), "neon", KERNELS),
    Cpu("neoverse-n1", "neoverse-n1", ("--isas", "neon", "--cpu", "neoverse-n1"), "neon", KERNELS),
    Cpu("neoverse-v1", "neoverse-v1", ("--isas", "neon,neon-bf16"), "neon-bf16"),
)

DECODER = """
import torch, lowtri
from lowtri.nn import Decoder, DecoderConfig
torch.manual_seed(0)
model = Decoder(DecoderConfig(13, 64, num_hidden_layers=1, num_key_value_heads=2, mask="causal & window(16)"))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for step in range(40):
    ids = (torch.arange(33) + torch.randint(13, (8, 1))) % 13
    loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward(), optimizer.step(), optimizer.zero_grad()
continued = list(lowtri.generate(model, [3, 4, 5], 12))
assert continued == [(6 + i) % 13 for i in range(12)], (float(loss), continued)
print(f"trained to a loss of {loss:.3f}, and continues its sequence")
"""
AUDIT = """
import torch
from lowtri.nn import Decoder, DecoderConfig
def make_model():
    torch.manual_seed(0)
    return Decoder(DecoderConfig(11, 16, num_hidden_layers=1, num_attention_heads=1, mask="causal & window(4)"))
MASK = "causal & window(4)"
"""


PROCESSES = ("tests/kernels/test_kernels_robust.py", "tests/kernels/test_library.py")


class Job(NamedTuple):
    """A part of the tests: arguments of pytest; or of the interpreter, and what it must print."""

    name: str
    pytest: tuple[str, ...] = ()
    python: tuple[str, ...] = ()
    expected: str = ""
    limit: int = 1800  # seconds


# The longest first: each runs on one core, and none is left running alone at the end.
JOBS = (
    Job("dispatch", ("tests/dispatch",)),
    Job("generation", ("tests/generation",)),
    Job("contract", ("tests/kernels/contract_cases.py",)),
    Job("kernels", ("tests/kernels", *(f"--ignore={name}" for name in PROCESSES))),
    Job("processes", PROCESSES),  # interrupts, workers, imports: what surrounds kernels, the same on all CPUs
    Job("masks", ("tests/masks",)),
    Job("ops", ("tests/ops",)),
    Job("backends", ("tests/backends",)),
    Job("plain", ("tests/test_plain.py", "src/lowtri/plain.py")),
    Job("decoder", python=("-c", DECODER), expected="continues its sequence"),
    Job("doctor", python=("-m", "lowtri", "doctor", "--no-measure"), expected="kernels for "),
    Job("audit", python=("-m", "lowtri", "audit", "audited.py:make_model", "--length", "12"), expected="no leak"),
)


def fail(text: str) -> None:
    sys.exit(f"arm: {text}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# Debian's packages -----------------------------------------------------------------------------------------------------------------


def download(address: str) -> bytes:
    """The bytes at an address."""
    try:
        with urllib.request.urlopen(address, timeout=120) as answer:
            return bytes(answer.read())
    except OSError as error:
        fail(f"{address} cannot be read: {error}. Fix: DEBIAN_MIRROR names another mirror of Debian.")
    raise AssertionError


@cache
def packages(suite: str, architecture: str) -> dict[str, dict[str, str]]:
    """The fields of every package of a suite, by its name."""
    text = lzma.decompress(download(f"{MIRROR}/dists/{suite}/main/binary-{architecture}/Packages.xz")).decode()
    entries = (dict(re.findall(r"^([\w-]+): (.*)$", entry, re.M)) for entry in text.split("\n\n") if entry.strip())
    return {entry["Package"]: entry for entry in entries}


def with_dependencies(names: Iterable[str], known: dict[str, dict[str, str]]) -> list[str]:
    """The packages, and those that they depend on; the first of alternatives."""
    pending = list(names)
    chosen = []
    while pending:
        name = pending.pop()
        if name in chosen or name not in known:  # a name that several packages provide: none that libraries need
            continue
        chosen.append(name)
        fields = known[name].get("Depends", "") + "," + known[name].get("Pre-Depends", "")
        pending += [re.split(r"[ :(|]", one.strip())[0] for one in fields.split(",") if one.strip()]
    return sorted(chosen)


def unpack(name: str, suite: str, architecture: str, target: Path) -> None:
    """Download a package, check its hash, and unpack its files; its scripts do not run."""
    entry = packages(suite, architecture)[name]
    archive = download(f"{MIRROR}/{entry['Filename']}")
    if hashlib.sha256(archive).hexdigest() != entry["SHA256"]:
        fail(f"the package {name} is not the one that its index names. Fix: run it again.")
    offset = 8  # an ar archive: members with a header of 60 bytes, at even offsets
    while offset < len(archive):
        member = archive[offset : offset + 16].decode().strip(" /")
        size = int(archive[offset + 48 : offset + 58])
        if member.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(archive[offset + 60 : offset + 60 + size])) as files:
                for file in files:
                    # Else the link would lead into this machine's files.
                    if file.issym() and file.linkname.startswith("/"):
                        folder = Path("/", file.name).parent
                        file.linkname = os.path.relpath(file.linkname, folder)
                    files.extract(file, target, filter="tar")
        offset += 60 + size + size % 2


def system(root: Path) -> None:
    """Debian's packages for arm64, unpacked into ``root``/system."""
    stamp = root / "system" / "unpacked"
    if stamp.exists():
        return
    names = with_dependencies(PACKAGES, packages("bookworm", "arm64"))
    skipped = {"debconf", "dpkg", "perl-base", "tar", "media-types", "tzdata"}
    names = [name for name in names if name not in skipped]
    for number, name in enumerate(names, 1):
        say(f"[{number:2}/{len(names)}] {name}")
        unpack(name, "bookworm", "arm64", root / "system")
    stamp.write_text("\n".join(names) + "\n")


def qemu(root: Path) -> Path:
    """This machine's qemu-aarch64, or that of Debian 13 if it has none or an old one."""
    for name in ("qemu-aarch64", "qemu-aarch64-static"):
        path = shutil.which(name)
        said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout if path else ""
        version = re.search(r"version (\d+)", said)
        if path and version and int(version[1]) >= QEMU:
            return Path(path)
    program = root / "qemu" / "usr" / "bin" / "qemu-aarch64"
    if not program.exists():
        say("qemu-user, of Debian 13")
        unpack("qemu-user", "trixie", "amd64", root / "qemu")
    return program


def wheels(root: Path) -> Path:
    """The packages of tools/arm_requirements.txt, unpacked by this machine's pip."""
    target = root / "packages"
    wanted = REQUIREMENTS.read_text()
    stamp = target / "installed.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        say("wheels for aarch64, some 200 MB: a minute or two")
        shutil.rmtree(target, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:", "--target", target]
        command += [
            "--python-version",
            "3.11",
            "--implementation",
            "cp",
            "--abi",
            "cp311",
            "--abi",
            "abi3",
            "--abi",
            "none",
        ]
        command += [word for name in PLATFORMS for word in ("--platform", f"{name}_aarch64")]
        if subprocess.run([*map(str, command), "-r", str(REQUIREMENTS)]).returncode:
            fail("pip could not install the wheels for aarch64; it says why above.")
        stamp.write_text(wanted)
    return target


def interpreter(folder: Path, cpu: Cpu, root: Path) -> Path:
    """A Python environment, whose interpreter is a script that starts qemu with the CPU."""
    base = root / "system" / "usr" / "bin"
    program = folder / "bin" / "python"
    for path in (program.parent, folder / "lib" / PYTHON / "site-packages"):
        path.mkdir(parents=True, exist_ok=True)
    (folder / "pyvenv.cfg").write_text(f"home = {base}\ninclude-system-site-packages = false\n")
    program.write_text(
        "#!/bin/sh\n"
        f'export QEMU_CPU="${{QEMU_CPU:-{cpu.emulated}}}"\n'
        f'exec "{qemu(root)}" -L "{root / "system"}" -0 "{program}" "{base / PYTHON}" "$@"\n'
    )
    program.chmod(0o755)
    (folder / "lib" / PYTHON / "site-packages" / "packages.pth").write_text(f"{wheels(root)}\n")
    return program


# Running ---------------------------------------------------------------------------------------------------------------------------


def sources() -> list[str]:
    """The files of the checkout that git tracks or would."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    return sorted(name for name in set(listed) if name and (ROOT / name).is_file())


def copy_sources(target: Path) -> str:
    """A copy of the checkout, which has kernels of its own; returns a hash of it."""
    digest = hashlib.sha256()
    names = sources()
    for name in names:
        content = (ROOT / name).read_bytes()
        if name.startswith(("src/", "tests/", "conftest.py", "pyproject.toml")):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        copy = target / name
        if not copy.exists() or copy.read_bytes() != content:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)
    for copy in [path for path in target.rglob("*.py") if path.is_file()]:
        if copy.relative_to(target).as_posix() not in names:
            copy.unlink()
    (target / "audited.py").write_text(AUDIT)
    return digest.hexdigest()[:16]


class Machine(NamedTuple):
    """Where jobs run."""

    python: list[str]  # the interpreter's command
    folder: Path
    environment: dict[str, str]
    digest: str  # of the sources; empty where none are copied


def prepare(cpu: Cpu, root: Path) -> Machine:
    """A CPU that is emulated."""
    folder = root / cpu.name
    checkout = folder / "checkout"
    checkout.mkdir(parents=True, exist_ok=True)
    digest = copy_sources(checkout)
    native = checkout / "src" / "lowtri" / "kernels" / "native"
    build = [
        sys.executable,
        str(ROOT / "tools" / "build_kernels.py"),
        "--platform",
        "linux-aarch64",
        "--linker",
        "zig",
        *cpu.library,
    ]
    if subprocess.run([*build, "--out", str(native)]).returncode:
        fail(f"the kernels for {cpu.name} could not be built; the compiler says why above.")
    environment = {name: os.environ[name] for name in ("HOME", "PATH", "TMPDIR", "QEMU_CPU") if name in os.environ}
    environment |= {
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "LOWTRI_BUILDS": "1",
        "PYTHONPATH": "src:tests:tests/support:tools",
        "TEST_SLOWNESS": "20",
    }
    return Machine([str(interpreter(folder, cpu, root))], checkout, environment, digest)


def native_machine() -> Machine:
    """This machine itself."""
    return Machine([sys.executable], ROOT, {**os.environ, "OMP_NUM_THREADS": "1"}, "")


WHEEL = """
import sys, numpy, torch, lowtri
from lowtri.kernels import library, target
assert "reason" not in library.index(), library.index()
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    q, k, v = (torch.randn(1, 2, 70, 64).to(dtype).requires_grad_() for _ in range(3))
    ours, plain = (lowtri.attention(q, k, v, "causal & window(9)", engine=engine) for engine in ("cpu", "formula"))
    assert (ours - plain).abs().max() <= 8 * torch.finfo(dtype).eps, dtype
    ours.sum().backward()
    assert q.grad.isfinite().all()
assert not {"numba", "llvmlite"} & set(sys.modules)
print("the wheel computes with", target.ISA.name, "from", lowtri.__file__)
"""


def use_wheel(wheel: Path, root: Path) -> None:
    """Install a wheel into an environment of its own, outside of the checkout, and use it."""
    folder = root / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    python = str(interpreter(folder, CPUS[-1], root))
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:", "--no-compile"]
    command += ["--python-version", "3.11", "--platform", "manylinux2014_aarch64", str(wheel.resolve())]
    done = subprocess.run([*command, "--target", str(folder / "lib" / PYTHON / "site-packages")])
    environment = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ} | {"OMP_NUM_THREADS": "1"}
    for arguments in (("-c", WHEEL), ("-m", "lowtri", "doctor", "--no-measure")):
        done = done if done.returncode else subprocess.run([python, *arguments], cwd=folder, env=environment)
    if done.returncode:
        fail(f"{wheel.name} cannot be used on aarch64; the reason is above.")


def run_job(job: Job, machine: Machine, log: Path, sample: tuple[str, ...]) -> dict[str, Any]:
    """Run a job; its output goes to a file, and a line about it to stderr every 20 seconds. ``sample``: options that select cases."""
    start = time.monotonic()
    results = log.with_suffix(".xml")
    results.unlink(missing_ok=True)
    command = [*machine.python, *job.python]
    if job.pytest:
        # A test that takes minutes prints the stack of every thread: it may hang.
        command += ["-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "faulthandler_timeout=600"]
        command += [
            "-m",
            "not sweep and not x86 and not compiler and not not_emulated",
            f"--junitxml={results}",
            *job.pytest,
        ]
        command += ["-p", "sampled", *sample] if sample else []
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=machine.folder,
            env=machine.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended: tuple[int, int, Any] = (0, 0, None)
        told = start
        try:
            while not ended[0] and time.monotonic() - start < job.limit and not STOP.is_set():
                time.sleep(0.5)
                ended = os.wait4(process.pid, os.WNOHANG)
                if time.monotonic() - told > 20:
                    told = time.monotonic()
                    said = log.read_text(errors="replace").splitlines()
                    done = sum(bool(re.search(r" (PASSED|FAILED|ERROR) ", line)) for line in said)
                    say(f"{job.name}, {told - start:.0f} s: {done} tests; {said[-1][:100] if said else ''}")
        finally:
            stopped = not ended[0]
            if stopped:  # with the processes that it has started
                os.killpg(process.pid, signal.SIGKILL)
                ended = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(ended[1])
    said = log.read_text(errors="replace")
    passed, failed = (len(re.findall(rf" {words} ", said)) for words in ("PASSED", "(?:FAILED|ERROR)"))
    if not job.pytest:
        passed = int(process.returncode == 0 and job.expected in said)
        failed = 1 - passed
    elif results.exists():
        suite = next(ET.parse(results).iter("testsuite"))
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        passed = int(suite.get("tests", 0)) - failed - int(suite.get("skipped", 0))
    left_out = re.search(r"(\d+) deselected", said)
    return {
        "good": process.returncode == 0 and passed > 0 and not failed,
        "passed": passed,
        "failed": failed,
        "left_out": int(left_out[1]) if left_out else 0,
        "seconds": round(ended[2].ru_utime + ended[2].ru_stime),  # of CPU time: other programs may run
        "remark": f"stopped after {job.limit} seconds" if stopped else "",
    }


def isa_of(machine: Machine) -> str:
    command = [*machine.python, "-c", "from lowtri.kernels.target import ISA; print(ISA.name)"]
    environment = {**machine.environment, "PYTHONPATH": str(machine.folder / "src")}
    done = subprocess.run(command, cwd=machine.folder, env=environment, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip()[-500:]


def unless_passed(work: Callable[[], dict[str, Any]], file: Path, sources: str) -> dict[str, Any]:
    """The result in the file, if the job passed with these sources, and as many cases or more; else run it, and write the file."""
    result: dict[str, Any] = json.loads(file.read_text()) if sources and file.exists() else {}
    digest, _, amount = sources.partition(" ")
    enough = [f"{digest} {more}" for more in AMOUNTS[AMOUNTS.index(amount) :]] if amount else []
    if result.get("sources") not in enough or not result.get("good"):
        result = {**work(), "sources": sources}
        file.write_text(json.dumps(result) + "\n")
    return result


def run_all(cpus: list[Cpu], jobs: list[Job], root: Path, workers: int, amount: str) -> bool:
    """Run what has not passed with these sources, some jobs at a time; print the table."""
    is_arm = platform.machine().lower() in ("aarch64", "arm64")
    pending: list[tuple[str, str, Job, Path, Callable[[], dict[str, Any]]]] = []
    for cpu in cpus[-1:] if is_arm else cpus:
        name = "this machine" if is_arm else cpu.name
        machine = native_machine() if is_arm else prepare(cpu, root)
        logs = root / name.replace(" ", "-") / "results"
        logs.mkdir(parents=True, exist_ok=True)
        isa = isa_of(machine)
        if not is_arm and isa != cpu.isa:
            fail(f"{cpu.name}: the instruction set is {isa} instead of {cpu.isa}")
        sample: tuple[str, ...] = () if is_arm or amount == "whole" else ("--salt", cpu.name)
        sample += ("--cases", "2", "--examples", "3") if sample and amount == "quick" else ()

        for job in jobs if is_arm else [job for job in jobs if not cpu.jobs or job.name in cpu.jobs]:
            log = logs / f"{job.name}.txt"
            work = partial(run_job, job, machine, log, sample)
            sources = f"{machine.digest} {amount}" if machine.digest else ""
            pending.append((name, isa, job, log, partial(unless_passed, work, log.with_suffix(".json"), sources)))
    start = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        try:
            results = list(pool.map(lambda one: one[-1](), pending))
        except BaseException:  # Ctrl-C ends the jobs, too
            STOP.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    print(f"{'CPU':14}{'kernels':12}{'job':12}{'passed':>8}{'failed':>8}{'left out':>10}{'CPU s':>9}")
    for (name, isa, job, log, _), result in zip(pending, results, strict=True):
        remark = "" if result["good"] else f"   see {log} {result['remark']}"
        numbers = f"{result['passed']:8}{result['failed']:8}{result['left_out']:10}{result['seconds']:9}"
        print(f"{name:14}{isa:12}{job.name:12}{numbers}{remark}")
    total = sum(int(result["seconds"]) for result in results)
    print(
        f"{total} seconds in all{'' if is_arm else ', emulated'}; {time.monotonic() - start:.0f} now, {workers} at a time"
    )
    return all(result["good"] for result in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(os.environ.get("ARM_ROOT") or ROOT / "build" / "arm"))
    parser.add_argument("--cpus", default=",".join(cpu.name for cpu in CPUS))
    parser.add_argument("--jobs", default=",".join(job.name for job in JOBS))
    parser.add_argument(
        "--python", default="", metavar="CPU", help="run the emulated interpreter with the arguments after --"
    )
    parser.add_argument("--wheel", type=Path, help="install this wheel for aarch64 Linux and use it, emulated")
    amounts = parser.add_mutually_exclusive_group()
    amounts.add_argument(
        "--whole", action="store_true", help="every case of every test, for hours, instead of a sample"
    )
    amounts.add_argument("--quick", action="store_true", help="of every test two cases at most, instead of a sample")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="how many jobs run at a time")
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    root = options.root.resolve()
    amount = "quick" if options.quick else "a sample"
    if options.whole:
        amount = "whole"
    cpus = [cpu for cpu in CPUS if cpu.name in options.cpus.split(",")]
    jobs = [job for job in JOBS if job.name in options.jobs.split(",")]
    if not cpus or not jobs:
        fail(f"--cpus are of {', '.join(x.name for x in CPUS)}; --jobs of {', '.join(x.name for x in JOBS)}.")
    if platform.machine().lower() not in ("aarch64", "arm64"):
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            fail("ARM is emulated on x86-64 Linux. Fix: run it there, or on an ARM machine.")
        system(root)
    if options.wheel:
        use_wheel(options.wheel, root)
        return
    if options.python:
        machine = prepare(next(cpu for cpu in CPUS if cpu.name == options.python), root)
        command = [*machine.python, *options.arguments]
        sys.exit(subprocess.run(command, cwd=machine.folder, env=machine.environment).returncode)
    sys.exit(not run_all(cpus, jobs, root, options.workers, amount))


if __name__ == "__main__":
    main()
