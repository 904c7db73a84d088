"""Converts text to token ids and back, with a tokenizer of ``tokenizers`` or transformers; streamed text never splits a character."""

from __future__ import annotations

from typing import Any

from lowtri.errors import CallError

_END = "<|end|>"  # the end-of-document token of tokenizers that lowtri trains
_CONTEXT = 8  # earlier tokens that are decoded again with each new one


def encode(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Token ids of a text, by a ``tokenizers.Tokenizer`` or a tokenizer of transformers."""
    encoding = tokenizer.encode(text, **options)
    return [int(i) for i in getattr(encoding, "ids", encoding)]


class Pieces:
    """Streams the tokens of one row as pieces of text that concatenate to the decoded whole.

    A token may end within a character; its text is buffered until the character is complete, and dropped if it never is. Each
    token is decoded together with the tokens before it, since some tokenizers decode a token differently at the start of a text.
    """

    def __init__(self, tokenizer: Any, before: list[int]) -> None:
        self._decode = tokenizer.decode
        self._ids = list(before[-_CONTEXT:])
        self._emitted = self._decode(self._ids)

    def add(self, token: int) -> str:
        """The text completed by this token; "" within a character."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        return self._take(text)

    def rest(self) -> str:
        """The text still buffered, without the bytes of a character that has not been completed."""
        return self._take(self._decode(self._ids).rstrip("\ufffd"))

    def _take(self, text: str) -> str:
        piece = text[len(self._emitted) :]
        self._ids = self._ids[-_CONTEXT:] if piece else self._ids
        self._emitted = self._decode(self._ids) if piece else self._emitted
        return piece


def stop_ids(stop: Any, tokenizer: Any) -> frozenset[int]:
    """Stop tokens as ids, from ids or texts of one token each."""
    stops = [stop] if isinstance(stop, int | str) else stop
    return frozenset(_one_token(tokenizer, token) if isinstance(token, str) else int(token) for token in stops)


def own_stop(model: Any, tokenizer: Any) -> frozenset[int]:
    """The model's own end-of-sequence ids, or else its tokenizer's."""
    for owner in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        token = getattr(owner, "eos_token_id", None)
        if token is not None:
            return stop_ids(token, None)
    token = tokenizer.token_to_id(_END) if hasattr(tokenizer, "token_to_id") else None
    return frozenset() if token is None else frozenset([token])


def _one_token(tokenizer: Any, text: str) -> int:
    if tokenizer is None:
        raise CallError(f"generate: stop has the text {text!r}, but there is no tokenizer. Fix: tokenizer=, or its id.")
    ids = encode(tokenizer, text, add_special_tokens=False)
    if len(ids) != 1:
        raise CallError(
            f"generate: stop has the text {text!r}, which is {len(ids)} tokens: {ids}. Fix: one token each."
        )
    return ids[0]
