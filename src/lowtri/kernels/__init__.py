"""The CPU kernels: attention in Python, compiled for this CPU by LLVM (through Numba).

abi              the record that a launch writes and a kernel reads;  record: how it is read
spec             what a kernel is compiled for: dtype, how rows are read, instruction set
isa              the instruction sets: words and register tiles;  target: the one that this CPU has
select           which spec reads which arrays
simd, exponent   the words that kernels are written in, on vectors of 64 bytes;  lanes, bf16: more of them
product, gemv    the register-tiled product, and its counterpart for few queries
rows             rows on their way into a product and out of it
plan_walk        the tiles of a plan;  scores, softmax, ds, non_finite: passes over one of them
forward          attention, tile by tile of the plan;  backward: its gradients;  decode: few queries against a cache
threads          the threads, and the cache of compiled code
"""
