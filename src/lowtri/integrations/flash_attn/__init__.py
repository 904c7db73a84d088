"""The functions of the package flash-attn on lowtri's engines: the same names, signatures and layouts, also on a CPU.

functions      the public functions: batches (B, N, H, D), packed sequences (total, H, D), their packed forms, and a cache
layers_rotary  flash_attn.layers.rotary: apply_rotary_emb, RotaryEmbedding
bert_padding   unpad_input, pad_input, index_first_axis
arguments      checks, with errors in flash-attn's own names and layout
install        makes ``import flash_attn`` find these functions, and names what is missing; ``python -m`` does it for a script

The masks are those of flash-attn: the last query stands at the last key, and a window (left, right) counts the keys before and after
the query's own position, which it always shows. Any float dtype and head size is accepted. Gradients flow to q, k and v.

Differences: ``deterministic`` changes nothing, since lowtri always is; returned probabilities are those before dropout; a CUDA tensor
goes to the real package where it is installed. Under ``torch.compile``, calls with sequence lengths, a cache or ALiBi slopes
run outside of the graph.

Source: flash-attn 2.8, https://github.com/Dao-AILab/flash-attention.
"""

from lowtri.extras import require

require("lowtri.integrations.flash_attn", "torch")

from lowtri.integrations.flash_attn.functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from lowtri.integrations.flash_attn.install import install

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]
