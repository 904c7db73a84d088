"""Renders one chat template. :mod:`lowtri.nn.chat` runs it as a separate process, so that a hostile template can be killed.

stdin: JSON with the template, the messages, the special tokens, where Python finds transformers, and the seconds and memory allowed.
stdout: {"text": ...} or {"error": ...}.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from contextlib import suppress
from typing import Any

TIMEOUT = b"Timeout ("  # on stderr, from faulthandler


def main() -> None:
    """Render the template from stdin to stdout."""
    request = json.load(sys.stdin)
    sys.path[:] = request["path"]
    from transformers.utils.chat_template_utils import render_jinja_template

    # The limits begin here: importing transformers takes seconds. The watchdog runs without Python's lock.
    faulthandler.dump_traceback_later(request["seconds"], exit=True)
    with suppress(ImportError, ValueError, OSError):  # Windows has no memory limit of this kind, only the time limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (request["memory"], request["memory"]))
    try:
        texts: Any = render_jinja_template(
            [request["messages"]], chat_template=request["template"], add_generation_prompt=True, **request["tokens"]
        )
        answer = {"text": texts[0][0]}
    except Exception as error:  # templates are untrusted programs
        answer = {"error": str(error) or type(error).__name__}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
