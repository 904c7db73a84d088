import torch
from torch.nn.functional import scaled_dot_product_attention

q, k, v = torch.randn(3, 1, 8, 64, 64)
O = scaled_dot_product_attention(q, k, v, is_causal=True)
