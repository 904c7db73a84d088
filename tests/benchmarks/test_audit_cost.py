"""``benchmarks/audit_cost.py``: every forward is counted under its probe, and what probes leave is named apart."""

from __future__ import annotations

import torch

from audit_cost import gpt2, main, measured, table


def test_forwards_are_counted_by_probe_shape_and_precision() -> None:
    ids = torch.arange(8)[None]
    cost = measured(gpt2(8, 20), ids, probes="state,batch,prefix")
    assert cost.report.ok and set(cost.by_probe) == {"other", "state", "batch", "prefix"}
    shapes = {shape for title, shape, _ in cost.forwards if title == "prefix"}
    assert shapes == {(1, length) for length in range(1, 8)}
    batches = {shape for title, shape, _ in cost.forwards if title == "batch"}
    assert batches == {(1, 8), (3, 8)}  # the example alone, and with two changed copies
    assert abs(sum(cost.by_probe.values()) - cost.seconds) < 1e-6
    assert {kind for *_, kind in cost.forwards} <= {"float32", "float64"}
    lines = table(cost, shapes=True).splitlines()
    assert lines[-1].split()[0] == "total" and lines[-1].split()[2] == str(sum(cost.forwards.values()))
    assert any(line.startswith("batch") and "of 3x8 float32" in line for line in lines)


def test_the_program_prints_what_it_measured(capsys) -> None:
    main(["--width", "8", "--vocab", "20", "--rows", "1", "--probes", "prefix"])
    out = capsys.readouterr().out
    assert out.startswith("8 wide, 20 ids, 1 x 64 tokens: no leak found against causal") and "\nprefix " in out
