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

__all__ = ["Backend", "KnowsGradients", "Prepared"]


class Prepared(Protocol):
    """A call laid out, which runs on any arrays of the same signature, on several threads at once."""

    @property
    def nbytes(self) -> int:
        """Memory that is kept between runs."""
        ...

    @property
    def may_spread(self) -> bool:
        """Whether a NaN or inf that is hidden from some queries may reach their output, which is then not finite."""
        ...

    def run(self, inputs: Inputs) -> Result: ...


@runtime_checkable
class KnowsGradients(Prepared, Protocol):
    """A prepared call that computes gradients from a known output and log-sum-exp, without running forward again."""

    def gradients(self, inputs: Inputs, output: Any, lse: Any, d_output: Any, d_lse: Any) -> Inputs: ...


class Backend(Protocol):
    name: str

    def supports(self, call: Call) -> str | None: ...
    def cost(self, call: Call) -> float: ...
    def prepare(self, call: Call) -> Prepared: ...
