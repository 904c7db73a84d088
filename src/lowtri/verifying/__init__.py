"""Anyone's attention held to the definition in float64: cases from small to large, and names for well-known mistakes.

In reading order:

    formula     attention with gradients in float64, and the ways in which it is written wrongly
    cases       what is tried, as data: sizes, masks, options, numbers, each with its reason
    mistakes    well-known mistakes, each one small function
    signatures  how a case becomes a call: lowtri's, torch's, flash-attn's and FlexAttention's arguments
    running     one call: arrays of NumPy, torch or JAX, gradients, a time limit
    judging     the tolerance, which mistake explains a difference, and where an unexplained one lies
    report      the result as text, HTML and JSON
    verification  the state of one verification, and which mistake explains what
    verify      the function itself
    plugin      the fixture `lowtri_verify` for pytest
"""
