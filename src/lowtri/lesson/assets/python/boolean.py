import math, torch

q, k, v = torch.randn(3, 1, 8, 64, 64)
sees = torch.ones(64, 64, dtype=torch.bool).tril()
S = (q @ k.mT / 8).masked_fill(~sees, -math.inf)
O = torch.softmax(S, dim=-1) @ v
