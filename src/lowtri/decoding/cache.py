"""A key/value cache that asks the mask what is dead.

Each layer has a buffer of keys and one of values (:class:`~lowtri.decoding.buffers.Layer`); which slot holds which token is
written in one :class:`~lowtri.decoding.book.Book` for all layers. Nothing here knows a window from a prefix: the mask answers,
the book gives slots, the layers follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.decoding.book import Book
from lowtri.decoding.buffers import Layer, describe
from lowtri.decoding.missing import Missing
from lowtri.decoding.positions import as_positions
from lowtri.dispatch.attend import attention
from lowtri.errors import CallError
from lowtri.masks import Mask, as_mask
from lowtri.masks.arrays import is_tensor
from lowtri.ops.arguments import plain_array

__all__ = ["KVCache"]


class KVCache:
    """The keys and values of the tokens so far, as long as the mask lets anybody see them.

    >>> import numpy as np
    >>> from lowtri import KVCache
    >>> cache = KVCache("window(4)", block=4)
    >>> for t in range(100):
    ...     k = v = np.full((2, 1, 8), float(t))  # (H, N, D): one new token
    ...     keys, values, positions = cache.append(k, v)
    >>> sorted(int(p) for p in positions if p > 95)
    [96, 97, 98, 99]
    >>> cache.capacity, cache.dropped + cache.held
    (8, 100)

    ``cache.attend(q, k, v)`` is ``append``, then attention of the new queries over everything that they can see.

    Args:
        mask: who may see whom, a mask or its text: the mask that the attention uses. A key is dropped when
            ``mask.tile(t, POSITION_MAX, k, k + 1)`` is EMPTY for every row of the batch, ``t`` being the earliest new token.
        capacity: how many tokens to make room for at first; it grows when it must.
        block: the dead are looked for after that many tokens (or an eighth of what is held, if that is more), and room
            comes in multiples of it.
        rewind: how far :meth:`crop` can always go back, in tokens before the latest append that there has been; what those
            queries may see is held that much longer.
        allow_missing: let queries come before keys that the mask shows them; they see the keys that are there. For an
            encoder's keys, which all come in one append, and for taking a model step by step whose mask shows the future.
            Else such an append is refused: under ``causal() | first(16)`` the first 16 tokens are one append, and ``full()``
            has nothing to cache.

    One cache serves all layers that use the same mask: pass ``layer=``. NumPy arrays and torch tensors of any dtype and
    device work alike; nothing here has gradients.

    Source: the key/value cache is Shazeer 2019; a ring for windows is Mistral's (Jiang et al. 2023).
    """

    def __init__(
        self,
        mask: Mask | str = "causal",
        *,
        capacity: int = 0,
        block: int = 64,
        rewind: int = 0,
        allow_missing: bool = False,
    ) -> None:
        if capacity < 0 or block < 1:
            raise CallError(f"KVCache: capacity is {capacity} and block {block}; they count tokens, from 0 and from 1.")
        if rewind < 0:
            raise CallError(f"KVCache: rewind is {rewind}; it counts tokens, from 0.")
        self.mask = as_mask(mask)
        self._book = Book(self.mask, capacity, block, rewind, None if allow_missing else Missing(self.mask))
        self._layers: dict[int, Layer] = {}
        self._arrived = 0  # layers that have seen the newest append
        self._held: NDArray[np.int64] = self._book.positions[0]  # the positions that the newest append returns
        self.straight = False  # whether the last append gave keys at 0 .. S-1 in order, the new ones last

    @property
    def capacity(self) -> int:
        """For how many tokens there is room now."""
        return self._book.capacity

    @property
    def held(self) -> int:
        """How many tokens are held; one that is dead in some rows of the batch but not in all counts as one."""
        return len(self._book.used)

    @property
    def dropped(self) -> int:
        """How many tokens were dropped because nobody could see them again."""
        return self._book.dropped

    @property
    def bytes(self) -> int:
        """The memory of all keys and values, free slots included."""
        return sum(x.nbytes for layer in self._layers.values() for x in (layer.keys, layer.values))

    @property
    def length(self) -> int:
        """The place of the next token; in a batch with places of its own for each row, the greatest."""
        return int(self._book.next.max())

    def next_positions(self, n: int, layer: int = 0) -> NDArray[np.int64]:
        """Where the next ``n`` tokens of a layer will stand, (n,), or (B, n) when the rows of the batch stand apart."""
        book, entry = self._book, self._layers.get(layer)
        follows = (entry.step if entry else 0) < book.step  # another layer has settled it already
        found = book.newest.copy() if follows else book.coming(n)
        return found[0] if len(found) == 1 else found

    def __repr__(self) -> str:
        return f"KVCache({self.mask!r}): {self.held} held, {self.dropped} dropped, {self.bytes} bytes"

    def append(self, k: Any, v: Any, positions: Any = None, layer: int = 0) -> tuple[Any, Any, NDArray[np.int64]]:
        """Add the keys and values of new tokens; get everything that their queries can see.

        Args:
            k: (..., H, N, D) with at most one dimension in front of the heads; (H, N, D) and (N, D) work too.
            v: the same with its own head size Dv.
            positions: the places of the new tokens, (N,) or (B, N), -1 where a row has none (left padding, a row that has
                ended); default: on from the last. Places only grow.
            layer: whose keys these are. The first layer of an append settles the positions, the others follow it.

        Returns:
            keys, values (..., H, S, D) and their positions, int64 (S,) or (B, S), -1 in free slots and pads. All three are
            views, valid until the next append, the positions read-only; keys stand in any order.

        Raises:
            CallError: if shapes, dtypes, positions or the order of layers do not fit, or a query comes before a key that the
                mask shows it; the cache is then as it was.
        """
        k, v = plain_array("k", k, "append"), plain_array("v", v, "append")
        entry = self._layers.get(layer)
        if entry is None:
            entry = self._join(k, v, layer)
        elif not entry.takes(k, v):
            raise CallError(
                f"append: keys {describe(k)} and values {describe(v)} do not continue layer {layer}, "
                f"whose keys are {describe(entry.keys)} and values {describe(entry.values)} in (..., H, slots, D)."
            )
        n = k.shape[-2]
        book = self._book
        if entry.step == book.step:
            if self._arrived < len(self._layers):
                late = min(name for name, other in self._layers.items() if other.step < book.step)
                raise CallError(f"append: layer {late} has not seen the tokens that layer {layer} already has.")
            book.open(n, _rows(k), positions)
            self._arrived = 0
            self.straight = book.straight()
            held = book.positions[:, : book.top]
            self._held = held[0] if len(held) == 1 else held
            self._held.flags.writeable = False  # it is the book's own
        elif n != book.newest.shape[1] or not (positions is None or book.follows(positions)):
            raise CallError(
                f"append: layer {layer} brings other tokens than the layer before it: {n} of them, after "
                f"{book.newest.shape[1]}. All layers of an append have the same positions."
            )
        self._layers[layer] = entry
        entry.step += 1
        self._arrived += 1
        if book.moved is not None:
            entry.move(book.moved, book.capacity)
        entry.write(book.slots, k, v)
        return (*entry.front(book.top), self._held)

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
    ) -> Any:
        """Append the keys and values of new tokens, and attend with their queries, under the cache's mask.

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

        Returns:
            the output, (..., Hq, N, Dv).

        Raises:
            CallError: as :meth:`append` and :func:`lowtri.attention` do.
        """
        if q.ndim != k.ndim or q.shape[:-3] != k.shape[:-3] or q.shape[-2:] != k.shape[-2:]:
            raise CallError(
                f"attend: queries {describe(q)} and keys {describe(k)} do not fit: each new token brings a query, a key and "
                "a value.\nFix: (..., Hq, N, D) and (..., Hkv, N, D) with the same N."
            )
        keys, values, held = self.append(k, v, positions, layer)
        newest = self._book.newest
        own = newest[0] if len(newest) == 1 else newest
        # Attention's own default is the same where the keys stand at 0 .. S-1, and saves it the reading of positions.
        at: dict[str, Any] = {} if self.straight else {"q_positions": own, "k_positions": held}
        return attention(q, keys, values, self.mask, scale=scale, softcap=softcap, sinks=sinks, engine=engine, **at)

    def reorder(self, index: Any) -> None:
        """Row ``i`` goes on from what row ``index[i]`` has seen, as beam search asks; the batch may grow or shrink.

        Raises:
            CallError: if a row is not there, or would change its mask.
        """
        rows = as_positions(index, "reorder: index")
        size = self._rows()
        if rows.ndim != 1 or np.any((rows < 0) | (rows >= size)):
            raise CallError(f"reorder: index is {rows.tolist()}, but the cache has the rows 0 .. {size - 1}.")
        masks, heads = (*self.mask.batch, 1, 1)[:2]
        if masks > 1 and (
            len(rows) != size
            or any(self.mask.at(i, h) != self.mask.at(int(r), h) for i, r in enumerate(rows) for h in range(heads))
        ):
            raise CallError(
                f"reorder: index is {rows.tolist()}, but {self.mask!r} differs from row to row, and the masks stay.\n"
                "Fix: reorder only among rows that have the same mask."
            )
        self._together("reorder")
        for layer in self._layers.values():
            if layer.keys.ndim == 4:
                layer.pick(rows)
            elif rows.tolist() != [0]:
                raise CallError(f"reorder: index is {rows.tolist()}, but keys {describe(layer.keys)} have no batch.")
        self._book.reorder(rows)

    def crop(self, n: Any) -> None:
        """Take tokens back: the next one stands at ``n`` again, an int, or one for each row of the batch.

        Back to the start of the last append always works (so a rejected draft can go), and ``rewind`` tokens more; further
        back only as long as nothing that those queries would see was dropped.

        Raises:
            CallError: if ``n`` is negative, or lies before what was dropped.
        """
        back = np.atleast_1d(as_positions(n, "crop: n"))
        if back.ndim != 1 or len(back) not in (1, self._rows()) or np.any(back < 0):
            raise CallError(
                f"crop: n is {back.tolist()}; it is the place of the next token, at least 0, "
                f"one for all or one for each of {self._rows()} rows."
            )
        self._together("crop")
        if len(back) < len(self._book.next):
            back = np.broadcast_to(back, self._book.next.shape)
        self._book.crop(back)

    def shift(self, keep: int, turn: Callable[[Any, NDArray[np.int64], int], Any] | None = None) -> None:
        """Make room in the context: the dead go, and the tokens behind the first ``keep`` places close the gap they leave.

        A stream has more tokens than a model has places. Under a window the next token then stands at ``keep`` plus the
        window again, and distances between tokens that see each other stay within what the model was trained on; those to
        the first ``keep``, its sinks, begin anew. Keys that carry rotary embedding are turned to their new places by ``turn``.

        >>> cache = KVCache("causal & (window(4) | first(2))", block=1)
        >>> for t in range(10):
        ...     _ = cache.append(np.full((1, 1), t), np.full((1, 1), t))
        >>> cache.shift(2)
        >>> keys, _, places = cache.append(np.full((1, 1), 10), np.full((1, 1), 10))
        >>> [(int(place), int(keys[slot, 0])) for slot, place in enumerate(places)]
        [(0, 0), (1, 1), (5, 10), (2, 7), (3, 8), (4, 9)]

        Args:
            keep: how many places at the front stay as they are.
            turn: from keys (..., H, S, D), how far each has moved, int64 (S,) or (B, S), 0 or less, and the layer, to keys. For
                the rotary embedding of ``lowtri.nn``: ``lambda k, moved, _: apply_rotary(k, *rotary_tables(moved, D, theta))``.

        Raises:
            CallError: if the mask would answer differently for the moved tokens, as one that names places of its own does.

        Source: positions within the cache, StreamingLLM (Xiao et al. 2023).
        """
        if keep < 0:
            raise CallError(f"shift: keep is {keep}; it counts places, from 0.")
        self._together("shift")
        moved = self._book.shift(keep)
        if turn is None or not moved.any():
            return
        for name, layer in self._layers.items():
            held, _ = layer.front(self._book.top)
            held[...] = turn(held, moved[0] if len(moved) == 1 else moved, name)

    def _rows(self) -> int:
        return max((_rows(layer.keys) for layer in self._layers.values()), default=1)

    def _join(self, k: Any, v: Any, layer: int) -> Layer:
        """A layer that appends for the first time."""
        for name, x in (("k", k), ("v", v)):
            if not isinstance(x, np.ndarray) and not is_tensor(x):
                raise CallError(f"append: {name} is {type(x).__name__}, but it takes NumPy arrays or torch tensors.")
        if k.ndim not in (2, 3, 4) or v.ndim != k.ndim or v.shape[:-1] != k.shape[:-1]:
            raise CallError(
                f"append: keys {describe(k)} and values {describe(v)} do not fit: "
                "expected (B, H, N, D) and (B, H, N, Dv), or both without B, or without B and H."
            )
        masks = (*self.mask.batch, 1)[0]
        if masks > 1 and (k.ndim < 4 or k.shape[0] != masks):
            raise CallError(f"append: keys {describe(k)} do not fit {self.mask!r}, whose batch is {self.mask.batch}.")
        if self._book.step > 1:
            raise CallError(f"append: layer {layer} comes late: the other layers have seen {self._book.step} appends.")
        capacity = 0 if self._book.moved is not None else self._book.capacity
        return Layer.like(k, v, capacity)

    def _together(self, what: str) -> None:
        if self._layers and self._arrived < len(self._layers):
            raise CallError(f"{what}: some layers have not seen the newest tokens yet; finish the append first.")


def _rows(x: Any) -> int:
    return int(x.shape[0]) if x.ndim == 4 else 1
