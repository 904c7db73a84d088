"""A key/value cache that evicts a key when the mask hides it from every later query.

One :class:`~lowtri.generation.slots.SlotAllocator` assigns the slots for all layers; each layer has a buffer of keys and one of
values (:class:`Layer`). Eviction calls ``mask.tile``, so it works for any mask.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.dispatch.attend import attention_over_cache, find_over_cache
from lowtri.drawing import with_drawings
from lowtri.errors import CallError
from lowtri.generation.layers import (
    Layer,
    RepeatableCall,
    batch_of,
    check_new,
    not_an_array,
    plain,
    shape_text,
    tensor_checks,
)
from lowtri.generation.slots import (
    LookaheadCheck,
    SlotAllocator,
    ends_of,
    kept_of,
    positions_to_drop,
    row_masks,
    rows_of,
)
from lowtri.masks import EMPTY, FULL, POSITION_MAX, Mask, as_mask
from lowtri.masks.formulas import causal
from lowtri.masks.label_masks import with_open_end
from lowtri.masks.tile import MAX_POSITIONS, check_flag, short_repr
from lowtri.masks.tree import Tree
from lowtri.ops.call import CallOptions

_FIXES = {"capacity": "0, which grows as needed.", "block": "64.", "rewind": "the length of a draft."}
# The states of Lifetimes.
_FREED = 1
_HELD = 2
_STAYS = 3


class Lifetimes(NamedTuple):
    """How long the positions of a cache are held."""

    # (rows, cells), of a cell's positions the longest-lived: 0 none is held, 1 held and hidden from now on, 2 held until the mask
    # hides it, 3 seen by every later query
    states: NDArray[np.int8]
    step: int  # positions to a cell
    positions: int  # of the longest row
    rows_left_out: int


@with_drawings
class KVCache:
    """A key/value cache for all layers that use the same mask; it evicts keys that no later query can see.

    >>> import numpy as np
    >>> from lowtri import KVCache
    >>> cache = KVCache("window(4)", block=4)
    >>> for t in range(100):
    ...     k = v = np.full((2, 1, 8), float(t))  # (H, N, D): one new token
    ...     keys, values, positions = cache.append(k, v)
    >>> sorted(int(p) for p in positions if p > 95)
    [96, 97, 98, 99]
    >>> cache.capacity, cache.evicted + cache.held
    (8, 100)

    ``cache.attend(q, k, v)`` appends, and then computes the attention of the new queries over all keys that they can see. NumPy
    arrays and torch tensors of any dtype and device are accepted; gradients are not recorded. ``print(cache)`` and notebooks show
    which positions are held, for how long, and which are evicted.

    Args:
        mask: the mask that the attention uses, or its text. A key at ``k`` is evicted when ``mask.tile(t, POSITION_MAX, k, k + 1)``
            is EMPTY in every row of the batch, where ``t`` is the earliest new position. Lengths of documents need ``open_end=True``.
        capacity: initial number of slots; it grows as needed.
        block: the number of tokens between two evictions, at least an eighth of the tokens held; the capacity is a multiple of it.
        rewind: how many tokens before the last append :meth:`crop` can always remove; keys are kept that much longer.
        fixed: keep the number of slots at ``capacity``; an append that does not fit raises.
        allow_missing: allow queries to be appended before keys that the mask shows them, as in decoding step by step under a mask
            that shows later keys; such queries see the keys that exist. Otherwise such an append raises: ``causal() | first(16)``
            needs the first 16 tokens in one append, ``full()`` the whole sequence.

    Source: the key/value cache is Shazeer 2019; a ring buffer for windows is Mistral's (Jiang et al. 2023).
    """

    def __init__(
        self,
        mask: Mask | str = "causal",
        *,
        capacity: int = 0,
        block: int = 64,
        rewind: int = 0,
        fixed: bool = False,
        allow_missing: bool = False,
    ) -> None:
        slots = _token_count("capacity", capacity, 0, MAX_POSITIONS)
        interval = _token_count("block", block, 1, MAX_POSITIONS)
        kept_longer = _token_count("rewind", rewind, 0, POSITION_MAX)
        self.mask = with_open_end("KVCache", as_mask(mask))
        lookahead = None if check_flag("KVCache", "allow_missing", allow_missing) else LookaheadCheck(self.mask)
        self._slots = SlotAllocator(self.mask, slots, interval, kept_longer, lookahead, fixed)
        self._layers: dict[int, Layer] = {}
        self._repeatable: RepeatableCall | None = None

    @property
    def capacity(self) -> int:
        """The current number of slots."""
        return self._slots.capacity

    @property
    def held(self) -> int:
        """Number of tokens held; a token that only some rows of the batch still see counts as one."""
        return len(self._slots.used)

    @property
    def evicted(self) -> int:
        """Number of tokens evicted."""
        return self._slots.evicted

    @property
    def bytes(self) -> int:
        """Memory of all keys and values, free slots included."""
        return sum(x.nbytes for layer in self._layers.values() for x in (layer.keys, layer.values))

    @property
    def length(self) -> int:
        """The position of the next token; the greatest one if the rows of the batch differ."""
        return int(self._slots.next.max())

    @property
    def rows(self) -> int:
        """The batch size; 1 before the first append, and where keys have no batch."""
        return max((batch_of(layer.keys) for layer in self._layers.values()), default=1)

    @property
    def rewind(self) -> int:
        """How many tokens before the last append :meth:`crop` can always remove; a new number counts from the next append on."""
        return self._slots.rewind

    @rewind.setter
    def rewind(self, tokens: int) -> None:
        self._slots.rewind = _token_count("rewind", tokens, 0, POSITION_MAX)

    @property
    def contiguous(self) -> bool:
        """Whether the last append returned keys at 0 .. S-1 in order, the new ones last: attention's default positions."""
        return self._slots.visible_slots.k is None

    def next_positions(self, n: int, layer: int = 0) -> NDArray[np.int64]:
        """Positions of a layer's next ``n`` tokens, (n,), or (B, n) where the rows of the batch differ."""
        if not isinstance(n, int | np.integer) or not 0 <= n <= POSITION_MAX:
            raise CallError(f"next_positions: n is {short_repr(n)}; it counts tokens, from 0 to 2**62.")
        appends = self._layers[layer].appends if isinstance(layer, Hashable) and layer in self._layers else 0
        allocated = appends < self._slots.appends  # by another layer of the same append
        positions = (self._slots.last_positions if allocated else self._slots.upcoming(n)).copy()
        return positions[0] if len(positions) == 1 else positions

    def append(
        self, k: Any, v: Any, positions: Any = None, layer: int = 0, *, mask: Mask | str | None = None
    ) -> tuple[Any, Any, NDArray[np.int64]]:
        """Append the keys and values of new tokens; return all that their queries can see.

        Args:
            k, v: (B, H, N, D) and (B, H, N, Dv), or both without B, or without B and H.
            positions: positions of the new tokens, (N,) or (B, N), -1 where a row has no token (left padding, a row that has
                ended); default: the next positions. Positions must increase.
            layer: the layer of these keys. The first layer of an append sets the positions; the other layers must match them.
            mask: what the new queries will attend with instead of the cache's mask, in this call; see :meth:`attend`.

        Returns:
            keys, values (..., H, S, D) and their positions, int64 (S,) or (B, S), -1 in free slots and at padding. All three
            are views, valid until the next append, in the order in which they were appended; the positions are read-only.

        Raises:
            CallError: if shapes, dtypes, positions or the order of layers do not fit, or the mask shows a query a key that is not
                yet appended; the cache is then unchanged.
        """
        buffers = self.store(k, v, positions, layer)
        if mask is not None:
            self._for_this_call(mask)
        return (*buffers.first_slots(self._slots.visible_slots.nk), self._read_positions())

    def _read_positions(self) -> NDArray[np.int64]:
        """The positions of the slots that the newest queries read, (S,) or (B, S)."""
        used = self._slots.positions[:, : self._slots.visible_slots.nk]
        used.flags.writeable = False  # a view of the allocator's own array
        return used[0] if len(used) == 1 else used

    def store(self, k: Any, v: Any, positions: Any, layer: int) -> Layer:
        """Write new tokens into the buffers of their layer, free slots included: :meth:`append` without its views."""
        k, v = plain("k", k), plain("v", v)
        buffers = self._layers.get(layer)
        if buffers is not None:
            buffers.check(k, v, layer)
        else:
            check_new(k, v, self.mask)
            if self._slots.appends > 1:
                raise CallError(
                    f"append: layer {layer} comes late: the other layers have seen {self._slots.appends} appends."
                )
        return self._store_checked(buffers, k, v, positions, layer)

    def _store_checked(self, buffers: Layer | None, k: Any, v: Any, positions: Any, layer: int) -> Layer:
        """:meth:`store` for tokens that fit the buffers of their layer, None before its first."""
        slots = self._slots
        n = k.shape[-2]
        if (0 if buffers is None else buffers.appends) == slots.appends:  # the first layer of this append
            late = self._late()
            if late is not None:
                raise CallError(f"append: layer {late} has not seen the tokens that layer {layer} already has.")
            slots.allocate(n, batch_of(k), positions)
        elif n != slots.last_positions.shape[1] or not (positions is None or slots.are_last_positions(positions)):
            raise CallError(
                f"append: layer {layer} brings other tokens than the layer before it: {n} of them, after "
                f"{slots.last_positions.shape[1]}. All layers of an append have the same positions."
            )
        if buffers is None:
            buffers = self._layers[layer] = Layer(k, v, slots.capacity)
        elif slots.moved is not None:
            buffers.compact(slots.moved, slots.capacity)
        buffers.appends = slots.appends
        buffers.write(slots.last_start, k, v)
        return buffers

    def attend(
        self,
        q: Any,
        k: Any,
        v: Any,
        positions: Any = None,
        layer: int = 0,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Any = None,
        engine: str = "auto",
        return_received: bool = False,
        mask: Mask | str | None = None,
    ) -> Any:
        """Append new tokens, then compute the attention of their queries under the cache's mask.

        >>> import lowtri, numpy as np
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 10, 8))  # (H, N, D)
        >>> cache = lowtri.KVCache("causal & window(4)")
        >>> steps = [cache.attend(q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1]) for t in range(10)]
        >>> np.allclose(np.concatenate(steps, 1), lowtri.attention(q, k, v, "causal & window(4)"))
        True

        Args:
            q: (..., Hq, N, D), the queries of the new tokens; Hq is a multiple of the key/value heads.
            k, v, positions, layer: as in :meth:`append`.
            scale, softcap, sinks, engine: as in :func:`lowtri.attention`.
            return_received: also return what each key received from the new queries, and the keys' positions: what :meth:`drop`
                is decided by.
            mask: instead of the cache's mask, in this call: it must show no key that is evicted. ``lowtri.tree(parents)`` alone
                means the drafts of this append, after the text under the cache's mask.

        Returns:
            the output, (..., Hq, N, Dv); with ``return_received`` a tuple of the output, the received weights (..., Hq, S), at least
            float32, and the positions (S,) or (B, S), as :meth:`append` returns them.

        Raises:
            CallError: as in :meth:`append` and :func:`lowtri.attention`. After an error of the attention itself (``sinks`` of another
                shape, say) the tokens are in the cache: ``crop`` removes them.
        """
        for name, x in (("q", q), ("k", k)):
            if not hasattr(x, "ndim"):
                raise not_an_array("attend", name, x)
        if q.ndim != k.ndim or q.shape[:-3] != k.shape[:-3] or q.shape[-2:] != k.shape[-2:]:
            raise CallError(
                f"attend: queries {shape_text(q)} and keys {shape_text(k)} do not fit: each new token brings a query, a key and "
                "a value.\nFix: (..., Hq, N, D) and (..., Hkv, N, D) with the same N."
            )
        options = CallOptions(scale, softcap, sinks=sinks, engine=engine, return_received=return_received)
        if mask is None:
            result = self.attend_new(q, k, v, positions, layer, options)
        else:
            buffers = self.store(k, v, positions, layer)
            own = self._for_this_call(mask)
            result = attention_over_cache(q, buffers.keys, buffers.values, own, options, self._slots.visible_slots)
        return (*result, self._read_positions()) if return_received else result

    def attend_new(self, q: Any, k: Any, v: Any, positions: Any, layer: int, options: CallOptions) -> Any:
        """:meth:`attend` under the cache's mask, without the checks of q.

        The layers of a model make equal calls, also from token to token. A layer whose tensors have the signature of those of the
        layer before it, and whose buffers are of the same kind, passes the same checks, and runs the same prepared call.
        """
        slots = self._slots
        buffers = self._layers.get(layer)
        call = self._repeatable
        if (
            call is None
            or buffers is None
            or buffers.kind != call.kind
            or options.sinks is not None
            or tensor_checks().token_signature(q, k, v, options) != call.signature
        ):
            buffers = self.store(k, v, positions, layer)
            return self._attend_first(q, k, v, buffers, options)
        if (
            call.appends == slots.appends
            and buffers.appends < slots.appends
            and (positions is None or slots.are_last_positions(positions))
        ):
            if slots.moved is not None:
                buffers.compact(slots.moved, slots.capacity)
            buffers.appends = slots.appends
            n = k.shape[-2]  # as Layer.write, without a step more
            buffers.keys.narrow(-2, slots.last_start, n).copy_(k.detach() if k.requires_grad else k)
            buffers.values.narrow(-2, slots.last_start, n).copy_(v.detach() if v.requires_grad else v)
            return call.run(q, buffers.keys, buffers.values)
        self._store_checked(buffers, k, v, positions, layer)
        keys, values = buffers.keys, buffers.values
        at = keys.shape, values.shape, keys.stride(), values.stride(), slots.visible_slots
        ready = call.for_any_keys.repeated(at) if call.for_any_keys is not None else None
        if ready is None:
            return self._attend_first(q, k, v, buffers, options)
        call.appends = slots.appends
        call.run = ready.plain
        return call.run(q, keys, values)

    def _attend_first(self, q: Any, k: Any, v: Any, buffers: Layer, options: CallOptions) -> Any:
        """The attention of a layer's newest tokens, which later layers and tokens may repeat."""
        slots = self._slots
        ready = find_over_cache(q, buffers.keys, buffers.values, self.mask, options, slots.visible_slots)
        if ready is None or ready.plain is None:
            return attention_over_cache(q, buffers.keys, buffers.values, self.mask, options, slots.visible_slots)
        signature = None if isinstance(k, np.ndarray) else tensor_checks().token_signature(q, k, v, options)
        if signature is not None:
            self._repeatable = RepeatableCall(slots.appends, buffers.kind, signature, ready.plain, ready.for_any_keys)
        return ready.plain(q, buffers.keys, buffers.values)

    def attend_appended(self, q: Any, layer: int, options: CallOptions) -> Any:
        """The attention of the queries of the newest tokens, which this layer has appended; see :meth:`attend`."""
        buffers = self._layers[layer]
        return attention_over_cache(q, buffers.keys, buffers.values, self.mask, options, self._slots.visible_slots)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_repeatable": None}  # a prepared call has addresses

    def reorder(self, index: Any) -> None:
        """Let row ``i`` continue from row ``index[i]``, as in beam search; the batch may grow or shrink.

        Raises:
            CallError: if a row does not exist, or would change its mask.
        """
        rows = self.check_reorder(index)
        for buffers in self._layers.values():
            if buffers.keys.ndim == 4:
                buffers.select_rows(rows)
        self._slots.reorder(rows)

    def check_reorder(self, index: Any) -> NDArray[np.int64]:
        """The rows of :meth:`reorder`; raise unless they fit every layer."""
        rows = rows_of(index, self.rows, self.mask)
        self._check_complete("reorder")
        for buffers in self._layers.values():
            if buffers.keys.ndim < 4 and rows.tolist() != [0]:
                raise CallError(f"reorder: got index {rows.tolist()}; keys {shape_text(buffers.keys)} have no batch.")
        return rows

    def crop(self, n: Any) -> None:
        """Remove tokens from the end: the next token gets position ``n``, an int, or one int for each row of the batch.

        Removing the last append (a rejected draft) and ``rewind`` tokens before it always works. Removing more works as long
        as no key that later queries can then see has been evicted.

        Raises:
            CallError: if ``n`` is negative, or if keys that those queries can see have been evicted.
        """
        self._slots.crop(self.check_crop(n))

    def check_crop(self, n: Any) -> NDArray[np.int64]:
        """The next positions (R,) after :meth:`crop`; raise unless those tokens can be removed."""
        ends = ends_of(n, self.rows)
        self._check_complete("crop")
        if len(ends) == 1:
            ends = np.broadcast_to(ends, self._slots.next.shape)
        self._slots.check_crop(ends)
        return ends

    def drop(self, positions: Any) -> None:
        """Evict the tokens at these positions, in every layer: no later query sees them, whatever the mask.

        Here the two keys that received most from the queries so far are kept, next to the four newest:

        >>> rng = np.random.default_rng(1)
        >>> cache, total = KVCache("causal", block=1), np.zeros(20)
        >>> for t in range(20):
        ...     q, k, v = 3 * rng.standard_normal((3, 1, 1, 8))
        ...     _, received, held = cache.attend(q, k, v, return_received=True)
        ...     total[held[held >= 0]] += received[0, held >= 0]
        ...     old = held[(held >= 0) & (held <= t - 4)]
        ...     if len(old) > 2:
        ...         cache.drop([old[total[old].argmin()]])
        >>> cache.held, cache.evicted
        (6, 14)

        Args:
            positions: (n,), or (B, n) for each row of the batch; -1 where a row has fewer.

        Raises:
            CallError: if a position is not held. The cache is then unchanged.

        Source: eviction by the weights received, as in Heavy-Hitter Oracle (Zhang et al. 2023).
        """
        chosen = positions_to_drop(positions, self.rows)
        self._check_complete("drop")
        self._slots.drop(chosen)

    def keep(self, index: Any) -> None:
        """Of the tokens of the newest append keep these alone, in this order, at consecutive positions; in every layer.

        So a tree of drafts becomes the one path that was accepted. Keeping the first tokens is what :meth:`crop` does.

        >>> import lowtri
        >>> cache = KVCache()
        >>> _ = cache.append(np.zeros((2, 1)), np.zeros((2, 1)))  # two tokens of text
        >>> drafts = np.arange(4.0)[:, None]
        >>> _ = cache.append(drafts, drafts, mask=lowtri.tree([-1, 0, 0, 2]))
        >>> cache.keep([0, 2, 3])
        >>> keys, _, positions = cache.append(np.full((1, 1), 9.0), np.full((1, 1), 9.0))
        >>> keys[:, 0].tolist(), positions.tolist()
        ([0.0, 0.0, 0.0, 2.0, 3.0, 9.0], [0, 1, 2, 3, 4, 5])

        Args:
            index: indices into the newest append, (n,), or (B, n) with -1 at the end of rows that keep fewer; rows may then differ in
                length, and the next append continues each from its own end.

        Raises:
            CallError: if a layer has not seen the append, or an index is none of its tokens, or comes twice.
        """
        self._check_complete("keep")
        kept = kept_of(index, self._slots.last_positions, self.rows)
        for buffers in self._layers.values():
            buffers.choose(self._slots.last_start, kept)
        self._slots.keep(kept)

    def shift(self, keep: int, rotate_keys: Callable[[Any, NDArray[np.int64], int], Any] | None = None) -> None:
        """Evict, then close the gap: lower the positions of all tokens after the first ``keep`` positions.

        Generation can thus continue past the model's context: under a window, the next position is again ``keep`` plus the
        window, and the distances within the window stay the same. ``rotate_keys`` turns keys that carry rotary embedding.

        >>> cache = KVCache("causal & (window(4) | first(2))", block=1)
        >>> for t in range(10):
        ...     _ = cache.append(np.full((1, 1), t), np.full((1, 1), t))
        >>> cache.shift(2)
        >>> keys, _, positions = cache.append(np.full((1, 1), 10), np.full((1, 1), 10))
        >>> [(int(position), int(keys[slot, 0])) for slot, position in enumerate(positions) if position >= 0]
        [(0, 0), (1, 1), (2, 7), (3, 8), (4, 9), (5, 10)]

        Args:
            keep: the number of leading positions that do not change (the sinks).
            rotate_keys: called with keys (..., H, S, D), their changes of position, int64 (S,) or (B, S), 0 or negative, and the
                layer; returns the new keys. For the rotary embedding of ``lowtri.nn``:
                ``lambda k, moved, _: apply_rotary(k, *rotary_tables(moved, D, theta))``.

        Raises:
            CallError: if the mask would show other pairs after the shift, as a mask with absolute positions does.

        Source: positions counted within the cache, as in StreamingLLM (Xiao et al. 2023).
        """
        if not isinstance(keep, int | np.integer) or not 0 <= keep <= POSITION_MAX:
            raise CallError(f"shift: keep is {short_repr(keep)}; it counts positions, from 0 to 2**62.")
        self._check_complete("shift")
        moved = self._slots.shift(keep)
        if rotate_keys is None or not moved.any():
            return
        for layer, buffers in self._layers.items():
            keys, _ = buffers.first_slots(self._slots.used_end)
            keys[...] = rotate_keys(keys, moved[0] if len(moved) == 1 else moved, layer)

    def _for_this_call(self, mask: Mask | str) -> Mask:
        """The mask of the newest tokens alone; a tree with nothing else said stands after the text, under the cache's mask."""
        given = as_mask(mask)
        last_positions = self._slots.last_positions
        if isinstance(given, Tree) and given.inner == causal() and given.starts == (0,):
            if last_positions.size and not np.all(np.diff(last_positions, axis=1) == 1):
                raise CallError("attend: the drafts of a tree stand at consecutive positions.\nFix: no positions=.")
            if given.parents.array.shape[-1] != last_positions.shape[1]:
                raise CallError(
                    f"attend: the tree has {given.parents.array.shape[-1]} drafts, but {last_positions.shape[1]} tokens are appended.\n"
                    "Fix: a token for each draft."
                )
            starts = last_positions[:, 0].tolist()
            return Tree(given.parents, (starts[0],) if len(set(starts)) == 1 else tuple(starts), self.mask)
        if given != self.mask and self.evicted:
            self._check_nothing_evicted(given)
        return given

    def _check_nothing_evicted(self, mask: Mask) -> None:
        """Raise if the newest queries may see a key that is not there any more."""
        slots = self._slots
        for b, row in enumerate(slots.positions):
            held = np.unique(np.append(row[row >= 0], slots.next[b]))
            begin = np.append(0, held[:-1] + 1)
            missing, q = begin < held, slots.last_positions[b][slots.last_positions[b] >= 0]
            if not (missing.any() and q.size):
                continue
            for one in row_masks(mask, b, len(slots.positions)):
                if np.any(one.tile(int(q.min()), int(q.max()) + 1, begin[missing], held[missing]) != EMPTY):
                    raise CallError(
                        f"attend: {mask!r} may show keys that are evicted, since {self.mask!r} hides them from now on.\n"
                        "Fix: mask & the cache's mask, or a cache with a mask that shows them."
                    )

    def to(self, device: Any) -> None:
        """Move all keys and values, which are tensors, to a device."""
        for buffers in self._layers.values():
            buffers.to(device)

    def _late(self) -> int | None:
        """The first layer that has not seen the newest tokens; None if all have."""
        for number, buffers in self._layers.items():
            if buffers.appends < self._slots.appends:
                return number
        return None

    def _check_complete(self, method: str) -> None:
        if self._late() is not None:
            raise CallError(f"{method}: some layers have not seen the newest tokens yet; finish the append first.")

    # Which positions are held, for how long, and which are evicted.

    def __repr__(self) -> str:
        return f"KVCache({self.mask!r}): {self.held} held, {self.evicted} evicted, {self.bytes} bytes"

    if TYPE_CHECKING:

        def draw(self) -> str:
            """The positions as text, a sign for how long each is held: :func:`lowtri.pictures.caches.draw`."""

        def _repr_svg_(self) -> str:
            """What notebooks show."""

        def _repr_html_(self) -> str:
            """What notebooks show, with the numbers of slots, tokens and bytes."""

    def __str__(self) -> str:
        return self.draw()

    def lifetimes(self, rows: int, cells: int) -> Lifetimes:
        """How long each position is held, of so many rows of the batch at most, in so many cells to a row at most."""
        slots = self._slots
        all_rows = len(slots.positions)
        n = int(slots.next.max())
        step = max(1, -(-n // cells))
        states = np.zeros((min(all_rows, rows), -(-n // step)), np.int8)
        for b, row in enumerate(states):
            positions = slots.positions[b, : slots.used_end]
            positions = positions[positions >= 0]
            masks = row_masks(self.mask, b, all_rows)  # asked about all later queries
            answers = np.stack([m.tile(int(slots.next[b]), POSITION_MAX, positions, positions + 1) for m in masks])
            held = np.where((answers == FULL).all(0), _STAYS, _HELD)
            np.maximum.at(row, positions // step, np.where((answers == EMPTY).all(0), _FREED, held).astype(np.int8))
        return Lifetimes(states, step, n, all_rows - len(states))


def _token_count(name: str, value: Any, least: int, most: int) -> int:
    """An argument of the cache, as a Python int."""
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if not least <= count <= most:
        raise CallError(
            f"KVCache: {name} is {short_repr(value)}; it counts tokens, from {least} to 2**{most.bit_length() - 1}."
            f"\nFix: {name}={_FIXES[name]}"
        )
    return count
