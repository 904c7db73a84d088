"""Whether the steps that are shown are what the module itself computes, to rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.backends.reference import Steps
from lowtri.dispatch.attend import attention
from lowtri.explaining.calling import OwnOutput, own_outputs
from lowtri.explaining.capture import Captured
from lowtri.masks import table
from lowtri.pictures.labels import spelled_out

Floats = NDArray[np.float64]


class Agreement(NamedTuple):
    """What to say about a module's own output."""

    note: str = ""
    warning: str = ""  # where the steps are not what the module computes, or this cannot be checked
    own: Floats | None = None  # (H, Nq, Dv) to show beside the steps; None where they agree


def compare(captured: Captured, result: Steps, visible: NDArray[np.bool_], head: int | None) -> Agreement:
    """Compare the output of the steps, (1, H, Nq, Dv), with the module's own.

    Args:
        visible: (H, Nq, Nk), of the heads that are shown.
        head: the head that is shown; None: all.
    """
    if captured.output is None and captured.module is None:
        return Agreement()
    expected, name = result.output[0], captured.name  # (H, Nq, Dv)
    candidates, why_not = _candidates(captured, expected.shape, visible, head)
    sees: Any = result.visible[0].any(axis=-1)  # (H, Nq)
    limit = _rounding(captured, result, head)
    differences = [_difference(one.table, expected, sees) for one in candidates]
    agreeing = [i for i, difference in enumerate(differences) if difference <= limit]
    comparable = [i for i, one in enumerate(candidates) if one.is_meant]
    if not agreeing and not comparable and why_not:
        return Agreement(warning=f"{name}'s own output is not compared: its forward raised {_one_line(why_not)}.")
    if not agreeing and not comparable:
        shape = " x ".join(map(str, expected.shape[1:]))
        return Agreement(warning=f"{name}'s own output is not compared: none of its outputs is {shape} for each head.")
    if not agreeing:
        nearest = min(comparable, key=lambda i: differences[i])
        how = f" ({candidates[nearest].how})" if candidates[nearest].how else ""
        words = f"{name}'s own output differs from these steps by up to {differences[nearest]:.2g}{how}"
        because = "the steps are what its weights give in the formulas shown, not what it computes"
        return Agreement(warning=f"{words}: {because}.", own=candidates[nearest].table)
    own, _, _ = candidates[agreeing[0]]
    note = f"Computed anew in float64; {name}'s own output differs by {differences[agreeing[0]]:.0e}."
    blind = np.flatnonzero(~sees.all(axis=0))
    if not len(blind) or _difference(own, expected, ~sees) <= limit:
        return Agreement(note)
    queries = ", ".join(map(str, blind[:8])) + (", ..." if len(blind) > 8 else "")
    away = f"where a query sees no key ({queries}), the output is 0 here and something else in {name}"
    if captured.module is None:  # padding of a model, whose output is not used
        return Agreement(f"{note} Not compared: {away}.")
    return Agreement(warning=f"{name}'s own output differs from these steps: {away}.", own=own)


def _candidates(
    captured: Captured, shape: tuple[int, ...], visible: NDArray[np.bool_], head: int | None
) -> tuple[list[OwnOutput], str]:
    """What may be the module's own output, (H, Nq, Dv) each, and why a call of the module failed, where it did."""
    shown = slice(None) if head is None else slice(head, head + 1)
    if captured.output is not None:
        return [OwnOutput(captured.output[shown], "")], ""
    pairs = visible[0] if (visible == visible[0]).all() else visible
    heads = len(captured.arrays["v"])
    outputs, why_not = own_outputs(captured.module, captured.inputs, pairs)
    fitting = [one for one in outputs if one.table.shape == (shape[1], heads * shape[2])]
    return [one._replace(table=np.stack(np.split(one.table, heads, axis=1))[shown]) for one in fitting], why_not


def _difference(own: Floats, expected: Floats, rows: NDArray[np.bool_]) -> float:
    """The greatest difference in these rows (H, Nq); infinite where only one of the two is a number."""
    same = (own == expected) | (np.isnan(own) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        away = np.where(same, 0.0, abs(own - expected))
    return float(np.nan_to_num(away, nan=np.inf)[rows].max(initial=0.0))


def _rounding(captured: Captured, result: Steps, head: int | None) -> float:
    """How far rounding may move the output: a multiple of what it moves the formula in the module's own dtype.

    Results of one dtype differ by the order of their sums and by what is rounded between the steps. The second term is for inputs
    with which the formula happens to be exact.
    """
    import torch

    dtype = torch.float64 if captured.dtype is None else captured.dtype
    q, k, v = (torch.from_numpy(x).to(dtype) for x in (result.q, result.k, result.v))
    if captured.module is not None:
        q, k, v = _projected(captured, head, dtype)
    again = attention(
        q,
        k,
        v,
        table(result.visible),
        scale=result.scale,
        softcap=result.softcap,
        bias=None if captured.bias is None else torch.from_numpy(captured.bias[None]).to(dtype),
        sinks=None if captured.sinks is None else torch.from_numpy(captured.sinks).to(dtype),
        engine="formula",
    )
    moved = _greatest(again.double().numpy() - result.output)
    seen_keys: Any = result.visible.any(axis=2)  # (1, H, Nk)
    values = np.where(seen_keys[..., None], result.v, 0)  # a key that no query sees may hold any value, NaN too
    scores = np.where(result.visible, result.masked, 0)
    return 8 * moved + float(torch.finfo(dtype).eps) * _greatest(values) * (4 + _greatest(scores))


def _greatest(x: Floats) -> float:
    """The greatest absolute value among the finite numbers."""
    return float(np.abs(np.where(np.isfinite(x), x, 0)).max(initial=0.0))


def _projected(captured: Captured, head: int | None, dtype: Any) -> Iterator[Any]:
    """q, k and v (1, H, N, D), projected in the module's own dtype."""
    import torch

    encoding = torch.from_numpy(captured.arrays["encoding"]).to(dtype)
    for name in "qkv":
        result = encoding @ torch.from_numpy(captured.arrays[f"W_{name}^T"]).to(dtype)
        bias = captured.arrays.get(f"b_{name}")
        if bias is not None:
            result = result + torch.from_numpy(bias).to(dtype)
        yield (result if head is None else result[head : head + 1])[None]


def _one_line(error: str) -> str:
    text = spelled_out(" ".join(error.split()))
    return text if len(text) <= 200 else f"{text[:199]}…"
