"""Text that every Python ships with, about two megabytes of English, as training text: nothing is downloaded.

    python examples/python_text.py out/text           # writes about 600 text files
    python examples/train/train.py out/text/*.txt --out out/model

Each topic of Python's reference and the docstrings of each module of the standard library are a document. Sources are parsed,
never imported.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from lowtri.errors import DataError

__all__ = ["Document", "python_text"]


class Document(NamedTuple):
    """One text, and the name of its topic or module."""

    name: str
    text: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder for the text files")
    out = parser.parse_args().out
    try:
        out.mkdir(parents=True, exist_ok=True)
        documents = python_text()
        for number, document in enumerate(documents):
            name = "".join(letter if letter.isalnum() or letter in ".-_" else "-" for letter in document.name)
            (out / f"{number:04}-{name}.txt").write_text(document.text, encoding="utf-8")
    except (DataError, OSError) as error:
        raise SystemExit(f"{out}: {error}") from None
    print(f"{len(documents)} documents, {sum(len(document.text) for document in documents):,} characters in {out}")


def python_text(note: Callable[[str], object] | None = None) -> list[Document]:
    """About two megabytes of English, a document for each topic and module.

    The chapters of Python's reference (``pydoc_data/topics.py``) come first, then the docstrings of the standard library,
    a module a document, by name. Sources are parsed and never imported. The same Python gives the same text.

    Args:
        note: receives a line before the reading, which takes some seconds.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    if note is not None:
        note("reading Python's own reference and docstrings")
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


if __name__ == "__main__":
    main()
