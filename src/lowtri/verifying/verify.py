"""``verify``: hold anyone's attention to the definition, and name the mistake where it differs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lowtri.errors import CallError
from lowtri.verifying.cases import CASES, Case
from lowtri.verifying.report import VerifyReport
from lowtri.verifying.running import Runner, arrays_that_work
from lowtri.verifying.signatures import SIGNATURES, Signature, custom
from lowtri.verifying.verification import Verification

__all__ = ["verify"]

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


def verify(
    attend: Callable[..., Any],
    *,
    signature: str | Callable[..., Any] = "mask",
    dtypes: Sequence[str] | None = None,
    device: str = "cpu",
    gradients: bool = True,
    cases: str | Iterable[str] | None = None,
    differences: Mapping[str, str] | None = None,
    limit: float = 60.0,
    seed: int = 0,
) -> VerifyReport:
    """Whether a function computes masked attention; where it does not, which well-known mistake it makes.

    >>> import lowtri, torch
    >>> def attend(q, k, v, mask):
    ...     scores = q @ k.mT  # the scale is missing
    ...     visible = torch.from_numpy(mask.dense(q.shape[2], k.shape[2]))
    ...     return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
    >>> report = lowtri.verify(attend, dtypes=["float32"], cases=["causal", "full"])
    >>> report.ok, report.mistakes
    (False, ('scale missing',))

    Each case is compared with the definition in float64. An error may be twice the plain formula's own in the same dtype and
    two units in the last place (as root of the mean square 1.5 times). What the callable does not take, it does not offer:
    that is listed and is no failure.

    Args:
        attend: the function. It takes and returns NumPy arrays, torch tensors or JAX arrays.
        signature: how it is called. "mask": ``attend(q, k, v, mask, ...)`` with arrays (B, H, N, D) and a lowtri mask;
            "sdpa": torch's arguments; "flash": flash-attn's, with arrays (B, N, H, D); "flex": FlexAttention's. Or a function
            ``call(attend, given)`` that makes the call and returns the output (B, H, N, D), or (output, lse); ``given`` is
            :class:`lowtri.verifying.signatures.Given`. It raises NotImplementedError for what cannot be expressed.
        dtypes: of "float32", "bfloat16", "float16", "float64"; default: the first three, of which those count that it takes.
        device: where torch tensors lie.
        gradients: whether gradients of q, k and v are compared too.
        cases: names of cases, or a text that their names contain; default: all.
        differences: documented differences: the name of a case or of a mistake, and the sentence that documents it.
        limit: seconds that one call may take.
        seed: of the random numbers.

    Raises:
        CallError: if an argument is wrong, or ``attend`` takes no arrays at all.
    """
    started = time.perf_counter()
    chosen = [replace(case, seed=seed) for case in _chosen(cases)]
    if not callable(attend):
        raise CallError(
            f"verify: attend is {type(attend).__name__}; expected a function.\nFix: pass the function itself."
        )
    name = getattr(attend, "__name__", type(attend).__name__)
    attend, how = _signature(attend, signature)
    given = _dtypes(dtypes)
    arrays = arrays_that_work(attend, how, device, limit)
    run = Verification(Runner(attend, how, arrays, device, gradients, limit), dict(differences or {}))
    for dtype in given:
        for case in chosen:
            if run.stopped is None:
                run.try_case(case, DTYPES[dtype])
    run.repeat(chosen, DTYPES[given[0]])
    return run.report(name, arrays, given, time.perf_counter() - started)


def _chosen(cases: str | Iterable[str] | None) -> list[Case]:
    if cases is None:
        return list(CASES)
    known = {case.name: case for case in CASES}
    if isinstance(cases, str):
        found = [case for name, case in known.items() if cases in name]
        unknown = [] if found else [cases]
    else:
        found = [known[name] for name in cases if name in known]
        unknown = [name for name in cases if name not in known]
    if unknown:
        raise CallError(
            f"verify: cases= names {unknown[0]!r}, which no case has.\nFix: one of {', '.join(list(known)[:6])}, ... "
            "(lowtri.verifying.cases.CASES), or a part of a name."
        )
    return found


def _dtypes(dtypes: Sequence[str] | None) -> list[str]:
    given = (
        ["float32", "bfloat16", "float16"] if dtypes is None else [dtypes] if isinstance(dtypes, str) else list(dtypes)
    )
    names = [str(one).removeprefix("torch.") for one in given]
    for name in names:
        if name not in DTYPES:
            raise CallError(
                f"verify: dtypes= names {name!r}; expected {', '.join(DTYPES)}.\nFix: one or more of these."
            )
    if not names:
        raise CallError("verify: dtypes= is empty.\nFix: dtypes=['float32'], or leave it out.")
    return names


def _signature(attend: Any, signature: str | Callable[..., Any]) -> tuple[Callable[..., Any], Signature]:
    if callable(signature):
        return custom(attend, signature)
    if signature not in SIGNATURES:
        raise CallError(
            f"verify: signature={signature!r}; expected {', '.join(SIGNATURES)}, or a function that makes the call.\n"
            "Fix: name the library whose arguments attend takes."
        )
    return attend, SIGNATURES[signature]
