"""Text in and out of a loop over ids: a tokenizer of either library, and pieces of text that never split a character."""

from __future__ import annotations

from typing import Any

from lowtri.errors import CallError

__all__ = ["Pieces", "encode", "own_stop", "stop_ids"]

END = "<|end|>"  # a document's last token, in tokenizers that lowtri trains
_BEHIND = 8  # tokens that are decoded again with the new ones


def encode(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Ids of a text, from a ``tokenizers.Tokenizer`` or a tokenizer of transformers."""
    found = tokenizer.encode(text, **options)
    return [int(i) for i in getattr(found, "ids", found)]


class Pieces:
    """Ids of one row, one after another, to pieces of text that add up to the text of all.

    A token may end within a character: its text is held back until the rest has come. The tokens of the last piece are
    decoded again with the new ones, since some tokenizers write a token differently at the start of a text.
    """

    def __init__(self, tokenizer: Any, before: list[int]) -> None:
        self._decode = tokenizer.decode
        self._ids = list(before[-_BEHIND:])  # enough of the prompt to know what stands before the first new token
        self._said = self._decode(self._ids)

    def add(self, token: int) -> str:
        """The text that is certain now; "" while a character is incomplete."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        return self._take(text)

    def rest(self) -> str:
        """What was held back until the end."""
        return self._take(self._decode(self._ids))

    def _take(self, text: str) -> str:
        piece = text[len(self._said) :]
        self._ids = self._ids[-_BEHIND:] if piece else self._ids
        self._said = self._decode(self._ids) if piece else self._said
        return piece


def stop_ids(stop: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a row: ids, or texts of one token each."""
    every = [stop] if isinstance(stop, int | str) else stop
    return frozenset(_one_token(tokenizer, one) if isinstance(one, str) else int(one) for one in every)


def own_stop(model: Any, tokenizer: Any) -> frozenset[int]:
    """The end tokens that the model names, else those that its tokenizer names."""
    for owner in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        token = getattr(owner, "eos_token_id", None)
        if token is not None:
            return stop_ids(token, None)
    named = getattr(tokenizer, "token_to_id", None)
    token = None if named is None else named(END)
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
