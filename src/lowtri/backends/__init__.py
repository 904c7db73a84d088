"""The backends that run a call of attention, independent of one another.

cpu        the CPU kernels
sdpa       torch's own fused attention
flex       torch's compiled FlexAttention, on a GPU
formula    the formula in torch, in tiles of queries: every option, any device, gradients to any order
reference  the definition, in NumPy and float64

A backend is a module with a name and two functions:

    name             the value of ``engine=`` that selects it
    supports(call)   None if it can run the call, else the reason why not, in a few words for users
    prepare(call)    a :class:`Prepared`: everything that does not depend on the arrays' data

Both depend on the call's description only, so equal calls run on the same backend and give the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, Protocol

from lowtri.ops.call import Call, Inputs, Placement, Result

__all__ = [
    "BACKENDS",
    "Backend",
    "Drawn",
    "GradientSource",
    "LostSums",
    "Prepared",
    "PreparedForAnyKeys",
    "PreparedForSomeValues",
    "PreparedWithGradients",
]

BACKENDS = ("cpu", "sdpa", "flex", "formula", "reference")


class GradientSource(Enum):
    """What the gradients of a prepared call are computed from. Gradients that need a graph are always the formula's."""

    GRAPH = "graph"
    """torch differentiates what ``run`` computes."""
    LSE = "lse"
    """``gradients`` needs the inputs, the output and the log-sum-exp, which are the only results of such calls."""
    STATE = "state"
    """``gradients`` needs the ``state`` of the result."""
    FORMULA = "formula"
    """All gradients are those of the formula, in float64."""


class Drawn(NamedTuple):
    """The state of a call with dropout: the seed that it drew, and what the backend's own gradients need besides."""

    seed: int
    state: Any = None


class LostSums(Exception):
    """Raised by a prepared call whose log-sum-exp of a query, under a huge bias, has lost how many keys the query sees.

    Outputs are right. Weights and gradients, which are computed from the log-sum-exp, need another backend.
    """


class Prepared(ABC):
    """A prepared call: runs on any arrays of the same signature, also from several threads at once.

    What the results depend on is abstract: a class that derives from a prepared call, as the one for other keys, has to say it. What
    only some prepared calls can do is a kind of its own, whose methods are abstract, too.

    Attributes:
        nbytes: memory that it holds between runs.
    """

    nbytes: int = 512

    @abstractmethod
    def run(self, inputs: Inputs, seed: Any = None) -> Result:
        """The result, with the ``state`` that gradients need, if they need one and the call needs gradients.

        Args:
            seed: of the dropout, which each run else draws.
        """

    @abstractmethod
    def gradient_source(self) -> GradientSource:
        """What gradients are computed from; for a call without gradients, those of the same call with them."""

    @abstractmethod
    def checks_values(self) -> bool:
        """Whether the mask is kept to for finite, moderate numbers only, so that ``engine="auto"`` asks ``is_exact_for``."""

    def plain(self) -> Callable[[Any, Any, Any], Any] | None:
        """A function of q, k and v instead of :meth:`run`, for tensors, if there is nothing else to read, cast or return.

        It returns the output, or where the call needs gradients and ``run`` a state, all fields of the result.
        """
        return None


class PreparedWithGradients(Prepared):
    """A prepared call that computes its own gradients: those of ``GradientSource.LSE`` and ``STATE`` are of this kind."""

    @abstractmethod
    def gradients(self, inputs: Inputs, output: Any, state: Any, d_output: Any, d_lse: Any = None) -> Inputs:
        """The gradients of the inputs, None where none is needed, in any dtype.

        Args:
            state: of the result; for ``GradientSource.LSE`` the log-sum-exp, (1, B, Hq, Nq), serves, too, without dropout.
            d_output, d_lse: the gradients of the output and of the log-sum-exp.
        """


class PreparedForSomeValues(Prepared):
    """A prepared call that keeps to the mask for finite, moderate numbers only; with others ``engine="auto"`` runs another backend."""

    def checks_values(self) -> bool:
        return True

    @abstractmethod
    def is_exact_for(self, inputs: Inputs, d_output: Any = None) -> bool:
        """Whether it keeps to the mask for these inputs, or in the backward for this gradient of the output."""


class PreparedForAnyKeys(Prepared):
    """A prepared call that becomes one for other keys and positions in a fraction of the time of a new call."""

    @abstractmethod
    def with_keys(
        self, placement: Placement, k_strides: tuple[int, ...], v_strides: tuple[int, ...]
    ) -> Prepared | None:
        """This call for other keys and positions, strides in elements; None where it cannot run them. It reads the first
        ``placement.nk`` keys, and its inputs may hold more."""


class Backend(Protocol):
    name: str

    def supports(self, call: Call) -> str | None: ...
    def prepare(self, call: Call) -> Prepared: ...
