"""What differs between Linux, macOS and Windows, each faked where lowtri meets the system."""

from __future__ import annotations

import ctypes
import errno
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from systems import Library, Sysctl, pretend_macos, pretend_windows

from lowtri import files, system
from lowtri.kernels import threads
from lowtri.ops import arguments


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_macos(monkeypatch)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_windows(monkeypatch)


# Replacing files.


def test_windows_replaces_a_file_when_its_reader_is_done(
    windows: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refusals, rename = [PermissionError(errno.EACCES, "sharing violation")] * 3, system.os.replace

    def replace(source: Path, target: Path) -> None:
        if refusals:
            raise refusals.pop()
        rename(source, target)

    monkeypatch.setattr(system.os, "replace", replace)
    monkeypatch.setattr(system.time, "sleep", lambda seconds: None)
    files.write_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new" and not refusals
    refusals += [PermissionError(errno.EACCES, "sharing violation")] * 1000
    with pytest.raises(OSError, match="sharing violation") as refused:
        files.write_text(tmp_path / "file", "newer")
    assert refused.value.filename == str(tmp_path / "file") and len(refusals) == 1000 - 21
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "new"


def test_other_systems_do_not_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(system.os, "replace", lambda *paths: (_ for _ in ()).throw(PermissionError(13, "no")))
    monkeypatch.setattr(system.time, "sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(PermissionError):
        system.replace(tmp_path / "a", tmp_path / "b")


# Threads.


@pytest.fixture
def torch_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """torch with these files in its folder ``lib``, each with its functions, or an error where it is loaded."""

    def install(**libraries: Any) -> None:
        (tmp_path / "lib").mkdir()
        for name in libraries:
            (tmp_path / "lib" / name.replace("_", ".")).touch()
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__file__=str(tmp_path / "__init__.py")))

        def load(path: str) -> Any:
            library = libraries[Path(path).name.replace(".", "_")]
            if isinstance(library, OSError):
                raise library
            return library

        monkeypatch.setattr(ctypes, "CDLL", load)
        threads.openmp_team.cache_clear()

    yield install
    monkeypatch.undo()
    threads.openmp_team.cache_clear()


def test_on_macos_the_team_is_that_of_libomp(torch_libraries: Any) -> None:
    calls: list[tuple[Any, ...]] = []

    class Start:
        def __call__(self, *arguments: Any) -> None:
            calls.append(arguments)

    start = Start()
    torch_libraries(libomp_dylib=Library(GOMP_parallel=start))
    assert threads.openmp_team() == ("libomp.dylib", start)
    threads.run_team(SimpleNamespace(address=5, call=None), 7, 3)  # type: ignore[arg-type]
    assert calls == [(5, 7, 3, 0)]


@pytest.mark.parametrize("library", [Library(), OSError("no such file")], ids=["no GOMP_parallel", "does not load"])
def test_without_its_function_threads_of_python_run(torch_libraries: Any, library: Any) -> None:
    torch_libraries(libomp_dylib=library)
    assert threads.openmp_team() is None
    done: list[int] = []
    threads.run_team(SimpleNamespace(address=5, call=done.append), 7, 1)  # type: ignore[arg-type]
    threads.run_team(SimpleNamespace(address=5, call=done.append), 7, 3)  # type: ignore[arg-type]
    assert done[0] == 7 and 2 <= len(done) <= 4, "one of three threads at least: others may begin when all is done"


def test_a_library_that_can_be_used_is_looked_for_in_all(torch_libraries: Any) -> None:
    torch_libraries(libgomp_so=Library(), libomp_dylib=Library(GOMP_parallel=SimpleNamespace()))
    team = threads.openmp_team()
    assert team is not None and team[0] == "libomp.dylib"


# The system.


def test_a_mac(apple: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert system.cpu_name() == "Apple M2 Pro"
    assert system.last_cache_bytes() == 16 * 2**20
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    arguments.available_threads.cache_clear()
    assert arguments.thread_count(is_numpy=True) == 6, "only the fast cores"
    arguments.available_threads.cache_clear()


def test_a_mac_that_knows_nothing(apple: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sysctl, "sysctlbyname", lambda *arguments: -1)
    assert system.cpu_name() and system.last_cache_bytes() == 32 * 2**20
    assert system.fast_cpus() >= 1


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n", "Neoverse V1"),
        ("processor : 0\nmodel name\t: AMD EPYC 9R14\n", "AMD EPYC 9R14"),
    ],
)
def test_the_cpu_and_the_caches_of_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, name: str) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(system, "_CPU_INFO", tmp_path / "cpuinfo")
    assert system.cpu_name() == name
    monkeypatch.setattr(system, "_CACHES", tmp_path)
    assert system.last_cache_bytes() == 32 * 2**20, "the system does not say"
    for index, size in enumerate(("64K", "1M", "2048K")):  # no third level
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert system.last_cache_bytes() == 2 * 2**20


class Registry:
    """Windows' registry."""

    HKEY_LOCAL_MACHINE = 0

    class OpenKey:
        def __init__(self, root: int, path: str) -> None:
            assert path.startswith("HARDWARE\\DESCRIPTION")

        def __enter__(self) -> Registry.OpenKey:
            return self

        def __exit__(self, *error: Any) -> None:
            pass

    @staticmethod
    def QueryValueEx(key: Any, name: str) -> tuple[str, int]:
        assert name == "ProcessorNameString"
        return "Intel(R) Xeon(R) Platinum   ", 1


def test_a_windows_machine(windows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "winreg", Registry)
    assert system.cpu_name() == "Intel(R) Xeon(R) Platinum"
