import torch, lowtri

torch.manual_seed(42)
module = lowtri.plain.MaskedSelfAttention(d_model=2)
x = [[0.9, 0.4], [-1.1, 1.6], [1.8, -0.7], [0.2, 1.1]]
steps = lowtri.explain(module, x, tokens="The black cat <end>".split(), mask="causal")
print(steps["weights"].unmasked, steps["weights"].value, sep="\n")  # full, then causal
