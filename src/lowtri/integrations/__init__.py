"""Adapters to other libraries.

torch                   switch: nn.MultiheadAttention, in the layers of nn.Transformer or elsewhere, on lowtri's engines
torch_multihead         its projections, its masks as lowtri masks, its options
x_transformers          the Attend module of x-transformers, which the same switch reaches
replaced_class          modules whose forward is replaced
jax                     attention on JAX arrays, eager and under jit, with gradients
jax_nn                  jax.nn.dot_product_attention with its arguments and meanings
jax_operation           attention as an operation of JAX, for both
transformers            attn_implementation="lowtri" for the models of the transformers library: register, switch, use
transformers_use        a lowtri mask on a switched model, for one forward or for all
transformers_generating whether a forward is a step of generate without a cache
transformers_falcon     Falcon, whose layers choose their attention code when they are built
transformers_attend     the attention function that every layer of a switched model calls
transformers_masks      transformers' mask functions (causal, sliding, chunked, packed, overlays, padding) as lowtri masks
transformers_functions  mask functions that are not recognised; masks at remapped positions
transformers_lazy       lazy masks: a mask and its positions as a tensor subclass without a table
transformers_dense      dense masks, boolean or additive, as lazy masks and biases
transformers_traced     the same attention under torch.compile and torch.export
function_mask           mask functions of other libraries as masks, with tile answers from their graphs
flex                    torch's FlexAttention on CPU, with gradients; its BlockMask from a lowtri mask
flash_attn              the functions of flash-attn with its signatures, and `import flash_attn` without a GPU

`import lowtri` imports nothing of this package, and each library is imported only when it is used.
"""

from __future__ import annotations

from lowtri.extras import require

require("lowtri.integrations", "torch")

__all__: list[str] = []
