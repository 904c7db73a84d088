"""The backends that run a call of attention, independent of one another; :mod:`lowtri.backends.base` defines the interface.

cpu        the CPU kernels
sdpa       torch's own fused attention
formula    the formula in torch, in tiles of queries: every option, any device, gradients to any order
reference  the definition, in NumPy and float64
"""

__all__ = ["BACKENDS"]

BACKENDS = ("cpu", "sdpa", "formula", "reference")
