"""Griffe extension: doctests become code blocks, roles become code, and parameters described together get an entry each."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^( *)>>> .*(?:\n(?!\s*\n).*\S.*)*", re.M)  # to the next empty line
ROLE = re.compile(r":(?:func|class|mod|meth|exc):`~?([\w.]+)`")
TOGETHER = re.compile(
    r"^ {4}(\w+(?:, \w+)+): (.*(?:\n {8}.*)*)", re.M
)  # "top_k, top_p: ...", in a section of arguments


class Docstrings(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = DOCTEST.sub(lambda match: f"{match[1]}```pycon\n{match[0]}\n{match[1]}```", obj.docstring.value)
            text = ROLE.sub(lambda match: f"`{match[1]}`", text)
            obj.docstring.value = TOGETHER.sub(_apart, text)


def _apart(match: re.Match[str]) -> str:
    return "\n".join(f"    {name}: {match[2]}" for name in match[1].split(", "))
