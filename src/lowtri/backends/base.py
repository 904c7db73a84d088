"""The interface of a backend: a module with a name and two functions, which imports no other backend.

    name             the value of ``engine=`` that selects it
    supports(call)   None if it can run the call, else the reason why not, in a few words for users
    prepare(call)    computes everything that does not depend on the arrays' data

Both depend on the call's description only, so equal calls run on the same backend and give the same bits.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from lowtri.ops.call import Call, Inputs, Result

__all__ = ["Backend", "Differentiates", "Prepared", "Selective"]


class Prepared(Protocol):
    """A prepared call: runs on any arrays of the same signature, also from several threads at once."""

    @property
    def nbytes(self) -> int:
        """Memory that it holds between runs."""
        ...

    def run(self, inputs: Inputs) -> Result:
        """The result; differentiable by torch unless the prepared call :class:`Differentiates`."""
        ...


@runtime_checkable
class Differentiates(Prepared, Protocol):
    """A prepared call that computes first gradients itself, since torch records no graph of it.

    It may have a true ``is_plain``, where q, k and v are the only inputs and the output is the only result. It then also has
    ``record_plain(q, k, v)`` and ``gradients_plain(q, k, v, output, recorded, d_output)``: without the tuples below, small calls are
    ten microseconds shorter.
    """

    computes_gradients: bool  # False for a call that torch differentiates itself
    # The gradients need nothing of the forward but its output and log-sum-exp; what is recorded is small, and may be missing. Such a
    # call also has ``wide_gradients(inputs, result, recorded, d_result)``, which returns them in the dtype in which they are summed.
    from_output: bool
    formula_dtype: str | None  # of the formula that computes higher derivatives; None: the inputs' dtype

    def record(self, inputs: Inputs) -> tuple[Result, Any]:
        """The result, and any other state that the gradients need."""
        ...

    def gradients(self, inputs: Inputs, result: Result, recorded: Any, d_result: Result) -> Inputs:
        """The gradients of the inputs, None where none is needed; ``recorded`` is None if ``record`` has to run again."""
        ...


@runtime_checkable
class Selective(Prepared, Protocol):
    """A prepared call that keeps to the mask for finite, moderate numbers only; ``engine="auto"`` has it inspect its inputs."""

    def accepts(self, inputs: Inputs, d_output: Any = None) -> bool:
        """Whether it keeps to the mask for these inputs, or in the backward for this gradient of the output."""
        ...


class Backend(Protocol):
    name: str

    def supports(self, call: Call) -> str | None: ...
    def prepare(self, call: Call) -> Prepared: ...
