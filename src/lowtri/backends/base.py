"""The interface of a backend: a module with a name and two functions, which imports no other backend.

    name             the value of ``engine=`` that selects it
    supports(call)   None if it can run the call, else the reason why not, in a few words for users
    prepare(call)    a :class:`Prepared`: everything that does not depend on the arrays' data

Both depend on the call's description only, so equal calls run on the same backend and give the same bits.
"""

from __future__ import annotations

from typing import Any, Protocol

from lowtri.ops.call import Call, Inputs, Keys, Result


class Prepared:
    """A prepared call: runs on any arrays of the same signature, also from several threads at once.

    By default torch differentiates what ``run`` computes. A backend that ``computes_gradients`` records no graph: its gradients are
    those of the output and the log-sum-exp, the only results of such calls. Where they need a graph themselves, the formula gives them.

    Attributes:
        nbytes: memory that it holds between runs.
        computes_gradients: ``record`` and ``gradients`` compute the first gradients.
        from_output: ``gradients`` needs nothing of the forward but its output and log-sum-exp; ``recorded`` is small, and may be None.
        formula_dtype: all gradients are those of the formula in this dtype.
        is_selective: the mask is kept to for finite, moderate numbers only, and ``accepts`` inspects them under ``engine="auto"``.
        any_keys: ``at`` prepares it for other keys and positions, in a fraction of the time of a new call.
        table_bytes: of the table of visible keys, where ``any_keys`` has one.
        qkv_only: q, k and v are the only inputs and the output is the only result. There are also ``record_qkv(q, k, v)`` and
            ``gradients_qkv(q, k, v, output, recorded, d_output)``: without tuples, small calls are ten microseconds shorter.
    """

    nbytes: int = 512
    computes_gradients: bool = False
    from_output: bool = False
    formula_dtype: str | None = None
    is_selective: bool = False
    any_keys: bool = False
    table_bytes: int = 0
    qkv_only: bool = False

    def run(self, inputs: Inputs) -> Result:
        """The result; torch differentiates it unless the prepared call ``computes_gradients`` or has a ``formula_dtype``."""
        raise NotImplementedError

    def at(self, keys: Keys) -> Prepared | None:
        """This call for other keys and positions; None where it cannot run them."""
        raise NotImplementedError

    def record(self, inputs: Inputs) -> tuple[Result, Any]:
        """The result, and any other state that the gradients need."""
        return self.run(inputs), None

    def gradients(self, inputs: Inputs, result: Result, recorded: Any, d_result: Result, wide: bool = False) -> Inputs:
        """The gradients of the inputs, None where none is needed.

        Args:
            result: the output, and the log-sum-exp where the call returns it or ``recorded`` is missing.
            recorded: the state; None if ``record`` has to run again.
            d_result: the gradients of the output and of the log-sum-exp.
            wide: of ``from_output``: in the dtype in which they are summed, at least float32.
        """
        raise NotImplementedError

    def accepts(self, inputs: Inputs, d_output: Any = None) -> bool:
        """Whether it keeps to the mask for these inputs, or in the backward for this gradient of the output."""
        return True


class Backend(Protocol):
    name: str

    def supports(self, call: Call) -> str | None: ...
    def prepare(self, call: Call) -> Prepared: ...
