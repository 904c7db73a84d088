"""Functions of test_heartbeat that run on each rank."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lowtri.parallel.heartbeat import beating
from lowtri.training.processes import ending_together


def one_is_complete_and_the_next_hangs(group: Any, folder: Path) -> str:
    """Rank 0 has completed its work, rank 1 gives no sign of life, and the others wait for it."""
    rank = dist.get_rank()
    sys.stderr = open(folder / f"stderr-{rank}", "w")  # noqa: SIM115
    with beating(timeout=2):
        if rank == 1:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif rank > 1:
            time.sleep(60)
    return "complete"


def stopped_while_it_ends(group: Any) -> str:
    """SIGTERM comes while the last of the work is done."""
    with ending_together():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    return "complete"
