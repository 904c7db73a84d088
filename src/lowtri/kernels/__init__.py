"""The CPU kernels: attention in Python, compiled for this CPU by LLVM (through Numba). Each file imports only from the files above it:

isa               the instruction sets: features, modes of operands and register blocks
spec              what a kernel is compiled for: dtype, how rows are read, instruction set; the kernels of an instruction set
library           the compiled kernels, in a shared library
target            this CPU: its features, its instruction set, which spec reads which arrays
threads           running a kernel on a team of threads
abi               the record that a launch writes and a kernel reads, and the scratch memory of each kernel

The files above need no compiler: a call is prepared with them alone. Those below are compiled, by tools/build_kernels.py.

operations        the operations of the instruction sets, as LLVM code
device            the spec, the record and scratch memory as Numba types; decorators of functions and operations of kernels
simd              the operations that kernels are written in, on vectors of 64 bytes, their lanes, and pairs of bf16; 2 ** x
values            what functions of kernels pass to one another: rows, operands, queries, keys with their mask, spans
bfmmla            the product in blocks of bf16 on ARM
product           the matrix product on vectors; the ceilings of a CPU
rows              rows of arrays and tiles: filled, transposed, widened, rounded; sums of a tile; with NaN and inf
amx               the products on AMX's tile registers, and rows as their operands
operands          rows as operands of a product, in every mode; key tiles that a thread keeps
tiles             the key tiles that a tile of queries sees, from the plan, and which keys each few queries see
softmax           passes over scores: softcap, bias, mask, online softmax; the log-sum-exp
amx_tiles         the products of a tile of queries on AMX
tile_products     the products of a tile of queries: scores, weighted sums, what it adds to dK and dV
dropout           which weights of a tile are dropped
amx_forward       the steps of the forward pass on AMX
forward           attention, tile by tile of the plan
backward          the gradients of attention
weights           the weights, and what each key received
decode_products   the two products of few queries with a cache
decode            few queries against a cache
hidden            which pairs a dense table of numbers hides
"""
