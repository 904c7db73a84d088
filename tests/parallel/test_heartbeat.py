"""A process that gives no sign of life ends the others, and one that has completed its work ends as usual."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from heartbeat_on_ranks import one_is_complete_and_the_next_hangs, stopped_while_it_ends

from ranks import Ranks


@pytest.mark.sweep
def test_sweep_a_process_is_watched_also_when_the_one_that_watched_it_is_complete(tmp_path: Path) -> None:
    group = Ranks(4, once=True)
    try:
        group.start(one_is_complete_and_the_next_hangs, tmp_path)
        for rank in (2, 3):
            group.processes[rank].join(30)
        assert [process.exitcode for process in group.processes] == [0, None, 1, 1]
    finally:
        os.kill(group.processes[1].pid, signal.SIGKILL)
        group.stop()
    lines = [line for path in tmp_path.glob("stderr-*") for line in path.read_text().splitlines()]
    assert lines == ["lowtri: rank 1 of 4 ended; start again with --resume"]


def test_sigterm_is_no_error_of_work_that_is_complete() -> None:
    group = Ranks(2, once=True)
    try:
        group.start(stopped_while_it_ends)
        assert group.results(30) == ["complete", "complete"]
        for process in group.processes:
            process.join(10)
        assert [process.exitcode for process in group.processes] == [0, 0]
    finally:
        group.stop()
