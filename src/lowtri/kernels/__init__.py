"""The CPU kernels: attention in Python, compiled for this CPU by LLVM (through Numba). Each file imports only from the files above it:

isa              the instruction sets: features and register tiles
spec             what a kernel is compiled for: dtype, how rows are read, instruction set
variants         the kernels of an instruction set, and which reads which arrays
library          the compiled kernels, in a shared library
cpu_features     the features of this CPU
target           the instruction set of this CPU
select           which spec reads which arrays on this CPU
abi              the record that a launch writes and a kernel reads
scratch          the scratch memory of each kernel

The files above need no compiler: a call is prepared with them alone. Those below are compiled.

operations       the operations of the instruction sets, as LLVM code
record           the spec and the record as Numba types
device_function  decorators of functions that only kernels call
simd             the operations that kernels are written in, on vectors of 64 bytes, their lanes, and pairs of bf16
exponent         2 ** x of a vector
blocks           the register tile of 2 x 2 blocks of bf16, for ARM
product          the register-tiled matrix product, and the ceilings of a CPU
tiles            the product of bf16 on AMX's tile registers
plan_walk        the key tiles of a query tile
rows             rows of arrays and tiles, filled, transposed, widened, rounded
gemv             few queries times the rows of a cache: dot products, and weighted sums
tile_output      the sums of a tile of queries: the output before its division, or dQ; the path for NaN and inf
operands         rows of arrays as the operands of a product, for each spec; converted once where several tiles use them
tile_products    the products of one tile, each for the keys that its queries see
scores           passes over a tile: softcap, bias, mask
softmax          online softmax
ds               passes of the backward
forward          attention, tile by tile of the plan
backward         the gradients of attention
decode           few queries against a cache
compilation      compiling kernels
threads          running a kernel on a team of threads
token_rows       passes over the rows of a few tokens, for layers beside attention
"""
