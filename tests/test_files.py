"""Files are written whole or not at all, where their name leads to."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from lowtri import DataError, files
from lowtri.cli.main import main
from lowtri.files import write_atomically, write_text


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target.txt", tmp_path / "link.txt"
    link.symlink_to(target)
    for text in ("one", "two"):  # the first time the target does not exist
        write_text(link, text)
        assert link.is_symlink() and target.read_text() == text
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "link.txt", "target.txt"]


def test_a_device_or_a_pipe_or_a_folder_is_not_replaced(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    with pytest.raises(OSError, match="is a device or a pipe, and only a file can be written") as error:
        write_text(pipe, "text")
    assert error.value.filename == str(pipe) and pipe.is_fifo()
    with pytest.raises(OSError, match="is a folder"):
        write_text(folder, "text")
    assert list(folder.iterdir()) == []


def test_threads_that_write_one_file_leave_one_of_their_contents(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    contents = [letter * 5000 for letter in "abcd"]
    write_text(file, contents[0])
    problems: list[object] = []

    def write(content: str) -> None:
        try:
            for _ in range(40):
                write_text(file, content)
        except Exception as error:
            problems.append(error)

    def read(stop: threading.Event) -> None:
        while not stop.is_set():
            if (text := file.read_text()) not in contents:
                problems.append(f"{len(text)} characters: {text[:9]}")

    stop = threading.Event()
    reader = threading.Thread(target=read, args=(stop,))
    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert problems == [] and [path.name for path in tmp_path.iterdir()] == ["file.txt"]


def test_a_write_within_a_write_to_the_same_file(tmp_path: Path) -> None:
    """As two threads do, in an order that is always the same: the outer one ends last."""
    file = tmp_path / "file.txt"

    def write(temporary: Path) -> None:
        temporary.write_text("outer")
        write_text(file, "inner")
        assert file.read_text() == "inner" and temporary.read_text() == "outer"

    write_atomically(file, write)
    assert file.read_text() == "outer" and list(tmp_path.iterdir()) == [file]


def test_links_under_temporary_names_are_not_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    victim, file = tmp_path / "victim.txt", tmp_path / "folder" / "file.txt"
    victim.write_text("mine")
    names = iter(["first", "second"])
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: next(names))
    (tmp_path / "folder" / ".file.txt.first.part").symlink_to(victim)
    (tmp_path / "folder" / f".file.txt.{os.getpid()}.part").symlink_to(victim)
    write_text(file, "text")
    assert victim.read_text() == "mine" and file.read_text() == "text" and not file.is_symlink()
    assert list(names) == [], "the name that the link had is passed over"


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o027])
def test_the_mode_is_what_the_umask_gives(tmp_path: Path, umask: int) -> None:
    file = tmp_path / "file.txt"

    def private(temporary: Path) -> None:
        temporary.write_text("text")
        temporary.chmod(0o600)  # as safetensors makes its files

    before = os.umask(umask)
    try:
        write_atomically(file, private)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask


def test_a_long_name_is_written(tmp_path: Path) -> None:
    file = tmp_path / ("字" * 85)  # 255 bytes, the most that file systems take
    write_text(file, "text")
    assert file.read_text() == "text" and list(tmp_path.iterdir()) == [file]


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    write_text(file, "old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        write_atomically(file, fail)
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    with pytest.raises(FileNotFoundError) as error:
        write_text(tmp_path / "nowhere" / "file.txt", "text")
    assert error.value.filename == str(tmp_path / "nowhere" / "file.txt")


class NoRoom:
    """shutil.disk_usage where one folder has no room."""

    def __init__(self, full: Path) -> None:
        self.full = full

    def __call__(self, folder: str | Path) -> object:
        return type("Usage", (), {"free": 0 if Path(folder) == self.full else 2**40})


def fill(monkeypatch: pytest.MonkeyPatch, full: Path) -> None:
    monkeypatch.setattr(files.shutil, "disk_usage", NoRoom(full))


def a_full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_folder_for_temporary_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, other = tmp_path / "temporary", tmp_path / "other"
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    fill(monkeypatch, temporary)
    with pytest.raises(DataError) as error, files.writing("save", other / "m.png"):
        a_full_disk()
    assert str(error.value) == (
        f"save: {other / 'm.png'} cannot be written: the folder for temporary files, {temporary}, is full. "
        "Fix: make room there, or TMPDIR=FOLDER for another one."
    )
    fill(monkeypatch, other)
    said = r"m\.png cannot be written: No space left on device\. Fix: free some space"
    with pytest.raises(DataError, match=said), files.writing("save", other / "m.png"):
        a_full_disk()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", a_missing_folder)
    with (
        pytest.raises(
            DataError, match=r"no folder for temporary files can be written\. Fix: make room there, or TMPDIR="
        ),
        files.writing("save", other / "m.png"),
    ):
        tempfile.mkdtemp()


def a_missing_folder(*_: object) -> str:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")


def test_the_command_line_names_the_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", a_missing_folder)
    monkeypatch.setattr("lowtri.pictures.masks.picture_size", lambda *_: tempfile.mkdtemp())
    assert main(["mask", "causal"]) == 2
    assert capsys.readouterr().err == (
        "lowtri: the result, or a file, cannot be written: no folder for temporary files can be written. "
        "Fix: make room there, or TMPDIR=FOLDER for another one\n"
    )
