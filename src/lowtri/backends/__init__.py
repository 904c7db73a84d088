"""The backends that run a call of attention, independent of one another; :mod:`lowtri.backends.base` defines the interface.

cpu        the CPU kernels
sdpa       torch's own fused attention
flex       torch's compiled FlexAttention, on a GPU
formula    the formula in torch, in tiles of queries: every option, any device, gradients to any order
reference  the definition, in NumPy and float64
"""

__all__ = ["BACKENDS"]

BACKENDS = ("cpu", "sdpa", "flex", "formula", "reference")
