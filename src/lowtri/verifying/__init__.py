"""Compares anyone's attention with the definition in float64, and names well-known mistakes. In reading order:

definition  attention with gradients in float64, and the ways in which it is written wrongly
cases       the calls, as data: sizes, masks, options, numbers, each with its reason
mistakes    well-known mistakes, each one small function
calling     signatures (lowtri's, torch's, flash-attn's, FlexAttention's), arrays of NumPy, torch or JAX, a time limit
isolation   the calls in a child process, which may end
report      the result as text, HTML, JSON and a picture
judging     the tolerance, which mistakes explain a difference, and where an unexplained one lies
verify      the function itself
plugin      the fixture `lowtri_verify` for pytest
"""
