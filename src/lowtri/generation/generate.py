"""The loop from a prompt to what comes next. Of a model it asks only ids to logits, with or without a state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from lowtri.errors import CallError
from lowtri.generation.models import NextLogits, context_of, next_logits
from lowtri.generation.pieces import Pieces, encode, own_stop, stop_ids
from lowtri.generation.sampling import Sampling, choose
from lowtri.masks.arrays import in_numpy, is_tensor

__all__ = ["generate"]


def generate(
    model: Any,
    prompt: Any,
    max_new_tokens: int | None = None,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | Sequence[int] = 0,
    stop: int | str | Iterable[int | str] | None = None,
    tokenizer: Any = None,
    cached: bool = True,
) -> Iterator[Any]:
    """Continue a prompt, token by token, each as soon as it is known.

    >>> import numpy as np
    >>> from lowtri import generate
    >>> def counts(ids):  # any callable ids (B, N) -> logits (B, N, V)
    ...     return np.eye(10)[(ids + 1) % 10]
    >>> list(generate(counts, [3, 4], max_new_tokens=4))
    [5, 6, 7, 8]
    >>> list(generate(counts, [[3, 4], [8]], max_new_tokens=4, stop=7))  # rows of any length; None after a row's end
    [[5, 9], [6, 0], [None, 1], [None, 2]]

    Args:
        model: lowtri's decoder, a causal model of transformers, or any callable ids (B, N) to logits (B, N, V). A state
            (``start``, ``past_key_values``) is used where there is one. A callable that is no torch module gets ids in the
            kind that the prompt has: tensors for a tensor, else NumPy.
        prompt: ids (a list, array or tensor), or a text; or several of them, of any lengths, for a batch.
        max_new_tokens: how many at most, for each row; None: until a stop token or the end of the context.
        temperature: 0 takes the most probable token; else the logits are divided by it and a token is drawn.
        top_k, top_p: draw only among the most probable tokens: so many, or so many as reach this probability.
        seed: of the draws. Each row draws from a generator of its own, so its tokens do not depend on its neighbours; give
            one seed for each row to have a row draw what it draws alone with that seed.
        stop: tokens that end a row, ids or texts of one token each; they are not given out. Default: the end tokens that
            model or tokenizer name; ``()``: none.
        tokenizer: for texts; default ``model.tokenizer``. Of ``tokenizers`` or of transformers.
        cached: False computes everything anew for each token: the same tokens, slowly. (Only a model that peeks differs:
            where old tokens may see newer ones, computing them anew changes them.)

    Returns:
        an iterator. For one prompt: ids, or pieces of text that never split a character. For a batch: a list with one entry
        for each row, None (or "" in texts) where a row has ended.

    Raises:
        CallError: at once, if the prompt is empty or longer than the context, or an option makes no sense.
    """
    how = Sampling(temperature, top_k, top_p)
    texts, single = _texts(prompt)
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    if texts is not None and tokenizer is None:
        raise CallError("generate: the prompt is text, but there is no tokenizer. Fix: tokenizer=..., or pass ids.")
    rows, single = ([encode(tokenizer, text) for text in texts], single) if texts is not None else _ids(prompt)
    limit = _limit(rows, max_new_tokens, context_of(model))
    ends = own_stop(model, tokenizer) if stop is None else stop_ids(stop, tokenizer)
    draws = _generators(seed, len(rows))
    step = next_logits(model, len(rows), cached=cached, torch_ids=hasattr(prompt, "detach"))
    steps = _steps(step, rows, limit, how, ends, draws)
    if texts is not None:
        steps = _spoken(steps, [Pieces(tokenizer, row) for row in rows])
    return (step[0] for step in steps) if single else steps


def _steps(
    next_of: NextLogits,
    rows: list[list[int]],
    limit: int,
    how: Sampling,
    ends: frozenset[int],
    draws: list[np.random.Generator],
) -> Iterator[list[Any]]:
    """For each step one token of each row, None where the row has ended."""
    new: list[list[int]] = rows
    for _ in range(limit):
        logits = next_of(new)  # (B, V)
        chosen: list[int | None] = []
        for row, before, rng in zip(logits, new, draws, strict=True):
            token = choose(row, how, rng) if before else None
            chosen.append(None if token in ends else token)
        new = [[] if token is None else [token] for token in chosen]
        if not any(new):
            return
        yield chosen


def _spoken(steps: Iterator[list[int | None]], pieces: list[Pieces]) -> Iterator[list[str]]:
    """The same steps as text; what a row held back comes in a last step."""
    for chosen in steps:
        yield ["" if token is None else row.add(token) for row, token in zip(pieces, chosen, strict=True)]
    rest = [row.rest() for row in pieces]
    if any(rest):
        yield rest


def _texts(prompt: Any) -> tuple[list[str] | None, bool]:
    """The prompt as texts, None if it is none, and whether it was one alone."""
    if isinstance(prompt, str):
        return [prompt], True
    if isinstance(prompt, list | tuple) and prompt and all(isinstance(one, str) for one in prompt):
        return list(prompt), False
    return None, False


def _ids(prompt: Any) -> tuple[list[list[int]], bool]:
    """The prompt as rows of ids, and whether it was one alone."""
    if is_tensor(prompt):
        prompt = in_numpy("the prompt", prompt)
        if isinstance(prompt, str):
            raise CallError(f"generate: {prompt}; expected ids (N,), several of them, or text.")
    single = not (len(prompt) and np.ndim(prompt[0])) if isinstance(prompt, list | tuple) else np.ndim(prompt) == 1
    try:
        rows = [np.asarray(row) for row in ([prompt] if single else prompt)]
    except (TypeError, ValueError):
        rows = [np.asarray(None)]
    if any(row.ndim != 1 or (row.size and row.dtype.kind not in "iu") for row in rows):
        raise CallError(
            f"generate: the prompt is {type(prompt).__name__} of {rows[0].dtype} {rows[0].shape}; "
            "expected ids (N,), several of them, or text."
        )
    return [row.tolist() for row in rows], single


def _limit(rows: list[list[int]], wanted: int | None, context: int | None) -> int:
    """How many tokens to make at most."""
    if not rows or not all(rows):
        raise CallError("generate: the prompt is empty, and a model continues at least one token. Fix: a begin token.")
    longest = max(map(len, rows))
    if context is not None and longest > context:
        raise CallError(
            f"generate: the prompt has {longest} tokens, but the model's context has {context} places.\n"
            f"Fix: a shorter prompt (its last {context} tokens), or a model with a longer context."
        )
    if wanted is None:
        if context is None:
            raise CallError("generate: the model names no context, so say when to end. Fix: max_new_tokens=...")
        return context - longest + 1  # the last token is not fed back, and needs no place
    if wanted < 0 or wanted != int(wanted):
        raise CallError(f"generate: max_new_tokens is {wanted}; it counts tokens, at least 0.")
    if context is not None and longest + wanted - 1 > context:
        raise CallError(
            f"generate: a prompt of {longest} tokens and {wanted} new ones do not fit the context of {context} places.\n"
            f"Fix: max_new_tokens at most {context - longest + 1}, or None for as many as fit."
        )
    return int(wanted)


def _generators(seed: int | Sequence[int], rows: int) -> list[np.random.Generator]:
    """One for each row: row 0 of a single seed draws what a single prompt draws with it."""
    if isinstance(seed, int | np.integer):
        pairs = [(int(seed), b) for b in range(rows)]
    elif len(seed) == rows:
        pairs = [(int(one), 0) for one in seed]
    else:
        raise CallError(f"generate: {len(seed)} seeds for {rows} rows. Fix: one seed, or one for each row.")
    if any(one < 0 for one, _ in pairs):
        raise CallError(f"generate: seed is {seed}; it is a whole number, at least 0.")
    return [np.random.default_rng(pair) for pair in pairs]
