"""Fills in one chat template. Run as a program of its own by :mod:`lowtri.nn.chat`, so that a hostile template can be stopped.

stdin: JSON with the template, its variables, where Python finds jinja2, and the memory allowed. stdout: {"text": ...} or
{"error": ...}. It imports nothing of lowtri, and so neither torch nor NumPy.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

__all__ = ["main", "render"]


def render(template: str, variables: dict[str, Any]) -> str:
    """The text of a template, in Jinja's sandbox, with the two functions that templates of transformers expect."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> Any:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(template).render(**variables)


def main() -> None:
    """One template, from stdin to stdout."""
    given = json.load(sys.stdin)
    sys.path[:] = given["path"]
    with suppress(ImportError, ValueError, OSError):  # Windows has no such limit; there the time limit is all
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (given["memory"], given["memory"]))
    try:
        answer = {"text": render(given["template"], given["variables"])}
    except Exception as error:  # a template is a program, and somebody else's
        answer = {"error": str(error) or type(error).__name__}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
