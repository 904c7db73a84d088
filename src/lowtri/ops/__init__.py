"""What attention is.

arguments  the arguments of a call, checked, and what is said of those that do not fit
call       one checked, frozen description of a call: shapes, positions, mask, options
reference  the definition, forward and backward: NumPy, float64, every step kept
"""
