"""A training step through the shards of a plan, one after the other: the keys that shards keep for later ones, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtri.errors import CallError
from lowtri.parallel.earlier import EarlierKeys, Source
from lowtri.parallel.runs import Ints

__all__ = ["Layer", "SequentialStep"]


class SequentialStep:
    """A training step: the shard that is computed, and the layers, which are numbered by their calls of attention."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.keeps, self.running = True, False
        self.shard = self._calls = 0
        self._complete = False  # the first shard has made all its calls

    def begin(self, shard: int) -> None:
        self.shard, self._calls, self.running = shard, 0, True

    def end(self) -> None:
        self.running = False
        if self._calls != len(self.layers):
            raise self._error(f"{self._calls}, but an earlier one {len(self.layers)}")
        self._complete = True

    def next_layer(self, earlier: EarlierKeys) -> Layer:
        if not self._complete:
            self.layers.append(Layer(earlier))
        elif self._calls == len(self.layers):
            raise self._error(f"more than {len(self.layers)}, the number of an earlier one")
        layer = self.layers[self._calls]
        self._calls += 1
        if layer.keys is not earlier:
            raise self._error(f"call {self._calls} with another mask than an earlier one")
        return layer

    def value(self, loss: Any) -> Tensor:
        """The loss of one shard, a tensor ()."""
        if isinstance(loss, Tensor) and loss.numel() == 1 and (loss.requires_grad or not torch.is_grad_enabled()):
            return loss.reshape(())
        came = f"{tuple(loss.shape)}, requires_grad={loss.requires_grad}" if isinstance(loss, Tensor) else type(loss)
        raise CallError(
            f"SequentialShards: loss() returned {came}, but the loss of a shard is one number, for backward() with a gradient.\n"
            "Fix: a sum over tokens, for backward() without torch.no_grad()."
        )

    def backward(self, loss: Any, shard: int) -> Tensor:
        """The backward of one shard, and its loss without the graph."""
        outputs: list[Tensor] = [self.value(loss)]
        d_outputs: list[Tensor | None] = [None]
        for layer in self.layers:
            for x, d_x in layer.gradients_of_others(shard):
                outputs.append(x)
                d_outputs.append(d_x)
        torch.autograd.backward(outputs, d_outputs)
        for layer in self.layers:
            layer.add_gradients()
        return outputs[0].detach()

    def _error(self, what: str) -> CallError:
        return CallError(
            f"SequentialShards: the calls of attention in shard {self.shard} are {what}.\n"
            "Fix: a function that makes the same calls for each shard."
        )


class Layer:
    """One call of attention of each shard, with the keys and values that shards take from earlier ones."""

    def __init__(self, keys: EarlierKeys) -> None:
        self.keys = keys
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # of each shard what others see: (B, Hkv, tokens, D or Dv)
        self._d_kept: dict[int, tuple[Tensor, Tensor]] = {}  # their gradients so far, at least in float32
        self._own: tuple[Tensor, ...] = ()  # what later shards saw of the current one, in its graph
        self._taken: list[tuple[Source, Tensor, Tensor]] = []

    def join(self, step: SequentialStep, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Ints]]:
        """All keys and values that the current shard sees, and the positions of those before its own."""
        index = self.keys.kept[step.shard]
        if step.keeps:
            if len(index):
                self._kept[step.shard] = _select(k.detach(), index), _select(v.detach(), index)
        else:
            self._kept.pop(step.shard, None)  # later shards are done
            self._own = (_select(k, index), _select(v, index)) if step.shard in self._d_kept else ()
        sources, taken = self.keys.sources(step.shard), []
        for one in sources:
            keys, values = (_select(x, one.indices) for x in self._kept[one.shard])
            taken.append((one, keys, values))
        if torch.is_grad_enabled():
            self._taken = [(one, keys.requires_grad_(), values.requires_grad_()) for one, keys, values in taken]
        if taken:
            k = torch.cat([*(keys for _, keys, _ in taken), k], 2)  # (B, Hkv, Nk, D)
            v = torch.cat([*(values for _, _, values in taken), v], 2)  # (B, Hkv, Nk, Dv)
        return k, v, [one.positions for one in sources]

    def gradients_of_others(self, shard: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of a shard that later ones saw, and their gradients from there."""
        pairs = zip(self._own, self._d_kept.pop(shard, ()), strict=False)
        self._own = ()
        return [(x, d_x.to(x.dtype)) for x, d_x in pairs if x.requires_grad]

    def add_gradients(self) -> None:
        """Add the gradients that the current shard has for keys and values of earlier ones."""
        for source, *taken in self._taken:
            if source.shard not in self._d_kept:
                self._d_kept[source.shard] = tuple(_zeros(x) for x in self._kept[source.shard])  # type: ignore[assignment]
            index = torch.from_numpy(source.indices).to(taken[0].device)
            for total, x in zip(self._d_kept[source.shard], taken, strict=True):
                if x.grad is not None:
                    total.index_add_(2, index, x.grad.to(total.dtype))
        self._taken = []


def _select(x: Tensor, index: Ints) -> Tensor:
    """Tokens of ``x`` (B, H, N, D), as a tensor of their own."""
    return x.index_select(2, torch.from_numpy(index).to(x.device))


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
