"""How a case becomes a call: the arguments of each signature, arrays of NumPy, torch or JAX, gradients, and a time limit."""

from __future__ import annotations

import functools
import itertools
import math
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from lowtri.auditing.adapter import parameters
from lowtri.errors import CallError, UndecidedError
from lowtri.extras import is_installed
from lowtri.verifying.cases import Case
from lowtri.verifying.definition import Problem, Results


class CallFailed(Exception):
    """A call without a result that can be compared."""

    def __init__(self, status: str, words: str, mistake: str = "") -> None:
        super().__init__(words)
        self.mistake = mistake  # its name, where it has one
        # "not offered"; "raised", which may be a refusal; "crashed", an exception that is none; "timeout"; "wrong", no array of the
        # right shape and dtype, or changed inputs; "wrong library", another one's array; "ended", the process is.
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return CallFailed, (self.status, str(self), self.mistake)


# A function may refuse what it does not take by any other exception, such as a ValueError or a failed assertion.
_CRASHES = (LookupError, AttributeError, NameError, ArithmeticError, RecursionError, MemoryError, SystemExit)
Keywords = dict[str, Any]
TOP_LEFT = "is_causal=True"  # the first query is aligned with the first key


def _options(given: Problem, **names: str) -> Keywords:
    """What a case asks for besides its mask, under the names of a signature; "" is for what the mask's argument carries."""
    case, alibi = given.case, "alibi" in names and given.slopes is not None
    asked = {
        "softcap": given.softcap,
        "bias": None if alibi else given.bias,
        "sinks": given.sinks,
        "lse": case.lse or None,
        "scale": case.scale,
        "alibi": given.slopes if alibi else None,
        "heads": True if case.hkv != case.hq and "heads" in names else None,
    }
    for name, value in asked.items():
        if value is not None and name not in names:
            raise CallFailed("not offered", "log-sum-exp" if name == "lse" else name)
    return {argument: asked[name] for name, argument in names.items() if argument and asked[name] is not None}


# How each library is called: the arguments after q, k and v, for each way to pass the mask, by its name.


def _mask(given: Problem) -> dict[str, Keywords]:
    options = _options(given, scale="scale", softcap="softcap", bias="bias", sinks="sinks", lse="return_lse")
    return {"": {"mask": given.case.mask} | options}


def _sdpa(given: Problem) -> dict[str, Keywords]:
    options, text = _options(given, scale="scale", heads="enable_gqa", bias=""), given.case.text
    if given.bias is not None:
        table = _library(given.q).where(given.visible, given.bias, -math.inf)
        return {"attn_mask of floats": options | {"attn_mask": table}}
    if text == "full":
        return {"": options}
    ways = {"attn_mask of bools": options | {"attn_mask": _smallest(given.visible)}}
    return ways | ({TOP_LEFT: options | {"is_causal": True}} if text == "causal" else {})


def _flash(given: Problem) -> dict[str, Keywords]:
    names = {"scale": "softmax_scale", "softcap": "softcap", "alibi": "alibi_slopes", "lse": "return_attn_probs"}
    options, text = _options(given, **names), given.case.text
    if text == "full":
        return {"": options}
    if text in ("causal", "bottom right"):
        return {"": options | {"causal": True}}
    if match := re.fullmatch(r"causal & window\((\d+)\)", text):
        return {"": options | {"causal": True, "window_size": (int(match[1]) - 1, 0)}}
    if match := re.fullmatch(r"band\((\d+), (\d+)\)", text):
        return {"": options | {"window_size": (int(match[1]), int(match[2]))}}
    raise CallFailed("not offered", f"mask {text}")


def _flex(given: Problem) -> dict[str, Keywords]:
    from torch.nn.attention.flex_attention import create_block_mask

    case, visible = given.case, given.visible
    cap, bias = given.softcap, given.bias
    options = _options(given, scale="scale", heads="enable_gqa", softcap="", bias="", lse="return_lse")
    if 0 in visible.shape:
        raise CallFailed("not offered", "zero sizes")
    if not isinstance(visible, Tensor) and case.text != "full":
        raise CallFailed("not offered", "a block mask of other arrays than torch's")
    if case.text != "full":
        options["block_mask"] = create_block_mask(
            lambda b, h, q, k: visible[b, h, q, k], case.b, case.hq, case.nq, case.nk, device=str(visible.device)
        )
    if cap is not None or bias is not None:

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            capped = score if cap is None else cap * torch.tanh(score / cap)
            return capped if bias is None else capped + bias.expand(visible.shape)[b, h, q, k]

        options["score_mod"] = score_mod
    return {"": options}


SIGNATURES: dict[str, Callable[[Problem], dict[str, Keywords]]] = {
    "mask": _mask,
    "sdpa": _sdpa,
    "flash": _flash,
    "flex": _flex,
}


def _smallest(visible: Any) -> Any:
    """The table in the smallest shape that broadcasts."""
    if visible.shape[0] and bool((visible == visible[:1, :1]).all()):
        return visible[0, 0]
    return visible[:, :1] if bool((visible == visible[:, :1]).all()) else visible


class Calls(Protocol):
    """What makes the calls of a verification, in this process or in a child."""

    arrays: str
    gradients: bool
    no_gradient: dict[str, str]
    noted: list[CallFailed]

    def results(self, problem: Problem, dtype: torch.dtype) -> list[tuple[str, Results]]: ...


@dataclass
class Caller:
    """Calls a function with the arrays of one library."""

    attend: Callable[..., Any]
    arguments: Callable[[Problem], dict[str, Keywords]]  # one of SIGNATURES, or of a signature of the user's
    arrays: str  # "torch", "numpy" or "jax"
    device: str  # of torch tensors
    gradients: bool  # whether gradients are computed
    limit: float  # seconds that a call may take
    tokens_first: bool  # arrays are (B, N, H, D)
    no_gradient: dict[str, str] = field(default_factory=dict)  # why a gradient is not offered, by its input
    noted: list[CallFailed] = field(default_factory=list)  # what is wrong with the last results, which can be compared

    def results(self, problem: Problem, dtype: torch.dtype) -> list[tuple[str, Results]]:
        """For each way to pass the mask its name, and output, log-sum-exp and gradients, float64 and (B, H, N, D).

        Raises:
            CallFailed: if there is nothing to compare.
        """
        self.noted = []
        arrays = {name: self._array(getattr(problem, name), dtype, problem.case.layout) for name in "qkv"}
        arrays |= {name: self._array(getattr(problem, name), dtype) for name in ("visible", "bias", "sinks")}
        given = replace(problem, **arrays, slopes=self._array(problem.slopes, torch.float32))
        names = ("q", "k", "v", "sinks", *(("bias",) if problem.slopes is None else ()))  # which may have a gradient
        inputs = {name: arrays[name] for name in names if arrays[name] is not None}
        before = {name: _float64(x) for name, x in inputs.items()}
        results = []
        for way, keywords in self.arguments(given).items():
            self._check_parameters(keywords)
            made = self._within_limit(functools.partial(self._call, given, inputs, way, dtype))
            for name, x in inputs.items():
                if not torch.equal(_float64(x).nan_to_num(7.0), before[name].nan_to_num(7.0)):
                    raise CallFailed("wrong", f"it changed its argument {name}", "changes its arguments")
            results.append((way, self._checked(problem, dtype, *made)))
        return results

    def _call(
        self, given: Problem, inputs: dict[str, Any], way: str, dtype: torch.dtype
    ) -> tuple[Any, Any, dict[str, Any]]:
        """The output, the rest of what was returned, and gradients by name."""

        def attend(leaves: dict[str, Any]) -> tuple[Any, Any]:
            keywords = self.arguments(replace(given, **leaves))[way]
            result = self.attend(leaves["q"], leaves["k"], leaves["v"], **keywords)
            return (result[0], result[1:]) if isinstance(result, tuple) else (result, ())

        if self.gradients and given.case.gradients and self.arrays == "numpy":
            self.no_gradient["gradients"] = "NumPy arrays have none"
        if not self.gradients or not given.case.gradients or self.arrays == "numpy":
            return *attend(inputs), {}
        d_output = self._array(given.d_output, dtype, "contiguous")
        if self.arrays == "jax":
            import jax

            output, pull, rest = jax.vjp(attend, inputs, has_aux=True)
            return output, rest, pull(d_output.astype(output.dtype))[0]
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        output, rest = attend(leaves)
        if not isinstance(output, Tensor) or output.shape != d_output.shape:
            return output, rest, {}  # described by _checked
        if not output.requires_grad:
            self.no_gradient["gradients"] = "its output does not require a gradient for inputs that do"
            return output, rest, {}
        grads = torch.autograd.grad(output, list(leaves.values()), d_output, allow_unused=True)
        return output, rest, dict(zip(leaves, grads, strict=True))

    def _checked(self, problem: Problem, dtype: torch.dtype, output: Any, rest: Any, grads: dict[str, Any]) -> Results:
        """What a call returned, as float64 tensors."""
        if not hasattr(output, "dtype") or not hasattr(output, "shape"):
            kind = "None" if output is None else type(output).__name__
            raise CallFailed("wrong", f"it returned {kind}; expected an array, or a tuple of arrays", f"returns {kind}")
        results = {"output": self._transposed(_float64(output))}
        if (returned := _library(output).__name__.split(".")[0]) != self.arrays:
            raise CallFailed("wrong library", f"it returned an array of {returned} for arrays of {self.arrays}")
        if results["output"].shape != problem.d_output.shape:
            expected = tuple(self._transposed(problem.d_output).shape)
            words = f"its output is {tuple(output.shape)}; expected {expected}"
            raise CallFailed("wrong", words, _wrong_shape(tuple(output.shape), expected, self.tokens_first))
        name, expected_name = (str(x).removeprefix("torch.") for x in (output.dtype, dtype))
        if name != expected_name:
            kinds = f"{name} for inputs of {expected_name}"
            self.noted = [CallFailed("wrong", f"its output is {kinds}", f"returns {kinds}")]
        if problem.case.lse:
            results["lse"] = _float64(rest[0]) if rest else torch.zeros(())
            if results["lse"].shape != problem.d_output.shape[:3]:
                shape, expected = tuple(rest[0].shape) if rest else "not returned", tuple(problem.d_output.shape[:3])
                words = f"its log-sum-exp is {shape}; expected {expected}, as the second result"
                raise CallFailed("wrong", words, "returns no log-sum-exp" if not rest else "returns another shape")
        for name, grad in grads.items():
            if grad is not None:
                results[f"gradient of {name}"] = self._transposed(_float64(grad)) if name in "qkv" else _float64(grad)
            elif name in "qkv":
                results[f"gradient of {name}"] = torch.zeros_like(getattr(problem, name))
            else:
                self.no_gradient[f"gradient of {name}"] = "its output does not depend on it for autograd"
        return results

    def _check_parameters(self, keywords: Keywords) -> None:
        takes = parameters(self.attend)
        missing = [name for name in keywords if name not in takes]
        if takes and missing and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            raise CallFailed("not offered", f"argument {missing[0]}")

    def _within_limit(self, work: Callable[[], Any]) -> Any:
        """``work()`` in a thread of its own, so that a call without end leaves a report."""
        done: list[tuple[Any, BaseException | None]] = []

        def run() -> None:
            try:
                done.append((work(), None))
            except BaseException as error:  # raised in the caller's thread
                done.append((None, error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self.limit)
        if not done:
            raise CallFailed("timeout", f"no result within {self.limit:g} s")
        result, error = done[0]
        if error is None:
            return result
        if isinstance(error, CallFailed):
            raise error
        first = (str(error).splitlines() or [""])[0][:200]
        if isinstance(error, NotImplementedError):
            raise CallFailed("not offered", first or "an option for which it raises NotImplementedError")
        status = "crashed" if isinstance(error, _CRASHES) else "raised"
        raise CallFailed(status, f"{type(error).__name__}: {first}") from error

    def _transposed(self, x: Any) -> Any:
        """Between (B, H, N, D) and the callable's order of dimensions."""
        return x.swapaxes(1, 2) if self.tokens_first and x.ndim == 4 else x

    def _array(self, x: Tensor | None, dtype: torch.dtype, layout: str = "") -> Any:
        """A tensor as an array of the library: bools stay bools, other numbers become ``dtype``; with a layout (B, H, N, D) is
        transposed to the callable's order."""
        if x is None:
            return None
        if self.arrays == "numpy" and dtype == torch.bfloat16:
            raise CallFailed("not offered", "bfloat16")
        x = x.to(
            self.device if self.arrays == "torch" else "cpu", torch.bool if x.dtype == torch.bool else dtype, copy=True
        )
        if layout:
            x = self._transposed(x).contiguous()
        if layout == "transposed":
            x = x.swapaxes(1, 2).contiguous().swapaxes(1, 2)
        elif layout == "strided":
            x = torch.stack([x, x], -1).flatten(-2)[..., ::2]
        if self.arrays == "jax":
            import jax.numpy as jnp

            return jnp.asarray((x.float() if x.dtype == torch.bfloat16 else x).numpy()).astype(str(x.dtype)[6:])
        return x.numpy() if self.arrays == "numpy" else x


def _wrong_shape(shape: tuple[int, ...], expected: tuple[int, ...], tokens_first: bool) -> str:
    """The name of the mistake: a wrong order of dimensions has one of its own."""
    orders = ["(B, H, N, D)", "(B, N, H, D)"]
    if len(shape) == 4 and (shape[0], shape[2], shape[1], shape[3]) == expected:
        got, right = orders if tokens_first else reversed(orders)
        return f"returns {got} for {right}"
    return "returns another shape"


def _library(x: Any) -> Any:
    if isinstance(x, Tensor):
        return torch
    if isinstance(x, np.ndarray):
        return np
    import jax.numpy as jnp

    return jnp


def _float64(x: Any) -> Tensor:
    """A float64 tensor on the CPU of an array of any library."""
    if isinstance(x, Tensor):
        return x.detach().to("cpu", torch.float64)
    try:
        return torch.from_numpy(np.array(x, np.float64))
    except (TypeError, ValueError):
        raise CallFailed("wrong", f"it returned {type(x).__name__}, which is no array") from None


_SIMPLEST = "simplest call (B 2, H 2, N 37, D 16, no mask)"


def maker_of(
    attend: Any, signature: str | Callable[..., Any], device: str, gradients: bool, limit: float
) -> Callable[[str], Caller]:
    """A function that gives the caller for the arrays of a library.

    Raises:
        CallError: if ``signature`` is unknown.
    """
    if not callable(signature) and (not isinstance(signature, str) or signature not in SIGNATURES):
        raise CallError(
            f"verify: signature={signature!r}; expected {', '.join(SIGNATURES)}, or a function that makes the call.\n"
            "Fix: name the library whose arguments attend takes."
        )
    if callable(signature):
        arguments, function = lambda given: {"": {"given": given}}, lambda q, k, v, given: signature(attend, given)
    else:
        arguments, function = SIGNATURES[signature], attend
    return lambda arrays: Caller(function, arguments, arrays, device, gradients, limit, signature == "flash")


_C = TypeVar("_C", bound="Calls")


def caller_of(attend: Any, make: Callable[[str], _C], dtypes: Iterable[str]) -> _C:
    """A caller with the first library whose arrays the callable takes and returns in the simplest case, in any of the dtypes:
    without a mask, or with a causal one for a kernel that has no other.

    Raises:
        CallError: if there is no such library; the message has what the callable raised.
        UndecidedError: if the simplest call has no result within the limit.
    """
    reason = ""
    simplest = [Case(text, "the simplest call", text, gradients=False) for text in ("full", "causal")]
    libraries = ("torch", "numpy", "jax") if is_installed("jax") else ("torch", "numpy")
    for arrays, dtype, case in itertools.product(libraries, dtypes, simplest):
        kind = getattr(torch, dtype)
        caller = make(arrays)
        try:
            caller.results(case.draw(kind), kind)
        except CallFailed as error:
            if error.status == "timeout":
                raise UndecidedError(f"verify: the {_SIMPLEST} gave {error}.\nFix: a longer limit=.") from None
            if error.status != "wrong":  # which the cases describe
                what = {"raised": "it raised ", "crashed": "it raised ", "not offered": "it does not offer: "}
                reason = reason or what.get(error.status, "") + str(error)
                continue
        return caller
    raise CallError(
        f"verify: attend={name_of(attend)} takes no arrays of torch, numpy, jax. The {_SIMPLEST}: {reason}.\n"
        "Fix: check signature= (mask, sdpa, flash, flex, or a function of your own)."
    )


def name_of(function: Any) -> str:
    """A function's own name, also where arguments are bound to it; of other callables their class's."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
