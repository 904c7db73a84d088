"""Chat templates: a conversation as the text that a chat model was trained on.

A template is an untrusted Jinja program. transformers renders it in Jinja's sandbox, with access to the messages only, in a
separate process with limits on time and memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lowtri.errors import DataError
from lowtri.extras import is_installed
from lowtri.nn import chat_render
from lowtri.nn.files import brief, read_json, read_text

SECONDS, MEMORY = 10.0, 2**29  # limits of a template; real ones take milliseconds
_PACKAGES = ("transformers", "jinja2")


def template_of(folder: Path) -> tuple[str, dict[str, str]] | None:
    """A folder's chat template and the special tokens that it may name (``bos_token``, ...); None if there is no template.

    Raises:
        DataError: if a file cannot be read, or the template is not text.
    """
    config = read_json(folder, "tokenizer_config.json") or {}
    template = read_text(folder, "chat_template.jinja")
    if template is None:
        template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        defaults = [entry for entry in template if isinstance(entry, Mapping) and entry.get("name") == "default"]
        template = defaults[0].get("template", 0) if defaults else None
    if template is None or template == "":
        return None
    if not isinstance(template, str):
        raise DataError(
            f"{folder}: the chat template is {type(template).__name__}, expected a text, or a list of named texts"
        )
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    texts = {name: token.get("content") if isinstance(token, Mapping) else token for name, token in tokens.items()}
    return template, {name: text for name, text in texts.items() if isinstance(text, str)}


def chat_text(folder: Path, messages: Sequence[Mapping[str, str]]) -> str:
    """The prompt for a conversation, up to the start of the model's answer; encode it without adding special tokens.

    Args:
        folder: of the model.
        messages: ``{"role": "user", "content": "..."}`` and so on, the oldest first.

    Raises:
        DataError: if the folder has no template, transformers or Jinja is not installed, or the template raises an error or
            exceeds its limits.
    """
    template_and_tokens = template_of(folder)
    if template_and_tokens is None:
        raise DataError(f"{folder} has no chat template: the model continues texts.\nFix: leave --chat out")
    missing = [name for name in _PACKAGES if not is_installed(name)]
    if missing:
        raise DataError(
            f"{folder}: transformers renders chat templates, with jinja2; not installed: {', '.join(missing)}.\n"
            "Fix: pip install 'lowtri[transformers]'"
        )
    template, tokens = template_and_tokens
    request = {"template": template, "messages": [dict(message) for message in messages], "tokens": tokens}
    output, exit_code = _render(folder, {**request, "path": sys.path, "memory": MEMORY})
    try:
        answer: Mapping[str, str] = json.loads(output)
    except ValueError:  # the process was killed before it could answer
        raise DataError(
            f"{folder}: the chat template ended its process, which may take {MEMORY // 2**20} MB (exit code {exit_code})"
        ) from None
    if "error" in answer:
        raise DataError(f"{folder}: the chat template refuses: {brief(answer['error'])}")
    return answer["text"]


def _render(folder: Path, request: Mapping[str, object]) -> tuple[bytes, int]:
    """What the separate process writes, and its exit code."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # each thread would take memory from the template
    command = [sys.executable, "-I", chat_render.__file__]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
        process.stdin = None  # communicate() would flush it
        process.stdout.readline()  # the template starts now; importing transformers takes seconds
        try:
            return process.communicate(timeout=SECONDS)[0], process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            raise DataError(
                f"{folder}: the chat template runs for more than {SECONDS:g} seconds and was stopped"
            ) from None
