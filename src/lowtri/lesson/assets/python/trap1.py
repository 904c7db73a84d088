import torch, lowtri

m = torch.ones(4, 4, dtype=torch.bool).tril()
print(lowtri.table(m).draw(4))  # True = may see
print(lowtri.hidden(m).draw(4))  # True = hidden
