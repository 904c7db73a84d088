"""A call of attention, checked, and the definition of attention.

arguments  checks of the arguments, and their error messages
call       the checked, frozen description of a call: shapes, positions, mask, options
describe   from the arguments to that description
reference  the definition, forward and backward: NumPy, float64, every step kept
"""
