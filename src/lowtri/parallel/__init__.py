"""One sequence over many processes, split by what its mask shows: torch.distributed moves the keys, the mask says which.

Each file imports only from the files above it:

shards       ShardPlan: which rank holds which tokens, and which keys each rank needs; its pictures
planning     plan_shards: layouts of tokens over ranks, and the choice among them
collectives  collectives with errors that say what failed, the agreement of the ranks, and the exchange of keys and their gradients
context      ContextParallel: what a model sees of a split sequence, its rank's tokens, and attention over all of them

Plans need neither torch nor processes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowtri.extras import require
from lowtri.parallel.planning import plan_shards
from lowtri.parallel.shards import ShardPlan

if TYPE_CHECKING:
    from lowtri.parallel.context import ContextParallel

__all__ = ["ContextParallel", "ShardPlan", "plan_shards"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:  # it loads torch
        if name != "ContextParallel":
            raise AttributeError(f"module 'lowtri.parallel' has no attribute {name!r}")
        require("lowtri.parallel.ContextParallel", "torch")
        return import_module("lowtri.parallel.context").ContextParallel
