import torch, lowtri
from torch.nn.functional import scaled_dot_product_attention as sdpa

k, v = torch.randn(2, 5, 4)
q = torch.randn(2, 4)  # two new queries, five keys
print(sdpa(q, k, v, is_causal=True)[0] == v[0])  # sees key 1 alone
print(lowtri.attention(q, k, v, "causal"))  # sees keys 1 to 4, and 1 to 5
