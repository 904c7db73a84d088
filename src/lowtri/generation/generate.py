"""The generation loop: from a prompt and a model, with or without a cache, to new tokens, as ids or as text."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.generation.models import NextLogits, context_of
from lowtri.masks.arrays import in_numpy, is_tensor
from lowtri.masks.tile import check_flag, short_repr

if TYPE_CHECKING:
    from typing import TypedDict

    from torch import Tensor
    from typing_extensions import Unpack

    class Options(TypedDict, total=False):
        """The keyword arguments of :func:`generate`."""

        temperature: float
        top_k: int | None
        top_p: float | None
        seed: int | Sequence[int]
        stop: int | str | Iterable[int | str] | None
        tokenizer: Any
        cached: bool
        cache: Any


_END = "<|end|>"  # what ends a document for the tokenizers of examples/train
_CONTEXT = 8  # earlier tokens that are decoded again with each new one


# The kind of result depends on the prompt: one text, several texts, one row of ids, several rows, an array of either.
@overload
def generate(
    model: Any, prompt: str, max_new_tokens: int | None = None, **options: Unpack[Options]
) -> Iterator[str]: ...
@overload
def generate(
    model: Any, prompt: list[str] | tuple[str, ...], max_new_tokens: int | None = None, **options: Unpack[Options]
) -> Iterator[list[str]]: ...
@overload
def generate(
    model: Any, prompt: list[int] | tuple[int, ...], max_new_tokens: int | None = None, **options: Unpack[Options]
) -> Iterator[int]: ...
@overload
def generate(
    model: Any,
    prompt: Sequence[Sequence[int]] | Sequence[NDArray[Any]] | Sequence[Tensor],
    max_new_tokens: int | None = None,
    **options: Unpack[Options],
) -> Iterator[list[int | None]]: ...
@overload
def generate(
    model: Any, prompt: NDArray[Any] | Tensor, max_new_tokens: int | None = None, **options: Unpack[Options]
) -> Iterator[int] | Iterator[list[int | None]]: ...
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
    cache: Any = None,
) -> Iterator[Any]:
    """Generate the continuation of a prompt, token by token.

    >>> import numpy as np
    >>> from lowtri import generate
    >>> def counts(ids):  # any callable ids (B, N) -> logits (B, N, V)
    ...     return np.eye(10)[(ids + 1) % 10]
    >>> list(generate(counts, [3, 4], max_new_tokens=4))
    [5, 6, 7, 8]
    >>> list(generate(counts, [[3, 4], [8]], max_new_tokens=4, stop=7))  # rows of any length; None after a row's end
    [[5, 9], [6, 0], [None, 1], [None, 2]]

    Args:
        model: lowtri's decoder, a causal model of transformers, or any callable from ids (B, N) to logits (B, N, V). If the model
            has a cache (``make_cache``, or transformers' ``cache``), it is used. A callable that is not a torch module gets
            tensors if the prompt is a tensor, otherwise NumPy arrays.
        prompt: ids (a list, array or tensor) or text; for a batch, several prompts of any lengths.
        max_new_tokens: the limit for each row; None: generate until a stop token or the end of the context.
        temperature: 0 is greedy decoding; otherwise the logits are divided by it and a token is sampled.
        top_k, top_p: sample only among the ``top_k`` most probable tokens, or the fewest whose probabilities reach ``top_p``.
        seed: the random seed, or one seed for each row. Each row has its own generator, so its tokens do not depend on the other
            rows. With one seed for each row, a row gets the same tokens as when it is generated alone with that seed.
        stop: tokens that end a row, as ids or as texts of one token each; they are not returned. Default: the end-of-sequence
            tokens of the model or tokenizer; ``()``: no stop tokens.
        tokenizer: a tokenizer of ``tokenizers`` or transformers, for prompts given as text; default ``model.tokenizer``.
        cached: False recomputes the whole sequence for each token, which is slower and gives the same tokens, except for a model
            whose mask shows later tokens: there recomputing changes earlier positions.
        cache: an empty cache that the model takes, to be used instead of its own: ``EvictingCache(model)`` of
            ``lowtri.integrations.transformers``, ``model.make_cache(rows)`` of lowtri's models.

    Returns:
        an iterator. For one prompt: ids, or pieces of text, which never split a character. For a batch: a list with one entry
        for each row, None (or "" in texts) where a row has ended.

    Raises:
        CallError: before the first token, if the prompt is empty or longer than the context, or an option is invalid.
    """
    if not callable(model):
        raise CallError(
            f"generate: model is {short_repr(model)}. Fix: a model, or a function from ids (B, N) to logits (B, N, V)."
        )
    cached = check_flag("generate", "cached", cached)
    sampling = Sampling(temperature, top_k, top_p)
    texts, single = _texts(prompt)
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    if texts is not None and tokenizer is None:
        raise CallError("generate: the prompt is text, but there is no tokenizer. Fix: tokenizer=..., or pass ids.")
    rows, single = ([encode(tokenizer, text) for text in texts], single) if texts is not None else _ids(prompt)
    limit = _limit(rows, max_new_tokens, context_of(model))
    ends = own_stop(model, tokenizer) if stop is None else stop_ids(stop, tokenizer)
    generators = _generators(seed, len(rows))
    step = NextLogits(model, len(rows), cached=cached, torch_ids=hasattr(prompt, "detach"), cache=cache)
    steps = _steps(step, rows, limit, sampling, ends, generators)
    if texts is not None:
        steps = _as_text(steps, [Pieces(tokenizer, row) for row in rows])
    return (step[0] for step in steps) if single else steps


def _steps(
    model: NextLogits,
    rows: list[list[int]],
    limit: int,
    sampling: Sampling,
    ends: frozenset[int],
    generators: list[np.random.Generator],
) -> Iterator[list[Any]]:
    """Yield one token of each row per step, None where the row has ended."""
    new: list[list[int]] = rows
    for _ in range(limit):
        logits = model(new)  # (B, V)
        chosen: list[int | None] = []
        for row, previous, rng in zip(logits, new, generators, strict=True):
            token = next_token(row, sampling, rng) if previous else None
            chosen.append(None if token in ends else token)
        new = [[] if token is None else [token] for token in chosen]
        if not any(new):
            return
        yield chosen


def _as_text(steps: Iterator[list[int | None]], pieces: list[Pieces]) -> Iterator[list[str]]:
    """Steps of tokens as steps of text; the last step yields the buffered text."""
    for chosen in steps:
        yield ["" if token is None else row.add(token) for row, token in zip(pieces, chosen, strict=True)]
    rest = [row.rest() for row in pieces]
    if any(rest):
        yield rest


def _texts(prompt: Any) -> tuple[list[str] | None, bool]:
    """The prompt as texts, None if it is not text, and whether it was a single one."""
    if isinstance(prompt, str):
        return [prompt], True
    if isinstance(prompt, list | tuple) and prompt and all(isinstance(text, str) for text in prompt):
        return list(prompt), False
    return None, False


def _ids(prompt: Any) -> tuple[list[list[int]], bool]:
    """The prompt as rows of ids, and whether it was a single one."""
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


def _limit(rows: list[list[int]], max_new_tokens: int | None, context: int | None) -> int:
    """The number of steps at most."""
    if not rows or not all(rows):
        raise CallError("generate: the prompt is empty, but a model needs at least one token. Fix: a begin token.")
    longest = max(map(len, rows))
    if context is not None and longest > context:
        raise CallError(
            f"generate: the prompt has {longest} tokens, but the model's context has {context} positions.\n"
            f"Fix: a shorter prompt (its last {context} tokens), or a model with a longer context."
        )
    if max_new_tokens is None:
        if context is None:
            raise CallError("generate: the model declares no context length. Fix: max_new_tokens=...")
        return context - longest + 1  # the last token is not fed back and needs no position
    if not isinstance(max_new_tokens, int | float | np.number) or not 0 <= max_new_tokens < 2**62 or max_new_tokens % 1:
        raise CallError(f"generate: max_new_tokens is {short_repr(max_new_tokens)}; it counts tokens, at least 0.")
    if context is not None and longest + max_new_tokens - 1 > context:
        raise CallError(
            f"generate: a prompt of {longest} tokens and {max_new_tokens} new ones do not fit the context of {context} positions.\n"
            f"Fix: max_new_tokens at most {context - longest + 1}, or None to fill the context."
        )
    return int(max_new_tokens)


def _generators(seed: int | Sequence[int], rows: int) -> list[np.random.Generator]:
    """One for each row; row 0 of a single seed samples what a single prompt samples with it."""
    if isinstance(seed, int | np.integer):
        pairs = [(int(seed), b) for b in range(rows)]
    elif not isinstance(seed, Sequence | np.ndarray) or np.ndim(seed) != 1:
        raise CallError(f"generate: seed is {seed!r:.60}; it is an integer, at least 0, or one for each row.")
    elif len(seed) == rows:
        pairs = [(int(row_seed), 0) for row_seed in seed]
    else:
        raise CallError(f"generate: {len(seed)} seeds for {rows} rows. Fix: one seed, or one for each row.")
    if any(row_seed < 0 for row_seed, _ in pairs):
        raise CallError(f"generate: seed is {seed}; it is an integer, at least 0.")
    return [np.random.default_rng(pair) for pair in pairs]


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float | np.integer | np.floating)


def _is_count(x: Any) -> bool:
    return _is_number(x) and 1 <= x < float("inf") and bool(x == int(x))


@dataclass(frozen=True)
class Sampling:
    """The checked sampling options of :func:`lowtri.generate`.

    Raises:
        CallError: if an option is out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < float("inf"):
            raise CallError(
                f"temperature is {self.temperature}; expected a number, at least 0. "
                "Fix: 0 for greedy decoding, 1 for the model's own probabilities."
            )
        if self.top_k is not None and not _is_count(self.top_k):
            raise CallError(f"top_k is {self.top_k}; it counts tokens, at least 1. Fix: top_k=None keeps all.")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise CallError(
                f"top_p is {self.top_p}; expected a probability above 0, at most 1. Fix: top_p=None keeps all."
            )


# From the logits (V,) of one row to one token. In NumPy float64: the cost is small compared with a model's step, and a seed gives the
# same samples on every device.


def keep_top_k(logits: NDArray[np.floating], k: int) -> NDArray[np.floating]:
    """Keep the ``k`` greatest logits; ties go to the smaller ids.

    >>> keep_top_k(np.array([1.0, 3.0, 2.0, 3.0]), 2).tolist()
    [-inf, 3.0, -inf, 3.0]

    Source: Fan, Lewis and Dauphin 2018.
    """
    if k >= len(logits):
        return logits
    least = np.partition(logits, -k)[-k]  # the k-th greatest
    keep = logits > least
    equal = np.flatnonzero(logits == least)
    keep[equal[: k - np.count_nonzero(keep)]] = True
    return np.where(keep, logits, -np.inf)


def keep_top_p(logits: NDArray[np.floating], p: float) -> NDArray[np.floating]:
    """Keep the smallest set of most probable tokens whose probabilities sum to at least ``p``.

    >>> keep_top_p(np.log([0.5, 0.3, 0.2]), 0.7).round(2).tolist()
    [-0.69, -1.2, -inf]

    Source: nucleus sampling, Holtzman et al. 2020.
    """
    order = np.argsort(-logits, kind="stable")
    sums = np.cumsum(softmax(logits)[order])
    count = int(np.searchsorted(sums, p * sums[-1] * (1 - 1e-12))) + 1  # rounding must not add a token
    out = np.full_like(logits, -np.inf)
    out[order[:count]] = logits[order[:count]]
    return out


def softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Probabilities (V,), float64, computed stably."""
    with np.errstate(under="ignore"):  # a probability too small for a float is 0
        weights = np.exp(np.asarray(logits, np.float64) - logits.max())
    return weights / weights.sum()


def sample(probabilities: NDArray[np.float64], rng: np.random.Generator) -> int:
    """Sample one token by inverting the cumulative distribution; a token of probability 0 is never sampled."""
    sums = np.cumsum(probabilities)
    return int(np.searchsorted(sums, rng.random() * sums[-1], side="right"))


def next_token(logits: NDArray[np.floating], sampling: Sampling, rng: np.random.Generator) -> int:
    """The next token of one row: at temperature 0 the most probable (the first of ties), else a sample.

    Raises:
        CallError: if the logits hold NaN or +inf, or hide every token.
    """
    best = int(np.argmax(logits))  # NumPy's argmax finds NaN first
    if not np.isfinite(logits[best]):
        what = "hide every token (all are -inf)" if logits[best] == -np.inf else f"hold {logits[best]} at token {best}"
        raise CallError(f"generate: the model's logits {what}, so no token can be chosen.")
    if sampling.temperature == 0:
        return best
    filtered = (np.asarray(logits, np.float64) - logits[best]) / sampling.temperature
    if sampling.top_k is not None:
        filtered = keep_top_k(filtered, sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        filtered = keep_top_p(filtered, sampling.top_p)
    return sample(softmax(filtered), rng)


# Text, by a tokenizer of ``tokenizers`` or transformers.


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
        self._decode = partial(tokenizer.decode, skip_special_tokens=True)  # by default only transformers shows them
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
    stops = [stop] if isinstance(stop, int | np.integer | str) else stop
    try:
        stops = [token if isinstance(token, str) else operator.index(token) for token in stops]
    except TypeError:
        raise CallError(
            f"generate: stop is {short_repr(stop)}; expected ids of tokens or texts of one token each."
        ) from None
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
