"""Every backend and integration of lowtri, and the libraries that they serve, compared with the definition by ``lowtri.verify``.

A documented difference is listed with its sentence; without one, nothing may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import attentions
import jax
import pytest
import torch
import torch.nn.functional as F
from attentions import late, of_engine
from torch.nn.attention import flex_attention as torch_flex

import lowtri
from lowtri.backends import flex
from lowtri.integrations import flash_attn
from lowtri.integrations import transformers as of_transformers
from lowtri.integrations.flex import flex_attention
from lowtri.integrations.torch import switch

pytestmark = [  # inductor imports torch.jit; FlexAttention's lse has had three names
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*return_lse"),
]
NAN = {"NaN from hidden keys": "hidden values are multiplied by a weight of 0"}
LATE = {"NaN that later queries see": "hidden values are multiplied by a weight of 0"}
NAN_GRADIENTS = {"NaN in queries that see nothing": "NaN in hidden queries gives NaN gradients"}
# torch 2.13 compiles a score_mod for few queries wrongly: it reads past its own block of scores. What comes of it (NaN, other numbers,
# its own check of an index) differs by CPU.
_COMPILED_WRONGLY = "torch compiles a score_mod for few queries wrongly"
FEW_QUERIES = dict.fromkeys(("ALiBi, 5 queries", "bias, 5 queries", "bias, more queries than keys"), _COMPILED_WRONGLY)
LOWEST = {
    "hidden as -1e9": "a row in which every key has the lowest number gives the mean of the values, as in torch",
    "NaN from hidden keys": "such a row has all values",
}
FINITE = {"hidden as -1e9": "hidden scores become a finite number"}
XLA = {"denormal values": "XLA takes denormal numbers as 0"}
ALL = ["float32", "bfloat16", "float16", "float64"]


class Entry(NamedTuple):
    """A function, the options of ``verify``, and which cases agree at least, so that nothing passes because it is not offered."""

    attend: Callable[..., Any]
    options: Mapping[str, Any] = MappingProxyType({})
    least: int = 53


def called(call: Callable[..., Any], *first: Any, **options: Any) -> dict[str, Any]:
    return {"signature": partial(call, *first), **options}


def same(module: Any) -> Any:
    return module


@cache
def _compiled_flex_attention() -> Any:
    return torch.compile(torch_flex.flex_attention)


def compiled_flex_attention(*arrays: Any, **options: Any) -> Any:
    from torch._inductor.exc import InductorError

    with torch._dynamo.config.patch(recompile_limit=200):  # it is compiled for each case
        try:
            return _compiled_flex_attention()(*arrays, **options)
        except InductorError as error:  # for some sizes torch writes C++ that does not compile
            raise NotImplementedError(str(error).splitlines()[0]) from None


CACHES = {"ragged": 37, "left padding": 37, "pages": 37, "index": 37, "new tokens": 37, "rotary": 35}
OURS: dict[str, Entry] = {
    "backend cpu": Entry(of_engine("cpu"), {"dtypes": ALL}, 220),
    "backend formula": Entry(of_engine("formula"), {"dtypes": ALL}, 220),
    "backend reference": Entry(of_engine("reference"), {"gradients": False}),
    "backend sdpa": Entry(of_engine("sdpa"), {"differences": LATE}, 45),
    "backend flex": Entry(attentions.flex_backend, {"gradients": False, "differences": LATE}, 50),
    "attention": Entry(lowtri.attention),
    "attention, NumPy": Entry(attentions.numpy_only, {"dtypes": ["float32", "float64"]}, 100),
    "scaled_dot_product_attention": Entry(lowtri.scaled_dot_product_attention, {"signature": "sdpa"}, 55),
    "scaled_dot_product_attention, is_causal": Entry(
        lowtri.scaled_dot_product_attention, called(attentions.sdpa_causal), 40
    ),
    "flash_attn": Entry(flash_attn.flash_attn_func, {"signature": "flash", "dtypes": ALL}, 130),
    "flash_attn packed": Entry(late(flash_attn, "flash_attn_kvpacked_func"), called(attentions.flash_packed), 34),
    "flash_attn varlen": Entry(flash_attn.flash_attn_varlen_func, called(attentions.flash_varlen), 35),
    "flash_attn rotary": Entry(flash_attn.flash_attn_func, called(attentions.flash_rotary, False), 30),
    "flash_attn rotary, interleaved": Entry(flash_attn.flash_attn_func, called(attentions.flash_rotary, True), 30),
    **{
        f"flash_attn cache, {form}": Entry(
            late(flash_attn, "flash_attn_with_kvcache"), called(attentions.flash_cache, form, gradients=False), least
        )
        for form, least in CACHES.items()
    },
    "flex_attention": Entry(flex_attention, {"signature": "flex"}, 55),
    **{
        f"flex_attention, {form}": Entry(flex_attention, called(attentions.flex_formulas, form), 50)
        for form in ("formulas", "conditions", "general")
    },
    **{
        f"nn.MultiheadAttention, {form}": Entry(switch, called(attentions.multihead, form), least)
        for form, least in (("bools", 50), ("floats", 50), ("is_causal", 20))
    },
    "jagged tensors": Entry(lowtri.attention, called(attentions.jagged), 40),
    "EvictingCache": Entry(of_transformers.attend, called(attentions.evicting_cache, gradients=False), 36),
    "lowtri.nn.MultiHeadAttention": Entry(lowtri.nn.MultiHeadAttention, called(attentions.lowtri_module), 44),
    **{
        f"transformers, {form}": Entry(
            of_transformers.attend, called(attentions.transformers_call, form, differences=differences), 56
        )
        for form, differences in (("bools", {}), ("-inf", {}), ("least", LOWEST))
    },
    "transformers, no table": Entry(of_transformers.attend, called(attentions.transformers_call, "nothing"), 30),
    "transformers, mask functions": Entry(of_transformers.attend, called(attentions.transformers_masks), 45),
}
THEIRS: dict[str, Entry] = {
    "scaled_dot_product_attention": Entry(
        F.scaled_dot_product_attention, {"signature": "sdpa", "differences": NAN}, 45
    ),
    "nn.MultiheadAttention": Entry(
        same,
        called(attentions.multihead, "bools", differences=NAN | {"no rows": "it cannot reshape an empty batch"}),
        42,
    ),
    "onnx": Entry(
        attentions.onnx_evaluator,
        called(attentions.onnx_call, differences=NAN | {"no keys": "it takes the greatest of no scores"}),
        50,
    ),
    "jax.nn": Entry(
        jax.nn.dot_product_attention,
        called(attentions.jax_call, differences=NAN | FINITE | XLA | NAN_GRADIENTS),
        45,
    ),
    "jax.nn, mask.dense": Entry(
        jax.nn.dot_product_attention,
        called(attentions.jax_dense, differences=NAN | FINITE | XLA | NAN_GRADIENTS),
        45,
    ),
    "compiled FlexAttention": Entry(
        compiled_flex_attention,
        {"signature": "flex", "gradients": False, "differences": NAN | LATE | FEW_QUERIES},
        30,
    ),
}
SLOW = {"jax.nn", "jax.nn, mask.dense", "compiled FlexAttention"}  # most of the time is a compiler's
FEW = [
    *("full", "causal", "one query, 130 keys", "grouped heads", "window of 5", "window on both sides", "padding right"),
    *("bias", "scale", "sink logits", "log-sum-exp", "empty rows", "softcap"),
]


def check(entry: Entry, cases: list[str] | None = None) -> None:
    report = lowtri.verify(entry.attend, **{"dtypes": ["float32"], "cases": cases, **entry.options})
    assert report.ok, report
    assert report.passed >= (entry.least if cases is None else len(cases) - 2), report


@pytest.mark.sweep
@pytest.mark.parametrize("name", OURS)
def test_lowtri(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # its formula, without compiling
    monkeypatch.setattr(flex, "_compiled", lambda on_cpu: (torch_flex.flex_attention, None))
    check(OURS[name])


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.sweep if one in SLOW else ()) for one in THEIRS])
def test_other_libraries(name: str) -> None:
    check(THEIRS[name])
