"""The backend ``cpu``: the kernels, on CPU tensors and NumPy arrays.

launch       how a kernel reads the arrays of a call, and its launch: its record, its threads, and memory
forward      a call for the kernels of tiles: the output, and the gradients
parts        how the backward is cut for threads
weights      the weights of a call, and what each key received
decode       few queries against many keys
few_weights  the same, with their weights or what each key received
tables       which pairs a dense table of numbers hides

Where there is no library of kernels for this machine, ``supports`` gives the reason.
"""

from __future__ import annotations

from lowtri.backends import Prepared
from lowtri.backends.cpu.decode import CpuDecode
from lowtri.backends.cpu.few_weights import CpuDecodeWithWeights
from lowtri.backends.cpu.forward import CpuForward
from lowtri.backends.cpu.launch import select
from lowtri.kernels import library
from lowtri.ops.call import Call

__all__ = ["name", "prepare", "supports"]

name = "cpu"


def supports(call: Call) -> str | None:
    """Reject what the kernels do not implement."""
    if call.device != "cpu":
        return f"the tensors are on {call.device}"
    reason = library.unusable() or call.why_unreadable
    if reason:
        return reason
    if 0 in call.q.shape or 0 in call.v.shape:
        return "there is nothing to attend to"
    if call.distance_low is not None and call.first_distance is None:
        return "it reads a bias over distances at consecutive positions only"
    return None


def prepare(call: Call) -> Prepared:
    selection = select(call)
    if selection.family == "forward":
        return CpuForward(call, selection)
    returns_more = call.return_weights or call.return_received
    return CpuDecodeWithWeights(call, selection) if returns_more else CpuDecode(call, selection)
