"""Files of a checkpoint folder: writes them, and reads them and the tokenizer. Downloaded folders are untrusted, so every file is
checked before it is read.

Each must be a regular file inside the folder (symbolic links must not leave it), and is read only up to a size limit. Every error of
the tokenizers library becomes a DataError: it raises bare Exceptions and, for malformed files, ``PanicException``, which is none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lowtri.errors import DataError
from lowtri.extras import require
from lowtri.files import write_atomically, write_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

LONGEST = 16 * 2**20  # bytes of a JSON file or a template; parsed, it takes about 20 times that


def file_in(folder: Path, name: str) -> Path | None:
    """The path of a regular file in this folder, which no link leaves; None if there is none."""
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
    """The text (UTF-8) of a file in this folder, of limited length; None if there is none."""
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
    """The object in a JSON file of this folder; None if there is no such file."""
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


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint folder, created if missing: each file atomically, and the weights (contiguous) last."""
    require("saving a model", "safetensors")
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    contents: dict[str, Mapping[str, Any]] = {"config.json": {**config, "torch_dtype": dtype}}
    if tokenizer is not None:
        write_atomically(folder / "tokenizer.json", lambda path: tokenizer.save(str(path)))
        common = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        contents["tokenizer_config.json"] = {**common, **(tokenizer_config or {})}
    for name, content in contents.items():
        write_text(folder / name, json.dumps(content, indent=2) + "\n")
    weights = dict(tensors)
    write_atomically(folder / "model.safetensors", lambda path: save_file(weights, path, metadata={"format": "pt"}))


_LONGEST = 2**28  # bytes of a tokenizer.json; the largest in use have tens of megabytes
_MOST_EXPANSION = 2**16  # limit on how many times longer replacements may make a text

T = TypeVar("T")


def guarded(message: str, function: Callable[[], T]) -> T:
    """The result of a function; what the tokenizers library raises becomes a DataError with this message in front."""
    try:
        return function()
    except (DataError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # PanicException is not an Exception
        raise DataError(f"{message}: {brief(error)}") from None


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The folder's tokenizer; None if it has none. Its truncation and padding are disabled: the caller decides."""
    require("reading a tokenizer", "tokenizers")
    from tokenizers import Tokenizer

    path = file_in(Path(folder), "tokenizer.json")
    if path is None:
        return None
    if path.stat().st_size > _LONGEST:
        raise DataError(f"{path} has more than {_LONGEST:,} bytes, the most that is read of a tokenizer")

    def read() -> Tokenizer:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        expansion = _expansion(tokenizer.normalizer) * _expansion(tokenizer.decoder)
        if expansion > _MOST_EXPANSION:
            raise DataError(f"{path} is not a tokenizer: its replacements make a text {expansion:,} times longer")
        tokenizer.encode(tokenizer.decode([0, 1, 2], skip_special_tokens=False))  # some files fail only when used
        return tokenizer

    return guarded(f"{path} is not a tokenizer", read)


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The ids of a text; a DataError if the tokenizer fails."""
    ids: list[int] = guarded(
        "the model's tokenizer cannot read this text",
        lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens).ids,
    )
    return ids


def _expansion(part: Any) -> int:
    """How many times longer a text may become in the replacements of a normalizer or decoder, one after the other."""
    pending, expansion = [None if part is None else json.loads(part.__getstate__())], 1
    while pending and expansion <= 2**64:
        node = pending.pop()
        if isinstance(node, dict):
            if node.get("type") == "Replace":
                pattern, length = node.get("pattern"), len(str(node.get("content", "")))
                literal = pattern.get("String") if isinstance(pattern, dict) else None
                # A regular expression may match the empty string before every character.
                expansion *= max(1, -(-length // len(literal))) if literal else 1 + length
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)
    return expansion
