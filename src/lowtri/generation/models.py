"""Adapters that give every language model one interface: new tokens of each row in, next-token logits of each row out.

    PositionedModel     model(ids, positions=..., cache=...)       lowtri's models, anything with make_cache(batch_size)
                        model(ids, positions=...)                  without a cache: the whole row at every step
    TransformersModel   model(input_ids=..., past_key_values=...)  a causal language model of transformers
    PlainModel          model(ids)                                 any callable; rows of equal length form one batch

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

from lowtri.errors import CallError

Rows: TypeAlias = Sequence[Sequence[int]]  # new tokens of each row; none where a row has ended
Logits: TypeAlias = NDArray[np.floating]  # (B, V); undefined where a row has ended
NextLogits: TypeAlias = "TransformersModel | PositionedModel | PlainModel"


def next_logits(model: Any, rows: int, *, cached: bool, torch_ids: bool) -> NextLogits:
    """The adapter for a model.

    Args:
        rows: the batch size.
        cached: whether to use the model's cache, if it has one.
        torch_ids: whether a callable that is not a torch module takes tensors; otherwise it gets NumPy arrays.
    """
    parameters = _parameters(model)
    if "past_key_values" in parameters:
        return TransformersModel(model, parameters, cached)
    has_cache = cached and hasattr(model, "make_cache") and "cache" in parameters
    if has_cache or "positions" in parameters:
        return PositionedModel(model, parameters, rows, has_cache)
    return PlainModel(model, torch_ids or _is_module(model))


def context_of(model: Any) -> int | None:
    """The model's context length; None if it declares none."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def stepwise_cache(model: Any, rows: int, **options: Any) -> Any:
    """A cache for decoding token by token: each query sees the keys that exist, even if its mask shows later ones."""
    if "allow_missing" in inspect.signature(model.make_cache).parameters:
        options["allow_missing"] = True
    return model.make_cache(rows, **options)


class PositionedModel:
    """A model that takes positions: only the new tokens and a cache, or whole rows at every step."""

    def __init__(self, model: Any, parameters: frozenset[str], rows: int, cached: bool) -> None:
        self.model, self.options = model, _last_only(parameters)
        self.rows: list[list[int]] = []
        self.lengths = np.zeros(rows, np.int64)  # (B,) of what the cache holds
        self.cached = cached
        if cached:
            self.options["cache"] = stepwise_cache(model, rows)

    def __call__(self, new: Rows) -> Logits:
        if not self.cached:
            new = self.rows = _extended(self.rows, new)  # a row that has ended is computed again and ignored
        ids, positions = _padded(new, self.lengths)
        if self.cached:
            self.lengths += [len(row) for row in new]
        with _inference(self.model):
            out = self.model(_tensor(ids, self.model), positions=positions, **self.options)
        return _last(out, ids.shape)


class TransformersModel:
    """A causal language model of transformers, with or without its own cache."""

    def __init__(self, model: Any, parameters: frozenset[str], cached: bool) -> None:
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise CallError(
                f"generate: {type(model).__name__} is an encoder-decoder, which needs an input besides the prompt.\n"
                "Fix: a function ids -> logits that calls it with the encoder's output."
            )
        self.model, self.parameters, self.cached = model, parameters, cached
        self.cache: Any = None
        self.rows: list[list[int]] = []
        self.lengths: Any = None  # (B,)
        self.valid: Any = None  # (B, tokens so far), 1 = real

    def __call__(self, new: Rows) -> Logits:
        if not self.cached:
            new = self.rows = _extended(self.rows, new)
            self.lengths = None
        if self.lengths is None:
            self.lengths, self.valid = np.zeros(len(new), np.int64), np.zeros((len(new), 0), np.int64)
        ids, positions = _padded(new, self.lengths)
        if positions is None:
            positions = self.lengths[:, None] + np.arange(ids.shape[1])
        self.lengths = self.lengths + [len(row) for row in new]
        self.valid = np.concatenate([self.valid, (positions >= 0).astype(np.int64)], 1)
        options: dict[str, Any] = {
            "attention_mask": _tensor(self.valid, self.model),
            "position_ids": _tensor(np.maximum(positions, 0), self.model),
            "use_cache": self.cached,
        }
        if self.cache is not None:
            options["past_key_values"] = self.cache
        options = {name: value for name, value in options.items() if name in self.parameters}
        with _inference(self.model):
            out = self.model(input_ids=_tensor(ids, self.model), **options, **_last_only(self.parameters))
        self.cache = out.past_key_values if self.cached else None
        return _last(out, ids.shape)


class PlainModel:
    """Any callable ids -> logits, (B, N) to (B, N, V), or to (B, V) for the last token."""

    def __init__(self, model: Any, torch_ids: bool) -> None:
        self.model, self.torch_ids = model, torch_ids
        self.rows: list[list[int]] = []

    def __call__(self, new: Rows) -> Logits:
        self.rows = _extended(self.rows, new)
        by_length: dict[int, list[int]] = {}
        for b, row in enumerate(self.rows):
            if new[b]:
                by_length.setdefault(len(row), []).append(b)
        out: Logits | None = None
        for group in by_length.values():
            ids = np.array([self.rows[b] for b in group], np.int64)
            with _inference(self.model):
                logits = _last(self.model(_tensor(ids, self.model) if self.torch_ids else ids), ids.shape)
            out = np.zeros((len(new), logits.shape[1]), logits.dtype) if out is None else out
            out[group] = logits
        assert out is not None, "at least one row has new tokens"
        return out


def _extended(rows: list[list[int]], new: Rows) -> list[list[int]]:
    return [old + list(row) for old, row in zip(rows or [[]] * len(new), new, strict=True)]


def _padded(rows: Rows, lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Left-padded ids (B, N) and their positions, -1 at padding; None if nothing is padded and all rows are equally long."""
    sizes = np.array([len(row) for row in rows])
    n = int(sizes.max())
    ids = np.zeros((len(rows), n), np.int64)
    for b, row in enumerate(rows):
        if row:
            ids[b, n - len(row) :] = row
    ends = lengths + sizes
    if sizes.min() == n and ends.min() == ends.max():
        return ids, None
    positions = ends[:, None] - n + np.arange(n)
    return ids, np.where(np.arange(n) >= n - sizes[:, None], positions, -1)


def _parameters(model: Any) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(model.forward if _is_module(model) else model).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return frozenset()


def _last_only(parameters: frozenset[str]) -> dict[str, Any]:
    """Compute the last logits only, where the model can: the others of a long prompt are large and unused."""
    return {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}


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
