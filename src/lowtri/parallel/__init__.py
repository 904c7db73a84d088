"""One sequence over many processes, split by what its mask shows: torch.distributed moves the keys, the mask says which.

runs       runs of key blocks: which blocks the queries of a rank see
dealing    ways of dealing blocks of tokens to ranks
picture    pictures of a plan
shards     ShardPlan: which rank holds which tokens, and which keys each rank needs
planning   plan_shards
"""

from __future__ import annotations

from lowtri.parallel.planning import plan_shards
from lowtri.parallel.shards import ShardPlan

__all__ = ["ShardPlan", "plan_shards"]
