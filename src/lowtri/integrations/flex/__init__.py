"""FlexAttention on CPU: torch's ``flex_attention`` and ``create_block_mask`` with torch's arguments, forward and backward.

    from lowtri.integrations.flex import create_block_mask, flex_attention

torch's own function does not train on a CPU: it raises for tensors that require gradients. :func:`block_mask` makes torch's BlockMask
from a lowtri mask, also for torch's own function on a GPU.

attention   flex_attention: its checks, and the choice between the kernels and torch, tile by tile
masks       a mask_mod, and the blocks of a BlockMask, as a lowtri mask; BlockMasks from masks and from mask_mods
scores      what of a score_mod the kernels compute, with the biases in it
"""

from lowtri.extras import require

require("lowtri.integrations.flex", "torch")

from lowtri.integrations.flex.attention import flex_attention
from lowtri.integrations.flex.masks import block_mask, create_block_mask

__all__ = ["block_mask", "create_block_mask", "flex_attention"]
