import torch, lowtri

q, k, v = torch.randn(3, 2, 4)
print(torch.softmax(torch.full((2,), -torch.inf), 0))  # nan
print(lowtri.attention(q, k, v, ~lowtri.full()))  # 0
