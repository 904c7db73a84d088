"""Other libraries' formats and doors.

transformers         attn_implementation="lowtri" for the models of the transformers library: register, switch
transformers_attend  the attention that every layer of such a model then calls
transformers_masks   its mask functions (causal, sliding, chunked, packed, overlays, padding) as lowtri masks
transformers_asked   what a mask function tells when it is not one of those known: asked pair by pair, and moved positions
transformers_seen    a mask and its positions in the shape of a tensor, which is what models pass from layer to layer
transformers_given   tables of pairs that somebody made by hand, as masks and biases
transformers_traced  the same attention in programs that torch.compile or torch.export writes down
onnx                 the Attention operator of the ONNX standard, as a function
onnx_places          who sees whom in it, from indices to a mask and places
onnx_arrays          heads, the past, scores and dtypes in it, for NumPy and torch alike

Nothing here is loaded before it is imported by name, and transformers itself not before it is used.
"""

from __future__ import annotations

__all__: list[str] = []
