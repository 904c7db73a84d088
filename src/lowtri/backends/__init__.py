"""Ways to run a call of attention, blind to one another; :mod:`lowtri.backends.base` says what each one is.

cpu        the CPU kernels
sdpa       torch's own fused attention
formula    the formula in torch, query tile by query tile: every option, any device, gradients to any order
reference  NumPy, float64, the definition itself
"""

__all__ = ["BACKENDS"]

BACKENDS = ("cpu", "sdpa", "formula", "reference")
