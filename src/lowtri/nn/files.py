"""Files of a checkpoint folder. Downloaded folders are untrusted, so every file is checked before it is read.

Each must be a regular file inside the folder (symbolic links must not leave it), and is read only up to a size limit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lowtri.errors import DataError

__all__ = ["brief", "file_in", "read_json", "read_text"]

LONGEST = 16 * 2**20  # bytes of a JSON file or a template; parsed, it takes about 20 times that


def file_in(folder: Path, name: str) -> Path | None:
    """The path of a file in this folder; None if there is none.

    Raises:
        DataError: if the file is a link that leaves the folder, or is not a regular file.
    """
    path = folder / name
    if not os.path.lexists(path):
        return None
    try:
        root, target = folder.resolve(strict=True), path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # a dangling link; a circle of links
        raise DataError(f"{path} is a dangling link, or one of a circle of links: {error}") from None
    roots = [root]
    if root.parent.name == "snapshots":  # of huggingface_hub's cache: snapshots/<revision> has links to blobs
        roots.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in roots):
        raise DataError(f"{path} is a link to {target}, outside of its folder.\nFix: a copy of that file in its place")
    if not target.is_file():
        raise DataError(f"{path} is not a regular file. Fix: the file itself in its place")
    return path


def brief(text: object) -> str:
    """Text from a file made safe for a message: no control characters, limited length.

    >>> brief("a\\x1b[31mb" + "c" * 999)[:10]
    'a?[31mbccc'
    """
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in str(text)[:300])


def read_text(folder: Path, name: str) -> str | None:
    """The text (UTF-8) of a file in this folder; None if there is none.

    Raises:
        DataError: as :func:`file_in`; and if the file cannot be read, is too long, or is not UTF-8.
    """
    path = file_in(folder, name)
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            content = file.read(LONGEST + 1)
        if len(content) > LONGEST:
            raise DataError(f"{path} has more than {LONGEST:,} bytes, the most that is read of such a file")
        return content.decode("utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}") from None


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """The object in a JSON file of this folder; None if there is no such file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "config.json").write_text('{"vocab_size": 9}')
    ...     read_json(Path(folder), "config.json"), read_json(Path(folder), "tokenizer_config.json")
    ({'vocab_size': 9}, None)

    Raises:
        DataError: as :func:`read_text`; and if the file is not JSON, is nested too deeply, or is not an object.
    """
    text = read_text(folder, name)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{folder / name} cannot be read: {brief(error)}") from None
    if not isinstance(content, dict):
        raise DataError(f"{folder / name} holds a {type(content).__name__}; expected an object: {{...}}")
    return content
