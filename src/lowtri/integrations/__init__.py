"""Adapters to other libraries.

torch                   switch: nn.MultiheadAttention, in the layers of nn.Transformer or elsewhere, on lowtri's engines
transformers            attn_implementation="lowtri" for the models of the transformers library: register, switch, use
dense_mask              tables of pairs, boolean or additive, as masks and biases; where queries and keys stand
content                 what a tensor holds, by which everything that is kept of it is kept
function_mask           mask functions of other libraries as masks, with tile answers from their graphs
flex                    torch's FlexAttention on CPU, with gradients; its BlockMask from a lowtri mask
flash_attn              the functions of flash-attn with its signatures, and `import flash_attn` without a GPU
measured                what a call costs through these functions: a part of `lowtri bench`
replaced_class          modules whose forward is replaced

`import lowtri` imports nothing of this package, and each library is imported only when it is used.
"""

from __future__ import annotations

__all__: list[str] = []
