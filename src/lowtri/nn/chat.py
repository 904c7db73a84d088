"""A conversation as the text that a model was taught to read: the chat template that came with its weights.

A template is a program in Jinja's language, so it runs in Jinja's sandbox: it can read the messages and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowtri.errors import DataError
from lowtri.nn.checkpoint import read_json

__all__ = ["chat_text", "template_of"]


def template_of(folder: Path) -> tuple[str, dict[str, str]] | None:
    """A folder's chat template and the tokens it may name (``bos_token``, ...); None if there is no template."""
    beside = folder / "tokenizer_config.json"
    config = read_json(beside) if beside.exists() else {}
    own = folder / "chat_template.jinja"
    template = own.read_text(encoding="utf-8") if own.exists() else config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {one["name"]: one["template"] for one in template}
        template = named.get("default")
    if not template:
        return None
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    tokens = {name: one.get("content") if isinstance(one, Mapping) else one for name, one in tokens.items()}
    return template, {name: one for name, one in tokens.items() if one is not None}


def chat_text(folder: Path, messages: Sequence[Mapping[str, str]]) -> str:
    """The text of a conversation, up to where the model's answer begins; to be read without adding special tokens.

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
        DataError: if the folder has no template, Jinja is not installed, or the template refuses the messages.
    """
    found = template_of(folder)
    if found is None:
        raise DataError(f"{folder} has no chat template: the model continues texts.\nFix: leave --chat out")
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise DataError(f"{folder}: a chat template needs the package jinja2.\nFix: pip install jinja2") from None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    template, tokens = found
    try:
        made: str = environment.from_string(template).render(messages=messages, add_generation_prompt=True, **tokens)
    except Exception as error:  # a template is a program, and somebody else's
        raise DataError(f"{folder}: the chat template refuses: {error}") from None
    return made


def _refuse(message: str) -> Any:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)
