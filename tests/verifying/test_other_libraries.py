"""Other libraries' attention, and lowtri's integrations of them, held to the definition by ``lowtri.verify``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import lowtri
from lowtri.integrations.torch import switch

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # libraries and inductor import it
HEADS = "it repeats key/value heads one after the other: head h reads h % Hkv"
FINITE = "it hides scores by the least finite number"
NAN = "it multiplies hidden values by a weight of 0"
X_TRANSFORMERS = {"grouped heads interleaved": HEADS, "hidden as -1e9": FINITE, "NaN from hidden keys": NAN} | {
    "NaN in queries that see nothing": "their gradients are NaN"
}


def only(given: Any, *, scale: bool = True) -> None:
    """Refuse the options that neither library has."""
    case = given.case
    if case.softcap or given.sinks is not None or case.lse or (case.scale and not scale):
        raise NotImplementedError("an option that it has not")


def jax_call(attend: Any, given: Any) -> Any:
    only(given)
    arrays = (x.swapaxes(1, 2) for x in (given.q, given.k, given.v))
    return attend(*arrays, bias=given.bias, mask=given.visible, scale=given.case.scale).swapaxes(1, 2)


def x_transformers_call(attend: Any, given: Any) -> Any:
    only(given, scale=False)
    bias = None if given.bias is None else given.bias.expand(given.visible.shape)
    return attend(given.q, given.k, given.v, mask=given.visible, attn_bias=bias)[0]


@pytest.mark.sweep
def test_jax() -> None:
    import jax

    from lowtri.integrations.jax import dot_product_attention

    known = {"hidden as -1e9": FINITE, "NaN from hidden keys": NAN, "NaN in queries that see nothing": NAN}
    known["denormal values"] = "XLA takes denormal numbers as 0"
    options: dict[str, Any] = {"signature": jax_call, "dtypes": ["float32"]}
    report = lowtri.verify(jax.nn.dot_product_attention, differences=known, **options)
    assert report.arrays == "jax" and report.ok, report
    report = lowtri.verify(dot_product_attention, **options)
    assert report.arrays == "jax" and report.ok and not report.findings, report


@pytest.mark.parametrize("flash", [False, True])
def test_x_transformers(flash: bool) -> None:
    from x_transformers.attend import Attend

    options: dict[str, Any] = {"signature": x_transformers_call, "dtypes": ["float32"]}
    report = lowtri.verify(Attend(flash=flash), differences=X_TRANSFORMERS, **options)
    assert report.ok and len(report.findings) > 10, report
    (switched,) = switch(torch.nn.ModuleList([Attend(flash=flash)]))
    report = lowtri.verify(switched, differences={"grouped heads interleaved": HEADS}, **options)
    assert report.ok and {finding.mistake for finding in report.findings} == {"grouped heads interleaved"}, report


@pytest.mark.sweep
def test_compiled_flex_attention() -> None:
    compiled = torch.compile(torch_flex.flex_attention)
    known = {"NaN in hidden keys and values": NAN, "inf in hidden values": NAN, "NaN that later queries see": NAN}
    report = lowtri.verify(compiled, signature="flex", dtypes=["float32"], gradients=False, differences=known)
    assert report.ok, report


@pytest.mark.parametrize("implementation", ["lowtri", "lowtri-cpu"])
def test_the_interface_of_transformers(implementation: str) -> None:
    """The function that transformers calls: a mask of its own additive form, heads before tokens, tokens first in the output."""
    from lowtri.integrations.transformers import attend, register

    register()
    register("lowtri-cpu", engine="cpu")

    def call(function: Any, given: Any) -> Any:
        case = given.case
        if given.sinks is not None or case.lse or given.bias is not None or not case.visible.any(-1).all():
            raise NotImplementedError("transformers has no such argument, or fills rows that see nothing")
        if case.numbers != "normal":
            raise NotImplementedError("additive masks of finite numbers")
        module = torch.nn.Module()
        module.num_key_value_groups = case.hq // case.hkv  # type: ignore[assignment]
        module.is_causal = False  # type: ignore[assignment]
        hidden = torch.zeros(given.visible.shape, dtype=given.q.dtype).masked_fill(~given.visible, -torch.inf)
        mask = None if case.text == "full" else hidden
        softcap = {} if case.softcap is None else {"softcap": case.softcap}
        return function(module, given.q, given.k, given.v, mask, scaling=given.scale, **softcap)[0].transpose(1, 2)

    report = lowtri.verify(attend, signature=call, dtypes=["float32"])
    assert report.ok and report.passed > 25, report
