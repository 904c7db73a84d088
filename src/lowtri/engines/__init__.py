"""Ways to run a call of attention. Each engine is a module with a ``name``, ``why_not(call)`` (None where it can run) and
``run(call)``; none imports another.

    reference  NumPy, float64, the definition itself
    formula    the formula in torch, query tile by query tile: every option, any device, gradients to any order
    sdpa       torch's own fused attention
    cpu        the CPU kernels: launch (results, threads), descriptor (what a kernel is told), plans (kept), gradient, weights
    careful    two products that keep to the mask, for formula and weights
    worth      when a call is worth a kernel
    attend     attention(): check once, choose, run
    choice     which engine runs a call
    operators  attention() in a program that torch.compile or torch.export writes down
    twin       torch's scaled_dot_product_attention, with torch's meanings
"""
