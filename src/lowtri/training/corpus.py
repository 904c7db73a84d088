"""The training text of a model: documents, and the one long row of tokens into which they are packed.

Documents are packed end to end, and rows of equal length are cut from the whole, so no token is padding. The document of each
token is stored: the mask of a row is ``mask & documents(ids)``, and no target crosses from one document into the next. The
start of a row does not matter to the model, since rotary embedding depends only on distances.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtri.errors import DataError

__all__ = ["IGNORED", "Document", "Packed", "Rows", "python_text", "read_files"]

IGNORED = -100  # a target that torch's cross_entropy skips by default


class Document(NamedTuple):
    """One text; its tokens see no other document."""

    name: str
    text: str


class Rows(NamedTuple):
    """A batch cut from the packed tokens, int64, each (B, N)."""

    inputs: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]  # the token that follows each input; IGNORED where a document ends
    documents: npt.NDArray[np.int64]  # which document each input belongs to


@dataclass(frozen=True)
class Packed:
    """Documents as tokens, end to end.

    >>> packed = Packed.of([[1, 5, 6], [1, 7]])
    >>> rows = packed.rows([0], context=4)
    >>> rows.inputs
    array([[1, 5, 6, 1]])
    >>> rows.targets                                  # what follows 6 belongs to another document
    array([[   5,    6, -100,    7]])
    >>> rows.documents
    array([[0, 0, 0, 1]])
    """

    ids: npt.NDArray[np.int32]  # (L,)
    documents: npt.NDArray[np.int32]  # (L,), counted from 0

    @classmethod
    def of(cls, token_lists: Iterable[Sequence[int]]) -> Packed:
        """Pack lists of token ids, one list a document."""
        lists = [np.asarray(tokens, dtype=np.int32) for tokens in token_lists]
        documents = np.repeat(np.arange(len(lists), dtype=np.int32), [len(tokens) for tokens in lists])
        return cls(np.concatenate([np.empty(0, np.int32), *lists]), documents)

    def __len__(self) -> int:
        return len(self.ids)

    def count(self, context: int) -> int:
        """How many rows of ``context`` inputs there are; each needs one more token, its last target."""
        return max(0, (len(self.ids) - 1) // context)

    def require(self, context: int) -> None:
        """Raise a DataError if there is not even one row."""
        if not self.count(context):
            raise DataError(
                f"the text has {len(self)} tokens, and one row takes {context + 1}.\nFix: more text, or a smaller context"
            )

    def rows(self, numbers: Sequence[int] | npt.NDArray[np.int64], context: int) -> Rows:
        """The rows with these numbers: row ``i`` starts at token ``i * context``. Every token is a target at most once."""
        index = np.asarray(numbers, dtype=np.int64)[:, None] * context + np.arange(context)  # (B, N)
        documents = self.documents[index]
        targets = np.where(documents == self.documents[index + 1], self.ids[index + 1], IGNORED)
        return Rows(self.ids[index].astype(np.int64), targets.astype(np.int64), documents.astype(np.int64))

    def digest(self) -> str:
        """A hash of the tokens and their documents."""
        return hashlib.sha256(self.ids.tobytes() + self.documents.tobytes()).hexdigest()[:16]


def read_files(paths: Sequence[str | Path]) -> list[Document]:
    """Each file is a document; its text must be UTF-8 and not empty.

    Raises:
        DataError: names the file and what is wrong with it.
    """
    return [Document(str(path), _read(Path(path))) for path in paths]


def _read(path: Path) -> str:
    if path.is_dir():
        raise DataError(f"{path} is a folder.\nFix: name the files in it, for instance {path / '*.txt'}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}.\n"
            "Fix: convert it, for instance with iconv -t utf-8"
        ) from None
    if not text.strip():
        raise DataError(f"{path} has no text in it")
    return text


def python_text(note: Callable[[str], object] | None = None) -> list[Document]:
    """Text that every Python ships with, about two megabytes of English: nothing is downloaded.

    The chapters of Python's reference (``pydoc_data/topics.py``) come first, then the docstrings of the standard library,
    a module a document, by name. Sources are parsed and never imported. The same Python gives the same text.

    Args:
        note: receives a line before the reading, which takes some seconds.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    if note is not None:
        note("no files given: reading Python's own reference and docstrings")
    topics = library / "pydoc_data" / "topics.py"
    documents = [*_topics(topics), *_docstrings(library)]
    if not documents:
        raise DataError(f"this Python keeps no sources in {library}.\nFix: name text files to train on")
    return documents


def _parse(path: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # outdated escapes in library sources
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _topics(path: Path) -> Iterator[Document]:
    tree = _parse(path)
    for node in tree.body if tree else []:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for name, text in sorted(ast.literal_eval(node.value).items()):
                yield Document(f"topic {name}", text.strip() + "\n")


# Parts of the library folder that are third-party packages, tests, or separate programs.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data"}


def _docstrings(library: Path) -> Iterator[Document]:
    for path in sorted(library.rglob("*.py")):
        module = path.relative_to(library).with_suffix("")
        if _LEFT_OUT.isdisjoint(module.parts) and (tree := _parse(path)):
            texts = list(_texts(tree))
            if texts:
                yield Document(".".join(module.parts), "\n\n".join(texts) + "\n")


def _texts(node: ast.AST) -> Iterator[str]:
    """Docstrings in the order of the source."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
        text := ast.get_docstring(node)
    ):
        yield text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _texts(child)
