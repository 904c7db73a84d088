"""What attention is.

call       one checked, frozen description of a call: shapes, positions, mask, options
reference  the definition, forward and backward: NumPy, float64, every step kept
"""
