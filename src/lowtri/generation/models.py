"""Gives every language model one interface: new tokens of each row in, next-token logits of each row out.

    model(input_ids=..., cache=...)            a causal language model of transformers (before 5.24 past_key_values, cache_params)
    model(ids, positions=..., cache=...)       lowtri's models, anything with make_cache(batch_size)
    model(ids, positions=...)                  without a cache: the whole row at every step
    model(ids)                                 any callable; rows of equal length form one batch

Rows of different lengths share a batch by left padding, with position -1 (transformers: attention mask 0). A plain callable
cannot mark padding, so rows of each length are a separate call.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtri.compat.model_caches import cache_argument, cache_of, cached_length, needs_whole_mask
from lowtri.errors import CallError

Rows: TypeAlias = Sequence[Sequence[int]]  # new tokens of each row; none where a row has ended
Logits: TypeAlias = NDArray[np.floating]  # (B, V); undefined where a row has ended


def context_of(model: Any) -> int | None:
    """The model's context length; None if it declares none."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def stepwise_cache(model: Any, rows: int, **options: Any) -> Any:
    """A cache for decoding token by token: each query sees the keys that exist, even if its mask shows later ones."""
    if "allow_missing" in inspect.signature(model.make_cache).parameters:
        options["allow_missing"] = True
    return model.make_cache(rows, **options)


class NextLogits:
    """A model, called with the new tokens of each row; it holds what the model needs of the tokens before them.

    Args:
        rows: the batch size.
        cached: whether to use the model's cache, if it has one.
        torch_ids: whether a callable that is not a torch module takes tensors; otherwise it gets NumPy arrays.
        cache: an empty cache to use; None for one that the model makes.
    """

    def __init__(self, model: Any, rows: int, *, cached: bool, torch_ids: bool, cache: Any = None) -> None:
        self.model, self._names = model, _parameters(model)
        self._cache_name = cache_argument(self._names, model)
        self._of_transformers = self._cache_name is not None
        if self._of_transformers and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise CallError(
                f"generate: {type(model).__name__} is an encoder-decoder, which needs an input besides the prompt.\n"
                "Fix: a function ids -> logits that calls it with the encoder's output."
            )
        own_cache = cached and not self._of_transformers and hasattr(model, "make_cache") and "cache" in self._names
        self._cached = own_cache or (cached and self._of_transformers)
        self._pads = own_cache or self._of_transformers or "positions" in self._names
        self._torch_ids = torch_ids or self._pads or _is_module(model)
        # Of a long prompt, the logits of other tokens than the last are large and unused.
        self._options: dict[str, Any] = {"logits_to_keep": 1} if self._pads and "logits_to_keep" in self._names else {}
        if cache is not None:
            self._options[self._cache_name or "cache"] = _checked_cache(model, cache, self._cached)
        elif own_cache:
            self._options["cache"] = stepwise_cache(model, rows)
        self._rows: list[list[int]] = [[] for _ in range(rows)]  # without a cache: all tokens
        self._lengths = np.zeros(rows, np.int64)  # (B,) of what the cache holds
        self._valid = np.zeros((rows, 0), np.int64)  # (B, tokens in transformers' cache), 1 = real
        self._mask_is_whole = True  # whether the model takes the padding mask of all tokens so far, or of the new ones

    def __call__(self, new: Rows) -> Logits:
        if self._cached:
            return self._batch(new)
        self._rows = [old + list(row) for old, row in zip(self._rows, new, strict=True)]
        if self._pads:
            return self._batch(self._rows)  # a row that has ended is computed again and ignored
        by_length: dict[int, list[int]] = {}
        for b, row in enumerate(self._rows):
            if new[b]:
                by_length.setdefault(len(row), []).append(b)
        parts: dict[int, Logits] = {}
        for group in by_length.values():
            ids = np.array([self._rows[b] for b in group], np.int64)
            parts.update(zip(group, self._run(ids), strict=True))
        ended = np.zeros_like(next(iter(parts.values())))
        return np.stack([parts.get(b, ended) for b in range(len(new))])

    def _batch(self, rows: Rows) -> Logits:
        """All rows, left-padded."""
        sizes = np.array([len(row) for row in rows])
        n = int(sizes.max())
        ids = np.zeros((len(rows), n), np.int64)
        for b, row in enumerate(rows):
            ids[b, n - len(row) :] = row
        positions = (self._lengths + sizes - n)[:, None] + np.arange(n)
        positions[np.arange(n) < n - sizes[:, None]] = -1  # (B, N)
        valid = np.concatenate([self._valid, (positions >= 0).astype(np.int64)], 1)
        if self._cached:
            self._lengths, self._valid = self._lengths + sizes, valid
        if not self._of_transformers:
            differ = positions[0, 0] < 0 or (positions != positions[:1]).any()
            return self._run(ids, positions=positions if differ else None)
        if self._cached and not self._mask_is_whole:
            valid = valid[:, -n:]
        options = {
            "attention_mask": _tensor(valid, self.model),
            "position_ids": _tensor(np.maximum(positions, 0), self.model),
            "use_cache": self._cached,
        }
        return self._run(ids, **{name: value for name, value in options.items() if name in self._names})

    def _run(self, ids: NDArray[np.int64], **options: Any) -> Logits:
        given: Any = _tensor(ids, self.model) if self._torch_ids else ids
        with _inference(self.model):
            if not self._of_transformers:
                return _last(self.model(given, **options, **self._options), ids.shape)
            out = self.model(input_ids=given, **options, **self._options)
        if self._cached:
            self._keep(out)
        return _last(out, ids.shape)

    def _keep(self, out: Any) -> None:
        """Keep the cache that a model of transformers returns, for its next call."""
        found = cache_of(out)
        if found is None:
            raise CallError(
                f"generate: {type(self.model).__name__} takes {self._cache_name}, but returned no cache for use_cache=True.\n"
                "Fix: cached=False, which computes the whole row for each token."
            )
        name, cache = found
        self._options[str(self._cache_name)] = cache
        self._mask_is_whole = needs_whole_mask(cache, name)


def _checked_cache(model: Any, cache: Any, cached: bool) -> Any:
    """The user's cache, if it is empty and the model takes one."""
    name = type(model).__name__
    if not cached:
        raise CallError(f"generate: got cache=, but {name} takes none, or cached is False.\nFix: no cache=.")
    length = getattr(cache, "length", None) if cached_length(cache) is None else cached_length(cache)
    if length:
        raise CallError(
            f"generate: the cache holds {length} tokens, but the prompt begins at position 0.\nFix: a new cache, or cache.reset()."
        )
    return cache


def _parameters(model: Any) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(model.forward if _is_module(model) else model).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return frozenset()


def _is_module(model: Any) -> bool:
    return hasattr(model, "forward") and hasattr(model, "parameters")


def _tensor(ids: NDArray[np.int64], model: Any) -> Any:
    import torch

    device = next((p.device for p in model.parameters()), None) if _is_module(model) else None
    return torch.from_numpy(ids).to(device) if device is not None else torch.from_numpy(ids)


@contextmanager
def _inference(model: Any) -> Iterator[None]:
    """No gradients and no dropout for one step; both are restored before the caller of the iterator continues."""
    if _is_module(model):
        import torch

        training = [part for part in model.modules() if part.training] if model.training else []
        no_grad: Any = torch.no_grad()
    else:
        training, no_grad = [], nullcontext()
    for part in training:
        part.training = False
    try:
        with no_grad:
            yield
    finally:
        for part in training:
            part.training = True


def _last(out: Any, shape: tuple[int, ...]) -> Logits:
    """The logits of each row's last token as NumPy (B, V), from a model's output for ids of this shape."""
    out = getattr(out, "logits", out[0] if isinstance(out, tuple) else out)
    size = tuple(getattr(out, "shape", ()))
    if len(size) == 3 and size[0] == shape[0]:
        out = out[:, -1]
    elif len(size) != 2 or size[0] != shape[0]:
        what = f"{type(out).__name__} {size}" if size else type(out).__name__
        raise CallError(
            f"generate: for ids {shape} the model gave {what}; expected logits (B, N, V), or (B, V) of the last token."
        )
    if hasattr(out, "detach"):
        out = out.detach()
        out = (out.float() if out.element_size() < 4 else out).cpu().numpy()
    return np.asarray(out)
