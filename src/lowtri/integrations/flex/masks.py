"""FlexAttention's mask functions and block masks as lowtri masks, and BlockMasks from either.

A block of a BlockMask is EMPTY if it is not listed and FULL if it is listed as full. In all other tiles, the ``mask_mod`` decides: its
operations on ranges of indices (:mod:`~lowtri.integrations.function_mask`), and what they leave open is evaluated pair by pair.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lowtri.backends.flex import block_mask_of, block_mask_of_blocks, blocks_of_plan
from lowtri.compat.torch_private import mapped_indexing
from lowtri.errors import CallError, MaskError
from lowtri.integrations.content import content_of
from lowtri.integrations.function_mask import FunctionMask, Node, trace
from lowtri.masks.array_masks import table
from lowtri.masks.arrays import positions_in_numpy
from lowtri.masks.formulas import full
from lowtri.masks.label_masks import check_packed_totals
from lowtri.masks.mask import Mask
from lowtri.masks.plan import TILE_Q, plan
from lowtri.masks.positions import default_positions
from lowtri.masks.text import as_mask
from lowtri.masks.tile import Index, check_count, within

_NO_BLOCKS = 1 << 30  # the block size of a BlockMask that stands for no mask
_PAIRS_AT_ONCE = 2**22

Bools = NDArray[np.bool_]


def block_mask(
    mask: Mask | str,
    nq: int,
    nk: int | None = None,
    *,
    q_positions: Any = None,
    k_positions: Any = None,
    block: int = 128,
    device: Any = "cpu",
) -> BlockMask:
    """torch's BlockMask of a lowtri mask, in time that grows with the blocks and not with the pairs.

    >>> from lowtri import causal, window
    >>> blocks = block_mask(causal() & window(256), 16384)
    >>> blocks.kv_num_blocks[0, 0, :4].tolist(), blocks.full_kv_num_blocks[0, 0, :4].tolist()
    ([1, 1, 2, 2], [0, 1, 1, 1])

    It is the BlockMask that torch's ``create_block_mask`` makes of the mask's table of all pairs. Its ``mask_mod`` reads tensors only:
    a compiled ``flex_attention`` serves all masks whose queries see at most two ranges of keys with one program.

    Args:
        mask: a mask or its text.
        nq, nk: the number of queries and keys; ``nk`` defaults to ``nq``.
        q_positions, k_positions: (N,) or (B, N) as in :func:`lowtri.attention`: by default keys are at 0 .. nk-1 and queries at the
            last nq of these; -1 means no token.
        block: queries and keys in a block, a multiple of 64; compiled FlexAttention takes 128.
        device: of the tensors.

    Returns:
        a BlockMask for (B|1, H|1), as the mask or the positions differ, with the lists for the gradients.

    Raises:
        MaskError: if block is not a multiple of 64, or there are more queries than keys and no positions.
        CallError: if the positions do not fit, or the device cannot be used.

    Source: Dong et al. 2024, Flex Attention.
    """
    mask = as_mask(mask, "block_mask: mask")
    nq = check_count("block_mask", "nq", nq)
    nk = nq if nk is None else check_count("block_mask", "nk", nk)
    if isinstance(block, bool) or not isinstance(block, int) or block < 1 or block % TILE_Q:
        raise MaskError(f"block_mask: block is {block!r}, but it is a multiple of {TILE_Q}. Fix: block=128.")
    if nq < 1 or nk < 1:
        raise MaskError(f"block_mask: {nq} queries and {nk} keys: there are no blocks. Fix: at least one of each.")
    q, k = _positions("q_positions", q_positions, nq), _positions("k_positions", k_positions, nk)
    if q is None and k is None:
        check_packed_totals("block_mask", mask, nk)
    if q is None:
        q = default_positions(mask, nq, nk)[0] if k is None or nq > nk else k[..., nk - nq :]
    device = _device("block_mask", device)
    return block_mask_of(plan(mask, q, np.arange(nk) if k is None else k, tile_k=block), block, device)


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """torch's ``create_block_mask`` with torch's arguments: the same BlockMask, without the table of all pairs.

    >>> blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, 65536, 65536, device="cpu")
    >>> blocks.shape, round(blocks.sparsity(), 1)
    ((1, 1, 65536, 65536), 49.9)

    Where ``mask_mod`` consists of comparisons and integer arithmetic of indices and of captured integer tensors, blocks are decided by
    interval arithmetic, and the time grows with the boundary of the mask. Other functions are evaluated for every pair, tile by tile.

    Args:
        mask_mod: ``mask_mod(b, h, q, k)``, True = may see. q and k are indices: query 0 and key 0 are the first ones.
        B, H: batch rows and query heads; None means 1.
        Q_LEN, KV_LEN: the number of queries and keys.
        device: where mask_mod is evaluated; by default the accelerator, else the CPU.
        BLOCK_SIZE: queries and keys in a block.
        separate_full_blocks: whether blocks without a hidden pair are listed separately.
        _compile, dq_kv_order: ignored.

    Raises:
        CallError: if mask_mod cannot be called, or the device not used; with ``compute_dq_write_order=True``, which only torch's own
            function computes.
        MaskError: if mask_mod does not give bools.

    Source: the documentation of torch.nn.attention.flex_attention.create_block_mask.
    """
    if compute_dq_write_order:
        raise CallError(
            "create_block_mask: compute_dq_write_order=True is not computed here. "
            "Fix: torch.nn.attention.flex_attention.create_block_mask."
        )
    check_function("create_block_mask", "mask_mod", mask_mod)
    device = _device("create_block_mask", _accelerator() if device is None else device)
    rows, heads = (1 if x is None else check_count("create_block_mask", name, x, 1) for name, x in (("B", B), ("H", H)))
    nq, nk = check_count("create_block_mask", "Q_LEN", Q_LEN, 1), check_count("create_block_mask", "KV_LEN", KV_LEN, 1)
    size: Any = BLOCK_SIZE if isinstance(BLOCK_SIZE, tuple | list) else (BLOCK_SIZE, BLOCK_SIZE)
    size = tuple(size)
    if len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
        raise CallError(
            f"create_block_mask: BLOCK_SIZE is {BLOCK_SIZE!r:.60}. Fix: queries and keys in a block, 128 or (128, 128)."
        )
    mask = function_mask(mask_mod, (rows, heads, nq, nk), device)
    if size[0] % TILE_Q == 0:
        seen, whole = blocks_of_plan(plan(mask, np.arange(nq), np.arange(nk), tile_k=size[1]), size[0])
    else:
        seen, whole = _blocks_by_pairs(mask, nq, nk, size)
    seen, whole = (np.broadcast_to(x, (rows, heads, *x.shape[2:])) for x in (seen, whole))
    blocks = block_mask_of_blocks(seen, whole if separate_full_blocks else None, (nq, nk), size, mask_mod, device)
    traced = trace(mask_mod, blocks.kv_num_blocks.device)
    content = None if traced is None else (traced, traced.content())
    _MADE_OF[blocks] = _MadeOf(mask_mod, content, content_of_lists(blocks))
    return blocks


def mask_of(blocks: BlockMask, shape: tuple[int, int, int, int]) -> Mask:
    """A BlockMask as a mask whose positions are indices; ``shape`` is B, Hq, Nq, Nk of the call.

    As in FlexAttention's kernels the lists decide which blocks are visible, and mask_mod decides within those that are not full.
    Lists that our create_block_mask wrote say nothing any more once the tensors that mask_mod captures hold other numbers: it decides
    alone. Lists that somebody wrote since go on deciding.
    What was read is kept as long as its lists, and the tensors that its mask_mod captures, hold what they held.

    Raises:
        CallError: if it was made for other sizes.
    """
    if blocks.BLOCK_SIZE == (_NO_BLOCKS, _NO_BLOCKS):
        return full()
    rows, heads = blocks.kv_num_blocks.shape[:2]
    nq, nk = shape[2:]
    if tuple(blocks.seq_lengths) != (nq, nk) or rows not in (1, shape[0]) or heads not in (1, shape[1]):
        made_for = (rows, heads, *blocks.seq_lengths)
        raise CallError(
            f"flex_attention: block_mask was made for (B, H, Q_LEN, KV_LEN) = {made_for}, but the call has {shape}.\n"
            "Fix: create_block_mask with these sizes (B or H of 1 or None stand for any)."
        )
    fn, device = blocks.mask_mod, blocks.kv_num_blocks.device
    lists = (blocks.kv_num_blocks, blocks.kv_indices, blocks.full_kv_num_blocks, blocks.full_kv_indices)
    traced = trace(fn, device)
    captured = None if traced is None else traced.content()
    of_lists = content_of_lists(blocks)
    key = shape, traced, captured, fn, of_lists
    kept = _MASKS.get(blocks)
    if kept is None or kept[0] != key or captured is None:  # what cannot be followed may have changed
        mask = function_mask(fn, shape, device)
        made_of = _MADE_OF.get(blocks)
        if made_of is None or not made_of.is_outdated(fn, (traced, captured), of_lists):
            listed, whole = (_listed(blocks, *pair) for pair in (lists[:2], lists[2:]))
            sizes = blocks.BLOCK_SIZE
            mask = (Blocks(listed, sizes) & mask) | Blocks(whole, sizes)
        kept = _MASKS[blocks] = key, mask
    return kept[1]


class _MadeOf(NamedTuple):
    """What a BlockMask of our create_block_mask was made of."""

    mask_mod: Any
    content: Any  # of the traced function and of what it captures; None where that cannot be followed
    lists: Any  # their content, as they were written

    def is_outdated(self, mask_mod: Any, content: tuple[Any, Any], lists: Any) -> bool:
        """Whether the lists are as they were written, and what they were made of is not."""
        followed = self.content is not None and content[1] is not None
        return followed and mask_mod is self.mask_mod and lists == self.lists and content != self.content


_MADE_OF: weakref.WeakKeyDictionary[BlockMask, _MadeOf] = weakref.WeakKeyDictionary()


def content_of_lists(blocks: BlockMask) -> tuple[Any, ...]:
    """The content of the lists of visible blocks."""
    lists = (blocks.kv_num_blocks, blocks.kv_indices, blocks.full_kv_num_blocks, blocks.full_kv_indices)
    return tuple(map(content_of, lists))


# BlockMask -> (the sizes, the function, and the content of what it captures and of the lists that the mask was read from; the mask)
_MASKS: weakref.WeakKeyDictionary[BlockMask, tuple[Any, Mask]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Blocks(Mask):
    """The blocks of some queries and keys that are visible as a whole."""

    visible: Any  # the table of the numbers of the blocks
    sizes: tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_batch", self.visible.batch)

    def _sees(self, q: Index, k: Index) -> Any:
        rows, columns = self.visible.table.array.shape
        row, column = within(q // self.sizes[0], rows), within(k // self.sizes[1], columns)
        return self.visible._sees(row + max(columns - rows, 0), column)

    def __repr__(self) -> str:
        return f"blocks({self.visible!r}, {self.sizes})"


def _listed(blocks: BlockMask, counts: Tensor | None, indices: Tensor | None) -> Mask:
    """The blocks in a list of a BlockMask."""
    shape = blocks.kv_num_blocks.shape
    visible = np.zeros((*shape, -(-blocks.seq_lengths[1] // blocks.BLOCK_SIZE[1])), bool)
    if counts is not None and indices is not None:
        number, column = counts.cpu().numpy(), indices.cpu().numpy()
        listed = np.nonzero(np.arange(column.shape[3]) < number[..., None])  # row, head, block row, place in the list
        visible[tuple([*listed[:3], column[listed]])] = True
    if shape[1] > 1:
        return table(visible)
    return table(visible[:, 0] if shape[0] > 1 else visible[0, 0])


def function_mask(
    fn: Callable[..., Any], shape: tuple[int, int, int, int], device: Any, node: Node | None = None
) -> Mask:
    """A mask_mod, or a condition in a score_mod, as a mask whose positions are indices.

    Args:
        fn: the function; True = may see.
        shape: B, H, Nq, Nk; the mask has a batch row or head for each index that the function depends on.
        device: where the function is evaluated.
        node: the condition in the trace of a score_mod.
    """
    traced, call = (trace(fn, device), tensor_function("mask_mod", fn)) if node is None else (node, node.of_indices)
    mapped = torch.vmap(call, in_dims=(None, None, 0, 0))

    def evaluate(*indices: Tensor) -> Tensor:
        with mapped_indexing(), torch.no_grad():
            visible: Tensor = mapped(*indices)
        if visible.dtype != torch.bool:
            raise MaskError(
                f"flex_attention: mask_mod gives {visible.dtype}, but it must give bools, True = may see. Fix: != 0."
            )
        return visible

    rows, heads = (n if traced is None or name in traced.reads else 1 for n, name in zip(shape, "bh", strict=False))
    batch: tuple[int, ...] = ()
    if heads > 1:
        batch = (rows, heads)
    elif rows > 1:
        batch = (rows,)
    key = object() if traced is None else traced.program()
    return FunctionMask(key, fn, evaluate, str(device), traced, batch, shape[2:])


def _blocks_by_pairs(mask: Mask, nq: int, nk: int, size: tuple[int, int]) -> tuple[Bools, Bools]:
    """The blocks with a visible pair and those with no hidden one, for blocks of any number of queries."""
    rows, columns = -(-nq // size[0]), -(-nk // size[1])
    batch = (*mask.batch, *[1 for _ in range(2 - len(mask.batch))])  # (B|1, H|1)
    counts = np.zeros((*batch, rows, columns), np.int64)
    strip = max(1, _PAIRS_AT_ONCE // (nk * size[0]))
    for first in range(0, rows, strip):
        q = np.arange(first * size[0], min((first + strip) * size[0], nq))
        for b, h in np.ndindex(*batch):
            visible = mask.for_row(b, h)(q[:, None], np.arange(nk)[None, :])
            by_row = np.add.reduceat(visible, np.arange(0, len(q), size[0]), axis=0, dtype=np.int64)
            counts[b, h, first : first + strip] = np.add.reduceat(by_row, np.arange(0, nk, size[1]), axis=1)
    return counts > 0, counts == size[0] * size[1]


def _positions(name: str, positions: Any, n: int) -> NDArray[np.int64] | None:
    if positions is None:
        return None
    array = positions_in_numpy(f"block_mask: {name}", positions, f"({n},) or (B, {n})")
    if array.shape[-1:] != (n,) or array.ndim > 2:
        raise CallError(
            f"block_mask: {name} is {array.shape}, but it holds the positions of {n} tokens: ({n},) or (B, {n})."
        )
    return array


def _accelerator() -> Any:
    current = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return current or ("cuda" if torch.cuda.is_available() else "cpu")


def _device(name: str, device: Any) -> Any:
    """A device on which torch can make tensors."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError):
        raise CallError(f'{name}: torch cannot use the device {device!r} here. Fix: device="cpu".') from None
    return device


# The user's functions: checks that they can be called, and errors that name them.

_ARGUMENTS = {"mask_mod": ("b", "h", "q", "k"), "score_mod": ("score", "b", "h", "q", "k")}


def check_function(name: str, argument: str, function: Any) -> None:
    """Raise unless a mask_mod or score_mod can be called with its arguments."""
    arguments = _ARGUMENTS[argument]
    if type(function) is FunctionType:  # reading a signature takes as long as a small call of attention
        code = function.__code__
        if code.co_argcount == len(arguments) and not code.co_kwonlyargcount:
            return
    wanted = f"{argument}({', '.join(arguments)})"
    if not callable(function) or isinstance(function, Tensor | Mask | BlockMask):
        fix = f"a function {wanted}"
        if isinstance(function, BlockMask):
            fix = "block_mask="
        elif isinstance(function, Mask | str) and argument == "mask_mod":
            fix = "lowtri.integrations.flex.block_mask for a mask of lowtri"
        raise CallError(f"{name}: {argument} is {type(function).__name__}. Fix: {fix}.")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        given = inspect.signature(function)
        fix = "create_block_mask for a mask_mod" if argument == "score_mod" and len(given.parameters) == 4 else wanted
        raise CallError(
            f"{name}: {argument} takes {given}, but it is called with ({', '.join(arguments)}). Fix: {fix}."
        ) from None
    except ValueError:  # a built-in function without a signature
        pass


def tensor_function(argument: str, function: Callable[..., Any]) -> Callable[..., Tensor]:
    """The function, with errors for results that are no tensors, and for branches on values."""

    def checked(*values: Any) -> Tensor:
        try:
            result = function(*values)
        except RuntimeError as error:
            if "data-dependent control flow" not in str(error) and ".item()" not in str(error):
                raise
            raise CallError(
                f"flex_attention: {argument} reads the value of an index, as in `if`, `and` or a list's index.\n"
                "Fix: torch.where, & and |, and tensors in place of lists; it is called with all indices at once."
            ) from error
        if not isinstance(result, Tensor):
            raise CallError(
                f"flex_attention: {argument} gives {type(result).__name__}. Fix: a tensor, made of its arguments."
            )
        if argument == "score_mod" and result.dtype == torch.bool:
            raise CallError(
                "flex_attention: score_mod gives torch.bool, but it must give scores. "
                'Fix: torch.where(condition, score, float("-inf")).'
            )
        return result

    return checked
