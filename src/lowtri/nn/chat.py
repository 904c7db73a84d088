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
from typing import Any

from lowtri.errors import DataError
from lowtri.extras import is_installed
from lowtri.nn import chat_render
from lowtri.nn.files import brief, read_json, read_text

SECONDS, MEMORY = 10.0, 2**29  # limits of a template; real ones take milliseconds


def template_of(folder: Path) -> tuple[str, dict[str, str]] | None:
    """A folder's chat template and the special tokens that it may name (``bos_token``, ...); None if there is no template."""
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
    missing = [name for name in ("transformers", "jinja2") if not is_installed(name)]
    if missing:
        raise DataError(
            f"{folder}: transformers renders chat templates, with jinja2; not installed: {', '.join(missing)}.\n"
            "Fix: pip install 'lowtri[transformers]'"
        )
    template, tokens = template_and_tokens
    request: dict[str, Any] = {
        "template": template,
        "messages": [dict(message) for message in messages],
        "tokens": tokens,
    }
    request |= {"path": sys.path, "seconds": SECONDS, "memory": MEMORY}
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # each thread would take memory from the template
    command = [sys.executable, "-I", chat_render.__file__]
    process = subprocess.run(
        command, input=json.dumps(request).encode(), capture_output=True, env=environment, check=False
    )
    try:
        answer: Mapping[str, str] = json.loads(process.stdout)
    except ValueError:  # the process ended before it could answer
        if chat_render.TIMEOUT in process.stderr:
            reason = f"runs for more than {SECONDS:g} seconds and was stopped"
        else:
            reason = f"ended its process, which may take {MEMORY // 2**20} MB (exit code {process.returncode})"
        raise DataError(f"{folder}: the chat template {reason}") from None
    if "error" in answer:
        raise DataError(f"{folder}: the chat template refuses: {brief(answer['error'])}")
    return answer["text"]
