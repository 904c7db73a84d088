"""The probes, in the order in which they run. Each is one function from a `Context` to a `Finding`."""

from __future__ import annotations

from collections.abc import Callable

from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding
from lowtri.auditing.probes.batch import batch
from lowtri.auditing.probes.blindness import blindness
from lowtri.auditing.probes.cache import cache
from lowtri.auditing.probes.change import change
from lowtri.auditing.probes.doors import doors
from lowtri.auditing.probes.gradient import gradient
from lowtri.auditing.probes.longer import longer
from lowtri.auditing.probes.packing import packing
from lowtri.auditing.probes.padding import padding
from lowtri.auditing.probes.poison import poison
from lowtri.auditing.probes.prefix import prefix
from lowtri.auditing.probes.training import training

__all__ = ["PROBES", "REPEATED", "RESHAPED"]

PROBES: dict[str, Callable[[Context], Finding]] = {
    "change": change,
    "gradient": gradient,
    "prefix": prefix,
    "batch": batch,
    "padding": padding,
    "packing": packing,
    "cache": cache,
    "doors": doors,
    "training": training,
    "longer": longer,
    "poison": poison,
    "blindness": blindness,
}

# Probes that compare runs of different shapes, where rounding alone can flip a discrete choice: always confirmed in float64.
RESHAPED = frozenset({"prefix", "batch", "padding", "packing", "cache"})

# Probes that repeat others under other conditions, and the leaks after which that is not worth its time.
REPEATED = {
    "training": frozenset({"change", "gradient", "prefix"}),
    "longer": frozenset({"change", "gradient", "prefix", "training"}),
}
