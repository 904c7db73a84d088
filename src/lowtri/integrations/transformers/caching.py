"""lowtri's key/value cache for models of transformers: it evicts what the mask hides from every later query.

    model = use(switch(model), mask="causal & (window(1024) | first(4))")
    model.generate(ids, cache=EvictingCache(model))    # past_key_values= before transformers 5.24

A forward begins with :meth:`EvictingCache.begin`, which says where its tokens stand. Each layer appends its keys and values to the
:class:`lowtri.KVCache` of the layers with the same mask, and its queries read that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from lowtri.errors import CallError
from lowtri.generation.cache import KVCache
from lowtri.integrations.dense_mask import LazyMask
from lowtri.integrations.transformers.masks import without_shift
from lowtri.integrations.transformers.traced_cache import append_keys, new_state
from lowtri.integrations.transformers.user_masks import check_switched, unwrapped
from lowtri.masks.formulas import causal, window
from lowtri.masks.label_masks import chunks
from lowtri.masks.mask import And, Mask
from lowtri.ops.call import CallOptions

_NAME = "EvictingCache"
_LAYER = "lowtri_layer"  # an attribute of new keys: the layer that appends them


class EvictingCache(transformers.Cache):  # type: ignore[misc,unused-ignore]
    """A key/value cache for a switched model of transformers; it evicts keys that no later query can see.

    >>> import lowtri, transformers as tf
    >>> from lowtri.integrations.transformers import EvictingCache, switch, use
    >>> size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    >>> model = switch(tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=99, **size)).eval())
    >>> cache = EvictingCache(use(model, mask="causal & (window(8) | first(2))"), block=4)
    >>> ids = list(lowtri.generate(model, range(1, 11), 31, stop=(), cache=cache))  # also model.generate(..., cache=cache)
    >>> print(cache)
    EvictingCache, 2 layers: KVCache(causal & (window(8) | first(2))): 11 held, 29 evicted, 8192 bytes
    ██·····························░░▓▓▓▓▓▓▓
    · not held: evicted, or padding
    ░ held, hidden from now on
    ▓ held until the mask hides it
    █ stays: every later query sees it

    Pass it as ``cache`` (before transformers 5.24 ``past_key_values``) to the model, to its ``generate`` in every way of generating,
    or to :func:`lowtri.generate`. The keys that it holds are those that a later query can still see, under any mask; layers with
    the same mask share their slots. Positions count from the first real token of each row, so left-padded rows keep what they would
    keep alone. It can be copied and pickled. Under ``torch.compile``, also with ``fullgraph=True``, one program serves the prompt and
    one all tokens.

    Args:
        model: as :func:`switch` returns it. Its mask of :func:`use` evicts, in every layer; without one its own masks do, layer by
            layer: causal, sliding and chunked.
        capacity: how many slots it has, in all; None: as many as the mask needs, growing.
        block: the number of tokens between two evictions.
        rewind: how many tokens before the last forward ``crop`` can always remove.

    Raises:
        EngineError: if the model is not switched, or has layers that are no attention.
        CallError: if an argument is out of range. From a forward: if its mask is not the one by which the cache evicts; for gradients,
            dropout, attention weights, masks of four dimensions, packed rows, and more tokens than ``capacity`` holds.
    """

    evicts_by_mask = True  # by which a forward knows it

    def __init__(self, model: Any, *, capacity: int | None = None, block: int = 64, rewind: int = 0) -> None:
        super().__init__(layers=[])
        inner = unwrapped(model)
        check_switched(inner, _NAME)
        self.mask: Mask | None = inner.lowtri_mask.mask  # of all layers; None: each has its own
        self._capacity = capacity
        self._block = block
        self._rewind = rewind
        self._masks = _own_masks(inner) if self.mask is None else [self.mask]  # of the layers; one for all
        self._new_state()
        self._begin_anew()

    def _new_state(self) -> None:
        self._state = new_state(self)
        with torch.inference_mode(False):  # a tensor made in inference mode could not be changed outside of it
            self.state = torch.from_numpy(self._state)  # of the operators in compiled programs, with the same memory

    def _new_cache(self, mask: Mask) -> KVCache:
        fixed = self._capacity is not None
        return KVCache(mask, capacity=self._capacity or 0, block=self._block, rewind=self._rewind, fixed=fixed)

    def _begin_anew(self) -> None:
        self._caches = {mask: self._new_cache(mask) for mask in self._masks}
        self._by_layer = [self._caches[mask] for mask in self._masks]
        self._length = 0  # columns: tokens of the longest row, with its padding
        # Of the forward that runs: tokens that no layer has appended yet (None: none runs), and positions (B, N) (None: the next).
        self.coming: int | None = None
        self._positions: NDArray[np.int64] | None = None
        self._valid: NDArray[np.bool_] | None = None  # (B, columns), whether a column holds a token; None: all do
        self._records = False  # whether all tokens since the last crop can be removed
        self._since_crop = 0  # tokens
        self._unread: set[int] = set()  # layers of the forward that runs which have not attended yet
        self._known: dict[KVCache, Mask] = {}  # the mask with which layers have attended

    # What lowtri's attention asks of it.

    def begin(self, rows: int, n: int, attention_mask: Any) -> None:
        """Begin a forward of ``n`` tokens in each of the rows.

        Args:
            attention_mask: (B, length + n), 0 at padding, or None.
        """
        self._unread.clear()
        self.coming = n
        self._state[1] = self._length  # a program may be part of the forward
        self._positions = None
        if self._records:
            for kv in self._caches.values():
                kv.rewind = max(self._rewind, self._since_crop)
        if attention_mask is not None:
            self._check_padding(rows, n, attention_mask)
            if self._valid is not None or not bool(attention_mask.all()):
                self._positions = self._placed(attention_mask.to("cpu").numpy() != 0, n)
        elif self._valid is not None:
            raise CallError(
                f"{_NAME}: it holds padded rows, but the forward has no attention_mask.\nFix: attention_mask of all tokens so far."
            )

    def check_mask(self, mask: Mask | None) -> None:
        """Raise unless this mask of all layers, None for the model's own, is that by which the cache evicts."""
        if mask is self.mask:
            return
        if mask is None or self.mask is None or not _alike(mask, self.mask):
            now, evicts = ("the model's own masks" if x is None else repr(x) for x in (mask, self.mask))
            raise CallError(
                f"{_NAME}: the forward has {now}, but the cache evicts by {evicts}.\n"
                "Fix: a new cache after use(model, mask=...), and no other mask in a forward."
            )
        self.mask = mask  # the same object, so that no program asks again

    def _check_padding(self, rows: int, n: int, attention_mask: Any) -> None:
        if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
            shape = tuple(attention_mask.shape) if hasattr(attention_mask, "shape") else type(attention_mask).__name__
            raise CallError(
                f"{_NAME}: attention_mask is {shape}, but keys are evicted by a formula.\n"
                "Fix: use(model, mask=...) before the cache is made, and an attention_mask of two dimensions for padding."
            )
        if tuple(attention_mask.shape) != (rows, self._length + n):
            raise CallError(
                f"{_NAME}: attention_mask is {tuple(attention_mask.shape)}, but the cache has {self._length} tokens and the forward "
                f"{rows} x {n}.\nFix: attention_mask ({rows}, {self._length + n}), of all tokens so far."
            )

    def _placed(self, valid: NDArray[np.bool_], n: int) -> NDArray[np.int64]:
        """Positions of the newest ``n`` columns (B, n), counted from the first token of each row, -1 at padding."""
        before = np.ones((len(valid), self._length), bool) if self._valid is None else self._valid[:, : self._length]
        if not np.array_equal(valid[:, : self._length], before):
            raise CallError(
                f"{_NAME}: attention_mask hides other earlier tokens than before, and their positions are fixed.\n"
                "Fix: the attention_mask of the earlier forwards, with one column for each new token."
            )
        self._valid = valid
        columns = np.arange(self._length, self._length + n)
        return np.where(valid[:, self._length :], columns - _pads(valid)[:, None], -1)

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, lazy: LazyMask | None, options: CallOptions
    ) -> Tensor:
        """Append a layer's new tokens, then compute the attention of their queries over all that the cache holds, (B, H, N, Dv).

        Args:
            key, value: what :meth:`update` returned to the layer.
            lazy: the mask of the forward; None in a program, where it is known to be the cache's.
        """
        layer: int | None = getattr(key, _LAYER, None)
        if layer is None:
            raise CallError(
                f"{_NAME}: {type(module).__name__} attends to other keys than the cache has returned to it.\n"
                "Fix: transformers.DynamicCache for this model."
            )
        kv = self._by_layer[layer if len(self._by_layer) > 1 else 0]
        if lazy is not None and self._known.get(kv) is not lazy.mask:
            if not _alike(lazy.mask, kv.mask):
                raise CallError(
                    f"{_NAME}: layer {layer} has the mask {lazy.mask!r}, but the cache evicts by {kv.mask!r}.\n"
                    "Fix: a new cache after use(model, mask=...), and no other mask in a forward."
                )
            self._known[kv] = lazy.mask
        output: Tensor
        if layer not in self._unread:  # it shares the keys of an earlier layer, which has appended them
            output = kv.attend_appended(query, layer, options)
            return output
        self._unread.remove(layer)
        output = kv.attend_new(query, key, value, self._positions, layer, options)
        if self.coming:  # the other layers append the same tokens
            self._length += self.coming
            self._since_crop += self.coming
            self.coming = 0
        return output

    @property
    def has_attended(self) -> bool:
        """Whether a layer of the forward that runs has attended."""
        return self.coming == 0

    def end(self) -> None:
        """End a forward that has not raised."""
        self.coming = None
        if self._unread:
            raise CallError(
                f"{_NAME}: layers {sorted(self._unread)} did not attend through lowtri, so they read the new tokens alone.\n"
                "Fix: transformers.DynamicCache for this model."
            )

    # What transformers asks of a cache.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Note the keys and values of a layer's new tokens, which its attention then appends; return them as they are."""
        if key_states.requires_grad and torch.is_grad_enabled():
            raise CallError(
                f"{_NAME}: it records no gradients.\nFix: with torch.no_grad(); or use_cache=False in training."
            )
        if torch.compiler.is_dynamo_compiling():
            return append_keys(key_states, value_states, layer_idx)
        if self.coming is None:
            raise CallError(
                f"{_NAME}: a layer appends outside of a forward of a switched model.\nFix: switch(model), then {_NAME}(model)."
            )
        if len(self.layers) <= layer_idx:
            layers: list[Any] = self.layers
            layers += [_Layer(self, index) for index in range(len(layers), layer_idx + 1)]
        self._unread.add(layer_idx)
        setattr(key_states, _LAYER, layer_idx)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """How many tokens it has seen, evicted ones and padding included: an int, in a compiled program a tensor."""
        return self.state[1].clone() if torch.compiler.is_dynamo_compiling() else self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """How many columns a forward's mask has, and the first of them."""
        if torch.compiler.is_dynamo_compiling():
            return query_length, 0  # its layers read no mask
        return self._length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """There is no limit to the tokens that it may see."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forget all tokens."""
        self.layers.clear()
        self._begin_anew()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end: as many as the negative number says; of a positive one, all from that column on."""
        left = self._length + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self._length)
        if left < 0:
            raise CallError(f"crop: got {tokens_to_remove}, but the cache has {self._length} tokens.\nFix: reset().")
        if left < self._length:
            ends: Any = left
            valid = self._valid
            if valid is not None:
                valid = valid[:, :left]
                ends = left - _pads(valid)
            caches = self._caches.values()
            for kv in caches:
                kv.check_crop(ends)  # all, before one is changed
            for kv in caches:
                kv.crop(ends)
            self._valid = valid
            self._length = left
        self._since_crop = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i continues from row ``beam_idx[i]``."""
        rows = beam_idx.cpu().numpy()
        filled = [kv for kv in self._caches.values() if kv.length]
        for kv in filled:
            kv.check_reorder(rows)  # all, before one is changed
        for kv in filled:
            kv.reorder(rows)
        if self._valid is not None:
            self._valid = self._valid[rows]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, by number or by bools."""
        self.reorder_cache(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def activate_past_recording(self) -> None:
        """From now on ``crop`` can remove every token since the last ``crop``."""
        self._records = True

    @property
    def batch_size(self) -> int:
        """How many rows it has; -1 before the first forward."""
        return next((kv.rows for kv in self._caches.values() if kv.length), -1)

    @property
    def is_compileable(self) -> bool:
        """Whether ``generate`` may compile the model for it."""
        return False

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop`` can undo a forward."""
        return True

    @property
    def is_initialized(self) -> bool:
        """Whether it holds keys."""
        return self._length > 0

    @property
    def is_linear(self) -> list[bool]:
        """No layer is recurrent; before the first forward one is named, since transformers asks whether all are."""
        return [False] * max(len(self.layers), 1)

    # What it shows.

    @property
    def bytes(self) -> int:
        """Memory of all keys and values, free slots included."""
        return sum(kv.bytes for kv in self._caches.values())

    @property
    def held(self) -> int:
        """The most tokens that a layer holds."""
        return max(kv.held for kv in self._caches.values())

    def to(self, device: Any) -> EvictingCache:
        """Move all keys and values to a device."""
        for kv in self._caches.values():
            kv.to(device)
        return self

    def draw(self) -> str:
        """Which positions are held, and for how long, of each group of layers with the same mask; see :meth:`lowtri.KVCache.draw`."""
        parts = []
        groups = [self._by_layer[layer if len(self._by_layer) > 1 else 0] for layer in range(len(self.layers))]
        for kv in self._caches.values():
            count = sum(group is kv for group in groups)
            layers = "1 layer" if count == 1 else f"{count} layers"
            parts.append(f"{_NAME}, {layers}: {kv.draw()}")
        return "\n".join(parts)

    def __repr__(self) -> str:
        return f"{_NAME}({', '.join(repr(kv) for kv in self._caches.values())})"

    def __str__(self) -> str:
        return self.draw()

    def _repr_html_(self) -> str:
        return "".join(kv._repr_html_() for kv in self._caches.values())

    def __getstate__(self) -> dict[str, Any]:
        kept = {**self.__dict__, "_unread": set(), "_known": {}}
        del kept["state"], kept["_state"]
        return kept

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept)
        self._new_state()


class _Layer:
    """What transformers asks of a layer of a cache."""

    is_compileable = is_sliding = False
    is_croppable = is_initialized = supports_early_init = True

    def __init__(self, cache: EvictingCache, index: int) -> None:
        self._cache = cache
        self._index = index

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.get_mask_sizes(query_length, self._index)


def _own_masks(model: Any) -> list[Mask]:
    """The mask of each layer of a model without a mask of the user's, as transformers' own cache reads its config."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    chunked = getattr(config, "attention_chunk_size", None)
    masks: list[Mask] = []
    for index, layer in enumerate(transformers.DynamicCache(config=config).layers):
        n = getattr(layer, "sliding_window", None)
        if n is None:
            masks.append(causal())
        elif (chunked is not None) if kinds is None else kinds[index] == "chunked_attention":
            masks.append(causal() & chunks(n))
        else:
            masks.append(window(n))
    return masks


def _pads(valid: NDArray[np.bool_]) -> NDArray[np.int64]:
    """(B,): the columns before the first token of each row; all of a row without tokens."""
    return np.where(valid.any(1), valid.argmax(1), valid.shape[1]) if valid.shape[1] else np.zeros(len(valid), np.int64)


def _alike(left: Mask, right: Mask) -> bool:
    """Whether two masks are built alike, but for the order of what "and" joins, and for the shift of padded rows."""
    left = without_shift(left)
    if left == right:
        return True
    if not (isinstance(left, And) and isinstance(right, And)):
        return False
    orders = ((right.left, right.right), (right.right, right.left))
    return any(_alike(left.left, one) and _alike(left.right, two) for one, two in orders)
