"""How a case becomes a call: the arguments of each signature, arrays of NumPy, torch or JAX, gradients, and a time limit."""

from __future__ import annotations

import functools
import itertools
import math
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtri.auditing.system import parameters
from lowtri.errors import CallError, UndecidedError
from lowtri.extras import is_installed
from lowtri.verifying.cases import Case
from lowtri.verifying.definition import Call, Results


class CallFailed(Exception):
    """A call without a result that can be compared.

    Attributes:
        status: "not offered"; "raised", which may be a refusal; "crashed", an exception that none is; "wrong", no array of the right
            shape and dtype, or changed inputs; "wrong library", another one's array; or "timeout".
    """

    def __init__(self, status: str, words: str) -> None:
        super().__init__(words)
        self.status = status


# A function may refuse what it does not take by any other exception, such as a ValueError or a failed assertion.
_CRASHES = (LookupError, AttributeError, NameError, ArithmeticError, RecursionError, MemoryError)


class Arguments(NamedTuple):
    """The arguments after q, k and v."""

    keywords: dict[str, Any]
    name: str = ""  # distinguishes the calls of one case
    top_left: bool = False  # the first query is aligned with the first key


def _mask(given: Call) -> Iterable[Arguments]:
    case = given.case
    keywords = {"scale": case.scale, "softcap": case.softcap, "bias": given.bias, "sinks": given.sinks}
    keywords["return_lse"] = True if case.lse else None
    yield Arguments({"mask": case.mask} | {name: value for name, value in keywords.items() if value is not None})


def _sdpa(given: Call) -> Iterable[Arguments]:
    case = given.case
    _reject(softcap=case.softcap is not None, sinks=case.sinks, **{"log-sum-exp": case.lse})
    keywords: dict[str, Any] = {} if case.scale is None else {"scale": case.scale}
    if case.hkv != case.hq:
        keywords["enable_gqa"] = True
    if given.bias is not None:
        yield Arguments(
            keywords | {"attn_mask": _library(given.q).where(given.visible, given.bias, -math.inf)},
            "attn_mask of floats",
        )
    elif case.text == "full":
        yield Arguments(keywords)
    else:
        yield Arguments(keywords | {"attn_mask": _smallest(given.visible)}, "attn_mask of bools")
    if case.text == "causal" and given.bias is None:
        yield Arguments(keywords | {"is_causal": True}, "is_causal=True", top_left=True)


def _flash(given: Call) -> Iterable[Arguments]:
    case = given.case
    _reject(bias=case.bias not in ("", "alibi"), sinks=case.sinks)
    keywords: dict[str, Any] = {} if case.scale is None else {"softmax_scale": case.scale}
    text = case.text.replace(" ", "")
    if text == "causal":
        keywords["causal"] = True
    elif text.startswith("causal&window(") and text.count("(") == 1:
        keywords |= {"causal": True, "window_size": (int(text[len("causal&window(") : -1]) - 1, 0)}
    elif text.startswith("band("):
        before, after = text[len("band(") : -1].split(",")
        keywords["window_size"] = (int(before), int(after))
    elif text != "full":
        raise CallFailed("not offered", f"mask {case.text}")
    if case.softcap is not None:
        keywords["softcap"] = case.softcap
    if given.slopes is not None:
        keywords["alibi_slopes"] = given.slopes
    if case.lse:
        keywords["return_attn_probs"] = True
    yield Arguments(keywords)


def _flex(given: Call) -> Iterable[Arguments]:
    from torch.nn.attention.flex_attention import create_block_mask

    case, cap, bias, visible = given.case, given.softcap, given.bias, given.visible
    _reject(sinks=case.sinks, **{"zero sizes": 0 in (case.b, case.nq, case.nk)})
    keywords: dict[str, Any] = {} if case.scale is None else {"scale": case.scale}
    if case.hkv != case.hq:
        keywords["enable_gqa"] = True
    if case.text != "full":
        sizes = (case.b, case.hq, case.nq, case.nk)
        keywords["block_mask"] = create_block_mask(
            lambda b, h, q, k: visible[b, h, q, k], *sizes, device=str(visible.device)
        )
    if cap is not None or bias is not None:

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            capped = score if cap is None else cap * torch.tanh(score / cap)
            return capped if bias is None else capped + bias.expand(visible.shape)[b, h, q, k]

        keywords["score_mod"] = score_mod
    if case.lse:
        keywords["return_lse"] = True
    yield Arguments(keywords)


SIGNATURES: dict[str, Callable[[Call], Iterable[Arguments]]] = {
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


def _reject(**features: bool) -> None:
    for name, needed in features.items():
        if needed:
            raise CallFailed("not offered", name)


@dataclass
class Caller:
    """Calls a function with the arrays of one library.

    Attributes:
        attend: the function.
        arguments: of a call; None if ``attend(given)`` makes the call itself.
        arrays: "torch", "numpy" or "jax".
        device: of torch tensors.
        gradients: whether gradients are computed.
        limit: seconds that a call may take.
        tokens_first: arrays are (B, N, H, D).
        no_gradient: why a gradient is not offered, by the name of its input.
    """

    attend: Callable[..., Any]
    arguments: Callable[[Call], Iterable[Arguments]]
    arrays: str
    device: str
    gradients: bool
    limit: float
    tokens_first: bool
    no_gradient: dict[str, str] = field(default_factory=dict)

    def results(self, call: Call, dtype: torch.dtype) -> list[tuple[Arguments, Results]]:
        """Output, log-sum-exp and gradients of each call of a case, float64 and (B, H, N, D).

        Raises:
            CallFailed: if there is nothing to compare.
        """
        names = ("q", "k", "v", "sinks", *(("bias",) if call.slopes is None else ()))  # which may have a gradient
        inputs = {name: x for name in names if (x := getattr(call, name)) is not None}
        inputs = {name: self._convert(x, dtype) for name, x in inputs.items()}
        inputs |= {name: self._layout(inputs[name], call.case.layout) for name in "qkv"}
        before = {name: _float64(x) for name, x in inputs.items()}
        wants = self.gradients and call.case.gradients
        results = []
        others = {"visible": dtype, "bias": dtype, "slopes": torch.float32}
        given = replace(call, **{name: self._convert(getattr(call, name), kind) for name, kind in others.items()})
        for i, arguments in enumerate(self.arguments(replace(given, **inputs))):
            self._check_parameters(arguments.keywords)
            output, lse, grads = self._within_limit(lambda i=i: self._call(given, inputs, i, wants))  # type: ignore[misc]
            for name, x in inputs.items():
                if not torch.equal(_float64(x).nan_to_num(7.0), before[name].nan_to_num(7.0)):
                    raise CallFailed("wrong", f"it changed its argument {name}")
            results.append((arguments, self._checked(call.case, dtype, output, lse, grads)))
        return results

    def _call(self, given: Call, inputs: dict[str, Any], i: int, wants: bool) -> tuple[Any, Any, dict[str, Any]]:
        """The output, the rest of what was returned, and gradients by name."""

        def attend(leaves: dict[str, Any]) -> tuple[Any, Any]:
            chosen = list(self.arguments(replace(given, **leaves)))[i]
            result = self.attend(leaves["q"], leaves["k"], leaves["v"], **chosen.keywords)
            return (result[0], result[1:]) if isinstance(result, tuple) else (result, ())

        if not wants or self.arrays == "numpy":
            if wants:
                self.no_gradient["gradients"] = "NumPy arrays have none"
            return *attend(inputs), {}
        d_output = self._convert(self._transposed(given.d_output), inputs["q"].dtype)
        if self.arrays == "jax":
            import jax

            output, pull, rest = jax.vjp(attend, inputs, has_aux=True)
            return output, rest, pull(d_output)[0]
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        output, rest = attend(leaves)
        if not isinstance(output, Tensor) or output.shape != d_output.shape:
            return output, rest, {}  # described by _checked
        if not output.requires_grad:
            self.no_gradient["gradients"] = "its output does not require a gradient for inputs that do"
            return output, rest, {}
        grads = torch.autograd.grad(output, list(leaves.values()), d_output, allow_unused=True)
        return output, rest, dict(zip(leaves, grads, strict=True))

    def _checked(self, case: Case, dtype: torch.dtype, output: Any, rest: Any, grads: dict[str, Any]) -> Results:
        """What a call returned, as float64 tensors."""
        expected = (case.b, case.hq, case.nq, case.dv)
        if not hasattr(output, "dtype") or not hasattr(output, "shape"):
            raise CallFailed("wrong", f"it returned {type(output).__name__}; expected an array, or a tuple of arrays")
        plain = self._transposed(_float64(output))
        if (returned := _library(output).__name__.split(".")[0]) != self.arrays:
            raise CallFailed("wrong library", f"it returned an array of {returned} for arrays of {self.arrays}")
        if tuple(plain.shape) != expected:
            shown = (case.b, case.nq, case.hq, case.dv) if self.tokens_first else expected
            raise CallFailed("wrong", f"its output is {tuple(output.shape)}; expected {shown}")
        name, expected_name = (str(x).removeprefix("torch.") for x in (output.dtype, dtype))
        if name != expected_name:
            raise CallFailed("wrong", f"its output is {name} for inputs of {expected_name}")
        results = {"output": plain}
        if case.lse:
            results["lse"] = _float64(rest[0]) if rest else torch.zeros(())
            if tuple(results["lse"].shape) != expected[:3]:
                given = tuple(rest[0].shape) if rest else "not returned"
                raise CallFailed("wrong", f"its log-sum-exp is {given}; expected {expected[:3]}, as the second result")
        for name, grad in grads.items():
            if grad is not None:
                results[f"gradient of {name}"] = self._transposed(_float64(grad)) if name in "qkv" else _float64(grad)
            elif name in "qkv":
                results[f"gradient of {name}"] = torch.zeros_like(getattr(case.draw(dtype), name))
            else:
                self.no_gradient[f"gradient of {name}"] = "its output does not depend on it for autograd"
        return results

    def _check_parameters(self, keywords: dict[str, Any]) -> None:
        takes = parameters(self.attend)
        missing = [name for name in keywords if name not in takes]
        if takes and missing and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            raise CallFailed("not offered", f"argument {missing[0]}")

    def _within_limit(self, work: Callable[[], Any]) -> Any:
        """``work()`` in a thread of its own, so that a call without end leaves a report."""
        results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                results.put((work(), None))
            except BaseException as error:  # raised in the caller's thread
                results.put((None, error))

        threading.Thread(target=run, daemon=True).start()
        try:
            result, error = results.get(timeout=self.limit)
        except queue.Empty:
            raise CallFailed("timeout", f"no result within {self.limit:g} s") from None
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

    def _convert(self, x: Tensor | None, dtype: Any) -> Any:
        """A tensor as an array of the library: bools stay bools, other numbers become ``dtype``."""
        name = str(dtype).removeprefix("torch.")
        if x is None:
            return None
        if self.arrays == "torch":
            return x.to(self.device, torch.bool if x.dtype == torch.bool else dtype, copy=True)
        if self.arrays == "numpy":
            if name == "bfloat16":
                raise CallFailed("not offered", name)
            return x.numpy().copy() if x.dtype == torch.bool else x.to(dtype).numpy().copy()
        import jax.numpy as jnp

        return jnp.asarray(x.numpy()) if x.dtype == torch.bool else jnp.asarray(x.float().numpy()).astype(name)

    def _layout(self, x: Any, layout: str) -> Any:
        x = self._transposed(x)
        if self.arrays == "jax":  # its arrays have no layout
            return x
        contiguous = torch.Tensor.contiguous if self.arrays == "torch" else np.ascontiguousarray
        if layout == "transposed":
            return contiguous(x.swapaxes(1, 2)).swapaxes(1, 2)
        if layout == "strided":
            return _library(x).stack([x, x], -1).reshape(*x.shape[:-1], -1)[..., ::2]
        return contiguous(x)


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


def caller_of(
    attend: Any, signature: str | Callable[..., Any], dtypes: Iterable[str], device: str, gradients: bool, limit: float
) -> Caller:
    """A caller with the first library whose arrays the callable takes and returns in the simplest case, in any of the dtypes.

    Raises:
        CallError: if ``signature`` is unknown, or there is no such library; the message has what the callable raised.
        UndecidedError: if the simplest call has no result within the limit.
    """
    if not callable(signature) and signature not in SIGNATURES:
        raise CallError(
            f"verify: signature={signature!r}; expected {', '.join(SIGNATURES)}, or a function that makes the call.\n"
            "Fix: name the library whose arguments attend takes."
        )
    arguments = _custom if callable(signature) else SIGNATURES[signature]
    function = (lambda q, k, v, given: signature(attend, given)) if callable(signature) else attend
    reason, case = "", Case("full", "no mask", "full", gradients=False)
    libraries = ("torch", "numpy", "jax") if is_installed("jax") else ("torch", "numpy")
    for arrays, dtype in itertools.product(libraries, dtypes):
        caller = Caller(function, arguments, arrays, device, gradients, limit, signature == "flash")
        try:
            caller.results(case.draw(getattr(torch, dtype)), getattr(torch, dtype))
        except CallFailed as error:
            if error.status == "timeout":
                raise UndecidedError(
                    f"verify: the simplest call (B 2, H 2, N 37, D 16, no mask) gave {error}.\nFix: a longer limit=."
                ) from None
            if error.status != "wrong":  # which the cases describe
                what = {"raised": "it raised ", "crashed": "it raised ", "not offered": "it does not take the "}
                reason = reason or what.get(error.status, "") + str(error)
                continue
        return caller
    raise CallError(
        f"verify: attend={name_of(attend)} takes no arrays of torch, numpy, jax. The simplest call (B 2, H 2, N 37, D 16, no mask): "
        f"{reason}.\nFix: check signature= (mask, sdpa, flash, flex, or a function of your own)."
    )


def name_of(function: Any) -> str:
    """A function's own name, also where arguments are bound to it; of other callables their class's."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _custom(given: Call) -> Iterable[Arguments]:
    yield Arguments({"given": given})
