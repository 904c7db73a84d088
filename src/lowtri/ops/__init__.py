"""The checked description of an attention call, and the definition of attention.

arguments      checks of the arguments, and their error messages
call           the checked, frozen description of a call: shapes, positions, mask, options
describe       builds this description from the arguments
distance_bias  biases of one number for each distance between query and key
reference      the definition: NumPy, float64, every step kept
"""
