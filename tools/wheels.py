#!/usr/bin/env python
"""Builds lowtri's wheels for other machines on this one, and checks them: the file format of the library, and what it exports.

    python tools/wheels.py                                 aarch64 Linux, macOS arm64 and Windows x86-64, into dist/
    python tools/wheels.py --platforms linux-aarch64
    python tools/wheels.py --check dist/*.whl

The objects are compiled by LLVM and linked by zig. What a wheel's code computes is tested on its platform, or under emulation
(`make test-arm`), not here.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLATFORMS = ("linux-aarch64", "macos-aarch64", "windows-x86_64")
ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
MACH_O_MACHINES = {0x01000007: "x86_64", 0x0100000C: "aarch64"}
PE_MACHINES = {0x8664: "x86_64", 0xAA64: "aarch64"}


def exports(content: bytes) -> tuple[str, set[str]]:
    """The platform of a shared library or an object file, and the names that it defines for others, from its headers.

    Raises:
        ValueError: if it is of none of the formats.
    """
    if content[:4] == b"\x7fELF":
        return _elf(content)
    if content[:4] == struct.pack("<I", 0xFEEDFACF):
        return _mach_o(content)
    return _pe(content) if content[:2] == b"MZ" else _coff(content, 0)


def _text(content: bytes, start: int) -> str:
    return content[start : content.index(b"\0", start)].decode()


def _number(kind: str, content: bytes, start: int) -> int:
    return int(struct.unpack_from(kind, content, start)[0])


def _elf(content: bytes) -> tuple[str, set[str]]:
    """The global symbols that are defined, of the dynamic table or an object's own. Source: System V ABI, chapter 4."""
    machine = _number("<H", content, 18)
    first, size, count = struct.unpack_from("<Q10xHH", content, 40)
    sections = [struct.unpack_from("<IIQQQQIIQQ", content, first + size * n) for n in range(count)]
    dynamic = 11
    table = 2
    kinds = {section[1] for section in sections}
    symbols = next(section for section in sections if section[1] == (dynamic if dynamic in kinds else table))
    names = sections[symbols[6]][4]
    exported = set()
    for offset in range(symbols[4], symbols[4] + symbols[5], 24):
        name, info, _, section = struct.unpack_from("<IBBH", content, offset)
        if info >> 4 == 1 and info & 15 == 2 and section:  # a global function that is not undefined
            exported.add(_text(content, names + name))
    return f"linux-{ELF_MACHINES[machine]}", exported


def _mach_o(content: bytes) -> tuple[str, set[str]]:
    """The external symbols that a section defines. Source: Apple, mach-o/loader.h and nlist.h."""
    machine, commands = struct.unpack_from("<I8xI", content, 4)
    offset = 32
    exported = set()
    for _ in range(commands):
        command, size = struct.unpack_from("<II", content, offset)
        if command == 2:  # LC_SYMTAB
            symbols, count, names = struct.unpack_from("<III", content, offset + 8)
            for n in range(count):
                name, kind = struct.unpack_from("<IB", content, symbols + 16 * n)
                if kind & 0x0E == 0x0E and kind & 0x11 == 0x01:  # in a section, external, not private
                    exported.add(_text(content, names + name).removeprefix("_"))
        offset += size
    return f"macos-{MACH_O_MACHINES[machine]}", exported


def _coff(content: bytes, header: int) -> tuple[str, set[str]]:
    """An object file's external functions. Source: Microsoft, PE format."""
    machine, _, _, symbols, count = struct.unpack_from("<HHIII", content, header)
    if machine not in PE_MACHINES:
        raise ValueError("neither ELF, Mach-O nor PE")
    names = symbols + 18 * count
    exported = set()
    n = 0
    while n < count:
        place = symbols + 18 * n
        zeros, start = struct.unpack_from("<II", content, place)
        section, storage, auxiliary = struct.unpack_from("<h2xBB", content, place + 12)
        if storage == 2 and section > 0:
            exported.add(content[place : place + 8].rstrip(b"\0").decode() if zeros else _text(content, names + start))
        n += 1 + auxiliary
    return f"windows-{PE_MACHINES[machine]}", exported


def _pe(content: bytes) -> tuple[str, set[str]]:
    """The names in the export directory of a DLL."""
    header = _number("<I", content, 60) + 4
    machine, sections = struct.unpack_from("<HH", content, header)
    optional = header + 20
    table = optional + _number("<H", content, header + 16)
    parts = [struct.unpack_from("<8xIIII", content, table + 40 * n) for n in range(sections)]

    def at(address: int) -> int:
        return next(
            address - start + file
            for length, start, size, file in parts
            if start <= address < start + max(length, size)
        )

    directory = _number("<I", content, optional + 112)
    exported: set[str] = set()
    if directory:
        count, _, names = struct.unpack_from("<III", content, at(directory) + 24)
        exported = {_text(content, at(_number("<I", content, at(names) + 4 * n))) for n in range(count)}
    return f"windows-{PE_MACHINES[machine]}", exported


def check(wheel: Path) -> str:
    """What a wheel contains, in a line.

    Raises:
        ValueError: if its library is not what its index and its name say.
    """
    folder = "lowtri/kernels/native/"
    with zipfile.ZipFile(wheel) as files:
        index = json.loads(files.read(folder + "index.json"))
        content = files.read(folder + index["library"])
        others = [name for name in files.namelist() if name.startswith(folder)]
    if len(others) != 2:
        raise ValueError(f"{wheel.name}: there are other files in {folder}: {others}")
    platform, exported = exports(content)
    if platform != index["platform"]:
        raise ValueError(f"{wheel.name}: the library is for {platform}, its index for {index['platform']}")
    if missing := {*index["symbols"]} - exported:
        raise ValueError(f"{wheel.name}: {len(missing)} functions are not exported, such as {sorted(missing)[0]}")
    isas = ", ".join(index["isas"])
    return f"{wheel.name}: {platform}, {len(index['symbols'])} functions for {isas}, {len(content) / 2**20:.1f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platforms", default=",".join(PLATFORMS))
    parser.add_argument("--isas", default="all", help="fewer, to try it out")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--no-isolation", action="store_true", help="with the packages of this environment")
    parser.add_argument("--check", type=Path, nargs="*", help="check these wheels and build none")
    options = parser.parse_args()
    wheels = options.check or []
    for platform in [] if options.check else options.platforms.split(","):
        environment = {**os.environ, "LOWTRI_BUILD": f"--platform {platform} --isas {options.isas} --linker zig"}
        before = {*options.out.glob("*.whl")} if options.out.exists() else set()
        # By way of an sdist, whose copy of the sources gets the library: the checkout keeps its own.
        command = [
            sys.executable,
            "-m",
            "build",
            "--outdir",
            str(options.out),
            *["--no-isolation"] * options.no_isolation,
        ]
        start = {path: path.stat().st_mtime_ns for path in before}
        if subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL).returncode:
            sys.exit(f"wheels: the wheel for {platform} could not be built; the reason is above.")
        wheels += [path for path in options.out.glob("*.whl") if start.get(path) != path.stat().st_mtime_ns]
    for wheel in wheels:
        try:
            print(check(wheel))
        except (ValueError, OSError, KeyError, struct.error) as error:
            sys.exit(f"wheels: {error}")


if __name__ == "__main__":
    main()
