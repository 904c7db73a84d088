"""Files are written whole or not at all, where their name leads to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lowtri.files import write_text


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
