"""One call of a callable: arrays of its library, gradients, unchanged inputs, and a limit on its time."""

from __future__ import annotations

import inspect
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtri.errors import CallError
from lowtri.verifying.cases import Case, Numbers
from lowtri.verifying.formula import Results
from lowtri.verifying.signatures import Binding, NotOffered, Signature

__all__ = ["ARRAYS", "Broken", "NoAnswer", "Refused", "Runner", "arrays_that_work"]

ARRAYS = ("torch", "numpy", "jax")


class Broken(Exception):
    """What the callable did that no attention may: its words are the finding."""


class Refused(Exception):
    """The callable raised; the words are its exception's class and first line."""


class NoAnswer(Exception):
    """The callable did not return in time."""


@dataclass
class Runner:
    """Calls ``attend`` with the arrays of one library.

    Attributes:
        attend: the callable.
        signature: how a case becomes a call.
        arrays: "torch", "numpy" or "jax".
        device: of torch tensors.
        gradients: whether gradients are computed.
        limit: seconds that a call may take.
        returned: the library of the last output.
    """

    attend: Callable[..., Any]
    signature: Signature
    arrays: str
    device: str
    gradients: bool
    limit: float
    returned: str = ""

    def convert(self, x: Tensor, dtype: torch.dtype) -> Any:
        """A tensor as an array of the library: bools stay bools, other numbers become ``dtype``."""
        x = x if x.dtype == torch.bool else x.to(dtype)
        if self.arrays == "torch":
            return x.to(self.device)
        if self.arrays == "numpy":
            if x.dtype == torch.bfloat16:
                raise NotOffered("bfloat16")
            return x.numpy().copy()
        import jax.numpy as jnp

        wide = jnp.asarray(x.numpy() if x.dtype == torch.bool else x.float().numpy())
        return wide if x.dtype == torch.bool else wide.astype(str(dtype).removeprefix("torch."))

    def run(self, case: Case, numbers: Numbers, binding: Binding, dtype: torch.dtype) -> Results:
        """Output, log-sum-exp and gradients as float64 tensors (B, H, N, D), whatever the callable takes.

        Raises:
            Broken: if inputs were changed, or a result has another shape or dtype.
            NoAnswer: if the time is over.
            NotOffered: if the callable's signature lacks an argument.
        """
        self._has_arguments(binding.keywords)
        inputs = [self._laid_out(self.convert(x, dtype), case.layout) for x in (numbers.q, numbers.k, numbers.v)]
        before = [_wide(x) for x in inputs]
        wants = self.gradients and case.gradients and self.arrays != "numpy"
        d_output = self.convert(numbers.d_output.mT.mT if not self._last else numbers.d_output.transpose(1, 2), dtype)
        outputs, grads = _within(self.limit, lambda: self._call(inputs, binding, d_output if wants else None))
        for name, x, old in zip("qkv", inputs, before, strict=True):
            if not torch.equal(_wide(x).nan_to_num(7.0), old.nan_to_num(7.0)):
                raise Broken(f"it changed its argument {name}")
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        self.returned = _library(outputs[0])
        results = {"output": self._plain(outputs[0])}
        expected = (case.b, case.hq, case.nq, case.dv)
        if tuple(results["output"].shape) != expected:
            shown = tuple(outputs[0].shape)
            raise Broken(f"its output is {shown}; expected {self._shape(expected)}")
        name = str(outputs[0].dtype).removeprefix("torch.")
        if name != str(dtype).removeprefix("torch."):
            raise Broken(f"its output is {name} for inputs of {str(dtype).removeprefix('torch.')}")
        if binding.lse is not None:
            lse = _wide(outputs[binding.lse]) if len(outputs) > binding.lse else None
            if lse is None or tuple(lse.shape) != (case.b, case.hq, case.nq):
                raise Broken(f"its log-sum-exp is {None if lse is None else tuple(lse.shape)}; expected (B, Hq, Nq)")
            results["lse"] = lse
        return results | {f"gradient of {name}": self._plain(grad) for name, grad in zip("qkv", grads, strict=False)}

    @property
    def _last(self) -> bool:
        return self.signature.heads_last

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], shape[2], shape[1], shape[3]) if self._last else shape

    def _plain(self, x: Any) -> Tensor:
        wide = _wide(x)
        return wide.transpose(1, 2) if self._last and wide.ndim == 4 else wide

    def _laid_out(self, x: Any, layout: str) -> Any:
        x = x.swapaxes(1, 2) if self._last else x
        if self.arrays == "jax":  # its arrays have no layout
            return x
        copy = (lambda a: a.contiguous()) if self.arrays == "torch" else np.ascontiguousarray
        if layout == "transposed":
            return copy(x.swapaxes(1, 2)).swapaxes(1, 2)
        if layout == "strided":
            twice = torch.stack([x, x], -1) if self.arrays == "torch" else np.stack([x, x], -1)
            return twice.reshape(*x.shape[:-1], -1)[..., ::2]
        return copy(x)

    def _call(self, inputs: list[Any], binding: Binding, d_output: Any | None) -> tuple[Any, list[Any]]:
        def attend(*arrays: Any) -> Any:
            return self.attend(*arrays, **binding.keywords)

        if d_output is None:
            return attend(*inputs), []
        if self.arrays == "jax":
            import jax

            def first(*arrays: Any) -> tuple[Any, Any]:
                result = attend(*arrays)
                return (result[0], result) if isinstance(result, tuple) else (result, result)

            _, pull, result = jax.vjp(first, *inputs, has_aux=True)
            return result, list(pull(d_output))
        leaves = [x.detach().requires_grad_() for x in inputs]
        result = attend(*leaves)
        output = result[0] if isinstance(result, tuple) else result
        if getattr(output, "shape", None) is None:
            raise Broken(f"it returned {type(output).__name__}, which is no array")
        if output.shape != d_output.shape:
            raise Broken(f"its output is {tuple(output.shape)}; expected {tuple(d_output.shape)}")
        if not output.requires_grad:
            return result, []
        return result, list(torch.autograd.grad(output, leaves, d_output, allow_unused=True, materialize_grads=True))

    def _has_arguments(self, keywords: Mapping[str, Any]) -> None:
        try:
            parameters = inspect.signature(self.attend).parameters
        except (TypeError, ValueError):  # a builtin says nothing of its arguments
            return
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            for name in keywords:
                if name not in parameters:
                    raise NotOffered(f"argument {name}")


def _library(x: Any) -> str:
    return "torch" if isinstance(x, Tensor) else "numpy" if isinstance(x, np.ndarray) else "jax"


def _wide(x: Any) -> Tensor:
    """A float64 tensor on the CPU of an array of any library."""
    if isinstance(x, Tensor):
        return x.detach().to("cpu", torch.float64)
    try:
        return torch.from_numpy(np.array(x, np.float64))
    except (TypeError, ValueError):
        raise Broken(f"it returned {type(x).__name__}, which is no array") from None


def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """``work()`` in a thread of its own, so that a call without end leaves a report."""
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((work(), None))
        except BaseException as error:  # handed to the caller's thread
            answers.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise NoAnswer(f"no answer within {seconds:g} s") from None
    if isinstance(error, Broken):
        raise error
    if isinstance(error, NotImplementedError):
        raise NotOffered(str(error) or "what raises NotImplementedError")
    if error is not None:
        line = (str(error).splitlines() or [""])[0][:200]
        raise Refused(f"{type(error).__name__}: {line}") from error
    return result


def arrays_that_work(attend: Callable[..., Any], signature: Signature, device: str, limit: float) -> str:
    """The first library whose float32 arrays the callable takes in the simplest case and returns.

    Raises:
        CallError: if it takes none; the message has what it raised.
    """
    case, said = Case("full", "", "full", gradients=False), ""
    numbers = case.draw(torch.float32)
    for arrays in ARRAYS:
        if arrays == "jax":
            from importlib.util import find_spec

            if find_spec("jax") is None:
                continue
        runner = Runner(attend, signature, arrays, device, False, limit)
        try:
            for binding in signature.bind(case, numbers, lambda x, r=runner: r.convert(x, torch.float32)):  # type: ignore[misc]
                runner.run(case, numbers, binding, torch.float32)
            if runner.returned == arrays:
                return arrays
            said = said or f"nothing: it returned an array of {runner.returned} for arrays of {arrays}"
        except (NotOffered, Refused) as error:
            said = said or str(error)
        except Broken:
            return arrays  # it computed something; the cases say what is wrong
    raise CallError(
        f"verify: attend takes no arrays of {', '.join(ARRAYS)}: the simplest call (B 2, H 2, N 37, D 16, no mask) raised\n"
        f"{said or 'nothing'}\nFix: check signature= (mask, sdpa, flash, flex, or a function of your own)."
    )
