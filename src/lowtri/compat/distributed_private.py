"""The key-value store of torch.distributed, which has no public name."""

from __future__ import annotations

from typing import Any

from torch.distributed import distributed_c10d

__all__ = ["default_store", "own_store"]


def default_store() -> Any:
    """The store that the processes met in when torch.distributed began, or None if this torch does not expose it.

    A collective that fails does not say which process is missing; the store still answers. Publicly there are only stores that
    one makes oneself, with an address that all processes must know beforehand.
    """
    find = getattr(distributed_c10d, "_get_default_store", None)
    return None if find is None else find()


def own_store() -> Any:
    """The same store by another connection, for a thread: on one connection, a call waits for those before it.

    None where this torch does not expose the store, or cannot clone it.
    """
    store = default_store()
    clone = getattr(store, "clone", None)
    return None if clone is None else clone()
