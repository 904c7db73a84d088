"""How a case becomes a call: the arguments of lowtri, of torch's SDPA, of flash-attn and of FlexAttention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lowtri.verifying.cases import Case, Numbers

__all__ = ["SIGNATURES", "Binding", "Convert", "Given", "NotOffered", "Signature", "custom"]

Convert = Callable[[Tensor], Any]  # a float64 or bool tensor as an array of the callable's library, dtype and device


@dataclass(frozen=True)
class Binding:
    """The arguments after q, k and v.

    Attributes:
        keywords: the arguments.
        visible: (B, Hq, Nq, Nk), if the call means another mask than the case's.
        lse: where the result has the log-sum-exp, if the call returns one.
        how: what distinguishes this call of the case from others.
    """

    keywords: Mapping[str, Any] = field(default_factory=dict)
    visible: Tensor | None = None
    lse: int | None = None
    how: str = ""


class NotOffered(Exception):
    """The signature has no argument for this."""


@dataclass(frozen=True)
class Signature:
    """``bind`` gives the calls of a case; ``heads_last`` says that arrays are (B, N, H, D)."""

    bind: Callable[[Case, Numbers, Convert], Iterator[Binding]]
    heads_last: bool = False


def _mask(case: Case, x: Numbers, convert: Convert) -> Iterator[Binding]:
    keywords: dict[str, Any] = {"mask": case.mask}
    keywords |= {name: value for name, value in (("scale", case.scale), ("softcap", case.softcap)) if value is not None}
    keywords |= {name: convert(value) for name, value in (("bias", x.bias), ("sinks", x.sinks)) if value is not None}
    if case.lse:
        keywords["return_lse"] = True
    yield Binding(keywords, lse=1 if case.lse else None)


def _sdpa(case: Case, x: Numbers, convert: Convert) -> Iterator[Binding]:
    _refuse(softcap=case.softcap is not None, sinks=case.sinks, **{"log-sum-exp": case.lse})
    keywords: dict[str, Any] = {} if case.scale is None else {"scale": case.scale}
    if case.hkv != case.hq:
        keywords["enable_gqa"] = True
    if case.text == "causal" and x.bias is None:
        corner = torch.ones(case.nq, case.nk, dtype=torch.bool).tril().expand(case.visible.shape)
        yield Binding(keywords | {"is_causal": True}, corner, how="is_causal=True")
    if case.text == "full" and x.bias is None:
        yield Binding(keywords)
    elif x.bias is None:
        yield Binding(keywords | {"attn_mask": convert(_table(case))}, how="attn_mask of bools")
    else:
        added = torch.where(case.visible, x.bias, -math.inf)
        yield Binding(keywords | {"attn_mask": convert(added)}, how="attn_mask of floats")


def _flash(case: Case, x: Numbers, convert: Convert) -> Iterator[Binding]:
    _refuse(bias=case.bias not in ("", "alibi"), sinks=case.sinks)
    keywords: dict[str, Any] = {} if case.scale is None else {"softmax_scale": case.scale}
    words = case.text.replace(" ", "")
    if words == "causal":
        keywords["causal"] = True
    elif words.startswith("causal&window(") and words.count("(") == 1:
        keywords |= {"causal": True, "window_size": (int(words[len("causal&window(") : -1]) - 1, 0)}
    elif words.startswith("band("):
        before, after = words[len("band(") : -1].split(",")
        keywords["window_size"] = (int(before), int(after))
    elif words != "full":
        raise NotOffered(f"mask {case.text}")
    if case.softcap is not None:
        keywords["softcap"] = case.softcap
    if x.slopes is not None:
        keywords["alibi_slopes"] = x.slopes.float()
    if case.lse:
        keywords["return_attn_probs"] = True
    yield Binding(keywords, lse=1 if case.lse else None)


def _flex(case: Case, x: Numbers, convert: Convert) -> Iterator[Binding]:
    from torch.nn.attention.flex_attention import create_block_mask

    _refuse(sinks=case.sinks, **{"zero sizes": 0 in (case.b, case.nq, case.nk)})
    keywords: dict[str, Any] = {} if case.scale is None else {"scale": case.scale}
    if case.hkv != case.hq:
        keywords["enable_gqa"] = True
    if case.text != "full":
        visible = case.visible.to(convert(torch.zeros(1)).device)

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return visible[b, h, q, k]

        sizes = (case.b, case.hq, case.nq, case.nk)
        keywords["block_mask"] = create_block_mask(mask_mod, *sizes, device=str(visible.device))
    cap, bias = case.softcap, None if x.bias is None else convert(x.bias.expand(case.visible.shape))
    if cap is not None or bias is not None:

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            capped = score if cap is None else cap * torch.tanh(score / cap)
            return capped if bias is None else capped + bias[b, h, q, k]

        keywords["score_mod"] = score_mod
    if case.lse:
        keywords["return_lse"] = True
    yield Binding(keywords, lse=1 if case.lse else None)


@dataclass(frozen=True)
class Given:
    """A case as a custom signature reads it; arrays are of the callable's library.

    Attributes:
        case: its sizes, ``text``, ``scale`` (None: 1 / sqrt(D)), ``softcap`` and ``lse`` (whether to return it).
        q, k, v: (B, Hq, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv).
        visible: (B, Hq, Nq, Nk), True = may see; ``case.mask`` is the lowtri mask.
        bias, sinks, slopes: (B or 1, Hq or 1, Nq or 1, Nk), (Hq,), and (Hq,) of ALiBi; None where the case has none.
    """

    case: Case
    q: Any
    k: Any
    v: Any
    visible: Any
    bias: Any
    sinks: Any
    slopes: Any


def custom(attend: Any, call: Callable[[Any, Given], Any]) -> tuple[Callable[..., Any], Signature]:
    """A function of q, k and v that makes the call as ``call`` says, and its signature."""

    def bind(case: Case, x: Numbers, convert: Convert) -> Iterator[Binding]:
        rest = [None if one is None else convert(one) for one in (x.bias, x.sinks, x.slopes)]
        given = Given(case, None, None, None, convert(case.visible), *rest)
        yield Binding({"given": given}, lse=1 if case.lse else None)

    def attend_as_said(q: Any, k: Any, v: Any, given: Given) -> Any:
        return call(attend, replace(given, q=q, k=k, v=v))

    return attend_as_said, Signature(bind)


def _table(case: Case) -> Tensor:
    """The mask as bools, in the smallest shape that broadcasts."""
    same = bool((case.visible == case.visible[:1, :1]).all())
    return case.visible[0, 0] if same and case.b else case.visible[:, :1]


def _refuse(**wanted: bool) -> None:
    for name, yes in wanted.items():
        if yes:
            raise NotOffered(name)


SIGNATURES = {
    "mask": Signature(_mask),
    "sdpa": Signature(_sdpa),
    "flash": Signature(_flash, heads_last=True),
    "flex": Signature(_flex),
}
