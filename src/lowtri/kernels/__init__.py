"""The CPU kernels: attention in Python, compiled for this CPU by LLVM (through Numba).

target    what this CPU has: the register tile that follows
simd      a vector of 16 floats as a Numba type: load, store, fma, max, exp2, ...
product   the register-tiled product that everything is made of
softmax   one tile of online softmax
forward   attention, tile by tile of the plan
backward  its gradients
workers   the threads, and the cache of compiled code
"""
