import math, torch

q, k, v = torch.randn(3, 1, 8, 64, 64)
M = torch.full((64, 64), -math.inf).triu(1)
A = torch.softmax(q @ k.mT / 8 + M, dim=-1)
O = A @ v
