# %% [markdown]
# # {{notebook.1}}
#
# {{notebook.run}}

# %%
try:
    import lowtri
except ImportError:  # {{notebook.clone}}
    raise SystemExit("pip install 'FOLDER/lowtri[torch]'") from None
import numpy as np
import torch

# %% [markdown]
# {{bench.made.p}}

# %%
torch.manual_seed(42)
module = lowtri.plain.MaskedSelfAttention(d_model=2)
x = torch.tensor([[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]])
steps = lowtri.explain(module, x, tokens="Write a poem", mask="causal", lang="{{LANG}}")
steps["q"]

# %%
steps["scaled"]

# %% [markdown]
# {{matrix.p1}}

# %%
print(lowtri.causal().draw(3, tokens="Write a poem", numbers=True))
steps["weights"]

# %%
# {{notebook.known}}
assert np.allclose(steps["weights"], [[1, 0, 0], [0.3606, 0.6394, 0], [0.0722, 0.0320, 0.8959]], atol=6e-5)
assert np.allclose(steps["output"], [[0.6038, 0.7434], [-0.0062, 0.6072], [3.4989, 2.2427]], atol=6e-5)
hidden = torch.ones(3, 3, dtype=torch.bool).triu(1)
print(module(x, hidden).detach())

# %% [markdown]
# {{matrix.p2}}

# %%
weights = torch.softmax(torch.tensor(np.array(steps["scaled"])), -1)
print(weights.tril().sum(-1))

# %% [markdown]
# {{steps.p3}}

# %%
other = lowtri.explain(module, torch.cat([x[:2], torch.tensor([[-3.0, 5.0]])]), mask="causal")
print(np.array_equal(other["weights"][:2], steps["weights"][:2]))
print(np.array_equal(other["weights"].unmasked[:2], steps["weights"].unmasked[:2]))

# %% [markdown]
# {{traps.3.p}}

# %%
row = torch.tensor([0.0, 1.0])
for number in (-1e9, -1e20, -9e15, -torch.inf, -10.0):
    print(number, torch.softmax(row + torch.tensor([0.0, number]), -1))
print(torch.tensor(-1e9).half())
