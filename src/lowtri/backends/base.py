"""What a backend is: three functions in a module of its own, which imports no other backend.

    name             as users write it in ``engine=``
    supports(call)   None where it can run the call, or the reason why not, in the few words that users read
    cost(call)       an estimate in microseconds on a nominal core; loads nothing heavy, since it is asked for every call
    prepare(call)    lays out whatever can be laid out before the numbers are known

All three read the call's description alone, so equal calls always run on the same backend and give the same bits.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from lowtri.ops.call import Call, Inputs, Result

__all__ = ["Backend", "Differentiates", "Prepared", "Selective"]


class Prepared(Protocol):
    """A call laid out, which runs on any arrays of the same signature, on several threads at once."""

    @property
    def nbytes(self) -> int:
        """Memory that is kept between runs."""
        ...

    def run(self, inputs: Inputs) -> Result:
        """The result; differentiable by torch unless the prepared call :class:`Differentiates`."""
        ...


@runtime_checkable
class Differentiates(Prepared, Protocol):
    """A prepared call that computes first gradients itself, where torch cannot look inside."""

    from_output: bool  # the gradients need the output and log-sum-exp, and nothing else of what ran
    formula_dtype: str | None  # in which the formula computes further derivatives; None: that of the inputs

    def record(self, inputs: Inputs) -> tuple[Result, Any]:
        """The result, and what else the gradients need."""
        ...

    def gradients(self, inputs: Inputs, result: Result, recorded: Any, d_result: Result) -> Inputs:
        """The gradients of the inputs, None where none is wanted; ``recorded`` is None where ``record`` ran elsewhere."""
        ...


@runtime_checkable
class Selective(Prepared, Protocol):
    """A prepared call that keeps to the mask for ordinary numbers only: ``engine="auto"`` asks it to look at them."""

    def accepts(self, inputs: Inputs, d_output: Any = None) -> bool: ...


class Backend(Protocol):
    name: str

    def supports(self, call: Call) -> str | None: ...
    def cost(self, call: Call) -> float: ...
    def prepare(self, call: Call) -> Prepared: ...
