"""Renders one chat template. :mod:`lowtri.nn.chat` runs it as a separate process, so that a hostile template can be killed.

stdin: JSON with the template, its variables, where Python finds jinja2, and the memory allowed. stdout: {"text": ...} or
{"error": ...}. It imports neither lowtri nor torch nor NumPy.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

__all__ = ["main", "render"]


def render(template: str, variables: dict[str, Any]) -> str:
    """Render a template in Jinja's sandbox, with the two functions that transformers provides to templates."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> Any:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(template).render(**variables)


def main() -> None:
    """Render one template from stdin to stdout."""
    given = json.load(sys.stdin)
    sys.path[:] = given["path"]
    with suppress(ImportError, ValueError, OSError):  # Windows has no memory limit of this kind, only the time limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (given["memory"], given["memory"]))
    try:
        answer = {"text": render(given["template"], given["variables"])}
    except Exception as error:  # templates are untrusted programs
        answer = {"error": str(error) or type(error).__name__}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
