"""Kernels read memory themselves, so where torch would do something on the way another engine runs, or an error names what it got."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import lowtri
from lowtri import attention
from lowtri.dispatch.prepared import PREPARED

CAUSAL = lowtri.causal()


def arrays(nq: int = 1, nk: int = 8192) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, h, n, 64, generator=generator) for h, n in ((4, nq), (2, nk), (2, nk))]


@pytest.fixture(params=["first", "again"])
def known(request) -> None:
    """Both when no call like it came before and when one did, which then would be launched again."""
    PREPARED.clear()
    if request.param == "again":
        attention(*arrays(), CAUSAL)
        assert len(PREPARED)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_views_that_torch_negates_as_it_reads(known, place: int) -> None:
    call = arrays()
    right = attention(*call, CAUSAL, engine="reference")
    call[place] = torch._neg_view(-call[place])
    assert call[place].is_neg() and call[place].stride() == arrays()[place].stride()
    torch.testing.assert_close(attention(*call, CAUSAL), right, atol=1e-5, rtol=0)
    with pytest.raises(lowtri.EngineError, match=f"{'qkv'[place]} is a Tensor or a view whose data"):
        attention(*call, CAUSAL, engine="cpu")


def test_zeros_that_lie_nowhere(known) -> None:
    q, k, v = arrays()
    found = attention(q, torch._efficientzerotensor(k.shape), v, CAUSAL)
    torch.testing.assert_close(found, v.mean(2, keepdim=True).repeat_interleave(2, 1), atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks"])
def test_tensors_without_a_place_for_each_number_are_refused(known, name: str) -> None:
    call = dict(zip("qkv", arrays(), strict=True), bias=torch.zeros(8192), sinks=torch.zeros(4))
    call[name] = call[name].to_sparse()
    with pytest.raises(lowtri.CallError, match=rf"{name} is a torch.sparse_coo tensor.* Fix: {name}.to_dense\(\)"):
        attention(mask=CAUSAL, **call)
    nested = torch.nested.nested_tensor([torch.randn(2, 3, 64), torch.randn(2, 4, 64)])
    with pytest.raises(lowtri.CallError, match="q is a nested tensor"):
        attention(nested, nested, nested, CAUSAL)


def test_what_is_recorded_holds_the_computation(known) -> None:
    call, other = arrays(), torch.randn(1, 4, 1, 64)
    right = attention(other, *call[1:], CAUSAL, engine="reference")
    graph = make_fx(lambda q, k, v: attention(q, k, v, CAUSAL))(*call)
    torch.testing.assert_close(graph(other, *call[1:]), right, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, inside forward mode
def test_forward_mode_loses_no_tangent(known) -> None:
    q, k, v = arrays()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        assert "forward-mode" in lowtri.which_engine(dual, k, v, CAUSAL).answers["cpu"]
        tangent = forward_ad.unpack_dual(attention(dual, k, v, CAUSAL)).tangent
    right = (attention(q + 1e-2, k, v, CAUSAL) - attention(q - 1e-2, k, v, CAUSAL)) / 2e-2
    torch.testing.assert_close(tangent, right, atol=1e-3, rtol=1e-2)
