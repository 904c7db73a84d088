"""Loads and runs tokenizers; every error of the tokenizers library becomes a DataError.

The Rust library raises bare Exceptions and, for malformed files, ``PanicException``, which is not an Exception.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lowtri.errors import DataError
from lowtri.extras import require
from lowtri.nn.files import brief, file_in

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["encode", "guarded", "load_tokenizer"]

_LONGEST = 2**28  # bytes of a tokenizer.json; the largest in use have tens of megabytes
_MOST_EXPANSION = 2**16  # limit on how many times longer replacements may make a text

T = TypeVar("T")


def guarded(message: str, function: Callable[[], T]) -> T:
    """The result of a function; what the tokenizers library raises becomes a DataError with this message in front.

    >>> guarded("t.json is not a tokenizer", lambda: 1 // 0)
    Traceback (most recent call last):
    lowtri.errors.DataError: t.json is not a tokenizer: integer division or modulo by zero
    """
    try:
        return function()
    except (DataError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # PanicException is not an Exception
        raise DataError(f"{message}: {brief(error)}") from None


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The folder's tokenizer; None if it has none.

    Truncation and padding settings of the file are disabled: the caller decides.

    Raises:
        DataError: if the file is not a tokenizer, or fails to decode and encode its own tokens.
    """
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
    """The ids of a text.

    Raises:
        DataError: if the tokenizer fails.
    """
    ids: list[int] = guarded(
        "the model's tokenizer cannot read this text",
        lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens).ids,
    )
    return ids


def _expansion(part: Any) -> int:
    """How many times longer a text may become in the replacements of a normalizer or decoder, one after the other."""
    if part is None:
        return 1
    pending, expansion = [json.loads(part.__getstate__())], 1
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if node.get("type") == "Replace":
                expansion *= _replace_expansion(node)
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)
        if expansion > 2**64:
            break
    return expansion


def _replace_expansion(step: dict[str, Any]) -> int:
    pattern, content = step.get("pattern"), str(step.get("content", ""))
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    if literal:
        return max(1, -(-len(content) // len(literal)))
    return 1 + len(content)  # a regular expression may match the empty string before every character
