"""The CPU kernels: attention in Python, compiled for this CPU by LLVM (through Numba). Each file imports only from the files above it:

isa            the instruction sets: features and register tiles
spec           what a kernel is compiled for: dtype, how rows are read, instruction set; the kernels of an instruction set
library        the compiled kernels, in a shared library
target         this CPU: its features, its instruction set, which spec reads which arrays
threads        running a kernel on a team of threads
abi            the record that a launch writes and a kernel reads, and the scratch memory of each kernel

The files above need no compiler: a call is prepared with them alone. Those below are compiled, by tools/build_kernels.py.

operations     the operations of the instruction sets, as LLVM code
device         the spec, the record and scratch memory as Numba types; decorators of functions and operations of kernels
simd           the operations that kernels are written in, on vectors of 64 bytes, their lanes, and pairs of bf16; 2 ** x
product        the matrix products: on vectors, in blocks of bf16 on ARM, on AMX's tile registers; the ceilings of a CPU
rows           rows of arrays and tiles: filled, transposed, widened, rounded; as operands of products; with NaN and inf
tiles          the steps of one tile of queries: its key tiles, scores, online softmax, products
dropout        which weights of a tile are dropped
forward        attention, tile by tile of the plan
backward       the gradients of attention
weights        the weights, and what each key received
decode         few queries against a cache
"""
