"""Chat templates: a conversation as the text that a chat model was trained on.

A template is an untrusted Jinja program. It runs in Jinja's sandbox, with access to the messages only, in a separate process
with limits on time and memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from lowtri.errors import DataError
from lowtri.nn import chat_render
from lowtri.nn.files import brief, read_json, read_text

__all__ = ["chat_text", "template_of"]

SECONDS, MEMORY = 10.0, 2**29  # limits of the rendering process; real templates take milliseconds


def template_of(folder: Path) -> tuple[str, dict[str, str]] | None:
    """A folder's chat template and the tokens it may name (``bos_token``, ...); None if there is no template.

    Raises:
        DataError: if a file cannot be read, or the template is not text.
    """
    config = read_json(folder, "tokenizer_config.json") or {}
    template = read_text(folder, "chat_template.jinja")
    if template is None:
        template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = [one for one in template if isinstance(one, Mapping) and one.get("name") == "default"]
        template = named[0].get("template", 0) if named else None
    if template is None or template == "":
        return None
    if not isinstance(template, str):
        raise DataError(
            f"{folder}: the chat template is {type(template).__name__}, expected a text, or a list of named texts"
        )
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    tokens = {name: one.get("content") if isinstance(one, Mapping) else one for name, one in tokens.items()}
    return template, {name: one for name, one in tokens.items() if isinstance(one, str)}


def chat_text(folder: Path, messages: Sequence[Mapping[str, str]]) -> str:
    """The prompt for a conversation, up to the start of the model's answer; encode it without adding special tokens.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     folder = Path(name)
    ...     _ = (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %} ->")
    ...     chat_text(folder, [{"role": "user", "content": "Hello"}])
    '[user] Hello ->'

    Args:
        folder: of the model.
        messages: ``{"role": "user", "content": "..."}`` and so on, the oldest first.

    Raises:
        DataError: if the folder has no template, Jinja is not installed, or the template raises an error or exceeds its limits.
    """
    found = template_of(folder)
    if found is None:
        raise DataError(f"{folder} has no chat template: the model continues texts.\nFix: leave --chat out")
    if find_spec("jinja2") is None:
        raise DataError(f"{folder}: a chat template needs the package jinja2.\nFix: pip install jinja2")
    template, tokens = found
    variables = {"messages": [dict(one) for one in messages], "add_generation_prompt": True, **tokens}
    given = {"template": template, "variables": variables, "path": sys.path, "memory": MEMORY}
    try:
        ran = subprocess.run(
            [sys.executable, "-I", chat_render.__file__],
            input=json.dumps(given).encode(),
            capture_output=True,
            timeout=SECONDS,
        )
        answer: Mapping[str, str] = json.loads(ran.stdout)
    except subprocess.TimeoutExpired:
        raise DataError(f"{folder}: the chat template runs for more than {SECONDS:g} seconds and was stopped") from None
    except ValueError:  # the process was killed before it could answer
        raise DataError(
            f"{folder}: the chat template ended its process, which may take {MEMORY // 2**20} MB (exit code {ran.returncode})"
        ) from None
    if "error" in answer:
        raise DataError(f"{folder}: the chat template refuses: {brief(answer['error'])}")
    return answer["text"]
