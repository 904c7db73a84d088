"""How to ask any model for the next logits, in one way: new tokens of each row in, one row of logits each out.

    Stateful      model(ids, state=..., positions=...)    lowtri's decoder, anything with start(batch_size)
    Transformers  model(input_ids=..., past_key_values=...)   a causal language model of transformers
    Placed        model(ids, positions=...)               a decoder without its state: the whole row every time
    Plain         model(ids)                              any callable; rows of equal length go together

Rows of different lengths share a batch by padding on the left, and a pad is a token at place -1 (an attention mask of 0 for
transformers). What only takes ids has no way to be told, so there each length is asked on its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError

__all__ = ["Asker", "asker", "context_of", "start_stepwise"]

Rows = Sequence[Sequence[int]]  # new tokens of each row; a row that has ended brings none
Logits = NDArray[np.floating]  # (B, V); at a row that has ended, whatever


class Asker(Protocol):
    def __call__(self, new: Rows) -> Logits: ...


def asker(model: Any, rows: int, *, cached: bool, torch_ids: bool) -> Asker:
    """The way to ask this model.

    Args:
        rows: how many rows there will be.
        cached: whether to use a state where the model has one.
        torch_ids: whether a model that is no module of torch takes tensors; else it gets NumPy arrays.
    """
    takes = _arguments(model)
    if "past_key_values" in takes:
        return Transformers(model, takes, cached)
    if cached and hasattr(model, "start") and "state" in takes:
        return Stateful(model, takes, rows)
    if "positions" in takes:
        return Placed(model, takes)
    return Plain(model, torch_ids or _is_module(model))


def context_of(model: Any) -> int | None:
    """How many places the model has; None if it does not say."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def start_stepwise(model: Any, rows: int, **options: Any) -> Any:
    """A state in which each token sees those that are there, even under a mask that shows the future.

    That is what generating does to a model that was trained to see it, and what measuring such a model step by step is for.
    """
    takes = inspect.signature(model.start).parameters
    return model.start(rows, **options, **({"allow_missing": True} if "allow_missing" in takes else {}))


class Stateful:
    """Only the new tokens are passed; the state remembers the rest."""

    def __init__(self, model: Any, takes: frozenset[str], rows: int) -> None:
        self.model, self.state = model, start_stepwise(model, rows)
        self.seen = np.zeros(rows, np.int64)
        self.options = _last_only(takes)

    def __call__(self, new: Rows) -> Logits:
        ids, places = _padded(new, self.seen)
        self.seen += [len(row) for row in new]
        with _quiet(self.model):
            out = self.model(_tensor(ids, self.model), state=self.state, positions=places, **self.options)
        return _last(out, ids.shape)


class Placed:
    """The whole rows every time, with their places."""

    def __init__(self, model: Any, takes: frozenset[str]) -> None:
        self.model, self.all = model, []  # type: Any, list[list[int]]
        self.options = _last_only(takes)

    def __call__(self, new: Rows) -> Logits:
        self.all = [old + list(row) for old, row in zip(self.all or [[]] * len(new), new, strict=True)]
        # Left padding puts every row's newest token last; a row that has ended is asked about again, and not heard.
        ids, places = _padded(self.all, np.zeros(len(new), np.int64))
        with _quiet(self.model):
            out = self.model(_tensor(ids, self.model), positions=places, **self.options)
        return _last(out, ids.shape)


class Transformers:
    """A causal language model of transformers, with its own cache or without any."""

    def __init__(self, model: Any, takes: frozenset[str], cached: bool) -> None:
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise CallError(
                f"generate: {type(model).__name__} is an encoder-decoder, which needs an input besides the prompt.\n"
                "Fix: a function ids -> logits that calls it with the encoder's output."
            )
        self.model, self.takes, self.cached = model, takes, cached
        self.past: Any = None
        self.all: list[list[int]] = []
        self.seen: Any = None  # (B,)
        self.valid: Any = None  # (B, tokens so far), 1 = real

    def __call__(self, new: Rows) -> Logits:
        if not self.cached:
            self.all = [old + list(row) for old, row in zip(self.all or [[]] * len(new), new, strict=True)]
            new, self.seen, self.valid = self.all, None, None
        if self.seen is None:
            self.seen, self.valid = np.zeros(len(new), np.int64), np.zeros((len(new), 0), np.int64)
        ids, places = _padded(new, self.seen)
        if places is None:
            places = self.seen[:, None] + np.arange(ids.shape[1])
        self.seen = self.seen + [len(row) for row in new]
        self.valid = np.concatenate([self.valid, (places >= 0).astype(np.int64)], 1)
        options: dict[str, Any] = {
            "attention_mask": _tensor(self.valid, self.model),
            "position_ids": _tensor(np.maximum(places, 0), self.model),
            "use_cache": self.cached,
        }
        if self.past is not None:
            options["past_key_values"] = self.past
        options = {name: value for name, value in options.items() if name in self.takes} | _last_only(self.takes)
        with _quiet(self.model):
            out = self.model(input_ids=_tensor(ids, self.model), **options)
        self.past = out.past_key_values if self.cached else None
        return _last(out, ids.shape)


class Plain:
    """Any callable ids -> logits, (B, N) to (B, N, V) or to (B, V) for the last token alone."""

    def __init__(self, model: Any, torch_ids: bool) -> None:
        self.model, self.torch_ids = model, torch_ids
        self.all: list[list[int]] = []

    def __call__(self, new: Rows) -> Logits:
        self.all = [old + list(row) for old, row in zip(self.all or [[]] * len(new), new, strict=True)]
        lengths: dict[int, list[int]] = {}
        for b, row in enumerate(self.all):
            if new[b]:
                lengths.setdefault(len(row), []).append(b)
        out: Logits | None = None
        for group in lengths.values():
            ids = np.array([self.all[b] for b in group], np.int64)
            with _quiet(self.model):
                found = _last(self.model(_tensor(ids, self.model) if self.torch_ids else ids), ids.shape)
            out = np.zeros((len(new), found.shape[1]), found.dtype) if out is None else out
            out[group] = found
        assert out is not None, "at least one row brings tokens"
        return out


def _padded(rows: Rows, seen: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Ids (B, N) padded on the left, and their places, -1 at pads; None where no row has a pad and all stand alike."""
    sizes = np.array([len(row) for row in rows])
    n = int(sizes.max())
    ids = np.zeros((len(rows), n), np.int64)
    for b, row in enumerate(rows):
        if row:
            ids[b, n - len(row) :] = row
    ends = seen + sizes
    if sizes.min() == n and ends.min() == ends.max():
        return ids, None
    places = ends[:, None] - n + np.arange(n)
    return ids, np.where(np.arange(n) >= n - sizes[:, None], places, -1)


def _arguments(model: Any) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(model.forward if _is_module(model) else model).parameters)
    except (TypeError, ValueError):  # a builtin that does not say
        return frozenset()


def _last_only(takes: frozenset[str]) -> dict[str, int]:
    """Ask for the last logits only, where a model can: the others of a long prompt are large and unused."""
    return {"logits_to_keep": 1} if "logits_to_keep" in takes else {}


def _is_module(model: Any) -> bool:
    return hasattr(model, "forward") and hasattr(model, "parameters")


def _tensor(ids: NDArray[np.int64], model: Any) -> Any:
    import torch

    device = next((p.device for p in model.parameters()), None) if _is_module(model) else None
    return torch.from_numpy(ids).to(device) if device is not None else torch.from_numpy(ids)


@contextmanager
def _quiet(model: Any) -> Iterator[None]:
    """No gradients and no dropout, for one step: whoever iterates finds everything as it was."""
    if _is_module(model):
        import torch

        loud = [part for part in model.modules() if part.training] if model.training else []
        grad: Any = torch.no_grad()
    else:
        loud, grad = [], nullcontext()
    for part in loud:
        part.training = False
    try:
        with grad:
            yield
    finally:
        for part in loud:
            part.training = True


def _last(out: Any, shape: tuple[int, ...]) -> Logits:
    """The logits of each row's last token as NumPy (B, V), from what a model gave for ids of this shape."""
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
