"""torch.onnx.export: a call becomes torch's own operations, and what cannot be exported is told in words.

The recording is torch.export's, told that it is for ONNX: the exporter itself needs onnxscript.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import draw
from programs import Attend

import lowtri
from lowtri import CallError

pytestmark = pytest.mark.not_emulated

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "causal": ("causal", {}),
    "documents": (lowtri.causal() & lowtri.documents([0] * 4 + [1] * 5), {"return_lse": True}),
    "rows that see nothing": (lowtri.keys(lengths=[0, 5]), {"return_weights": True, "return_lse": True}),
    "all results": ("causal", {"return_weights": True, "return_received": True, "return_lse": True}),
    "every option": ("window(4)", {"softcap": 2.0, "scale": 0.5, "sinks": torch.linspace(-1, 1, 4)}),
    "a bias": ("causal", {"bias": torch.linspace(-3, 0, 81).reshape(9, 9)}),
    "distances": ("causal", {"bias": lowtri.alibi(torch.linspace(0.1, 0.5, 4))}),
    "positions": ("causal", {"q_positions": range(3, 12), "k_positions": np.arange(9)}),
    "a formula": (lowtri.where(lambda q, k: (q + k) % 3 == 0), {}),
}


@pytest.fixture(autouse=True)
def for_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)


@pytest.mark.parametrize("name", CASES)
def test_an_exported_call_has_torchs_operations_alone(name: str) -> None:
    mask, options = CASES[name]
    module = Attend(mask, **options)
    program = torch.export.export(module, draw())
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert targets and all(target.startswith("aten.") for target in targets), targets
    inputs = draw(seed=1)
    found, right = (f(*inputs) for f in (program.module(), module))
    pairs = zip(found, right, strict=True) if isinstance(right, tuple) else [(found, right)]
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_keys_that_nobody_sees_leave_no_trace() -> None:
    q, k, v = draw()
    module = Attend(lowtri.keys(lengths=[5, 7]))
    program = torch.export.export(module, (q, k, v)).module()
    right = module(q, k, v)
    k[:, :, 7:], v[:, :, 7:] = torch.nan, torch.inf
    torch.testing.assert_close(program(q, k, v), right, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_exported() -> None:
    length = torch.export.Dim("length", min=2, max=99)
    words = r"torch\.onnx\.export with lengths that vary: .*\nFix: export without dynamic_"
    with pytest.raises(CallError, match=words):
        torch.export.export(Attend("causal"), draw(), dynamic_shapes=({2: length},) * 3)
    with pytest.raises(CallError, match=r"torch\.onnx\.export with dropout\. Fix: model\.eval\(\)"):
        torch.export.export(Attend("causal", dropout=0.5), draw())

    class Positions(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, positions: Any) -> Any:
            return lowtri.attention(q, k, v, "causal", q_positions=positions)

    with pytest.raises(CallError, match=r"q_positions that are a tensor of the program\. Fix: a range"):
        torch.export.export(Positions(), (*draw(), torch.arange(9)))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="lengths that vary"):
        torch.export.export(Attend("causal"), draw(), strict=True)


def test_a_program_that_was_exported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch runs through the operations of the program again, and finds lowtri's operator there."""
    x = torch.zeros(1, 2, 4, 8)
    with pytest.MonkeyPatch.context() as outside:
        outside.setattr(torch.onnx, "is_in_onnx_export", lambda: False)
        program = torch.export.export(Attend("causal"), (x, x, x))
    words = r"got a program that was exported before(.|\n)*Fix: torch.onnx.export\(model, args\)"
    with pytest.raises(CallError, match=words):
        program.run_decompositions()
