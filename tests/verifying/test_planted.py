"""The matrix finds faults: those of ``tests/support/planted.py``, planted one at a time."""

from __future__ import annotations

import pytest
import torch
from planted import FAULTS
from test_matrix import OURS
from torch.nn.attention import flex_attention as torch_flex

import lowtri


def is_found(entry: str, case: str) -> bool:
    """Whether an entry of the matrix differs from the definition in a case."""
    options = {**OURS[entry].options, "dtypes": ["float32"], "gradients": False, "cases": [case]}
    return not lowtri.verify(OURS[entry].attend, **options).ok


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    fault = FAULTS[name]
    with fault.planted():
        missed = [entry for entry in fault.found_by if not is_found(entry, fault.case)]
    assert not missed, f"{fault.door}: {fault.says} Not found by {missed}"


def test_faults_leave_with_their_context() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    table = torch.rand(5, 5, generator=torch.Generator().manual_seed(1)) < 0.5
    right = lowtri.scaled_dot_product_attention(q, k, v, attn_mask=table)
    with FAULTS["sdpa polarity"].planted():
        assert not torch.equal(lowtri.scaled_dot_product_attention(q, k, v, attn_mask=table), right)
    assert torch.equal(lowtri.scaled_dot_product_attention(q, k, v, attn_mask=table), right)


def test_every_fault_says_what_is_wrong() -> None:
    assert len(FAULTS) >= 40 and len({fault.says for fault in FAULTS.values()}) == len(FAULTS)
    assert all(fault.says.endswith(".") and fault.found_by for fault in FAULTS.values())
