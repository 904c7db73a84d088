# %% [markdown]
# # {{notebook.3}}
#
# {{notebook.run}}

# %%
try:
    import lowtri
except ImportError:  # {{notebook.clone}}
    raise SystemExit("pip install 'FOLDER/lowtri[torch]'") from None
import math

import torch
from torch.nn.functional import scaled_dot_product_attention

# %% [markdown]
# {{why.p1}} {{why.p2}}

# %%
print(lowtri.causal().draw(4, tokens="The black cat <end>", ticks=True))

# %% [markdown]
# {{pair.p1}}

# %%
torch.manual_seed(42)
module = lowtri.plain.MaskedSelfAttention(d_model=2)
x = [[0.9, 0.4], [-1.1, 1.6], [1.8, -0.7], [0.2, 1.1]]
steps = lowtri.explain(module, x, tokens="The black cat <end>", mask="causal", lang="{{LANG}}")
print(steps["weights"].unmasked.round(2))
steps["weights"]

# %% [markdown]
# {{forms.p1}}

# %%
q, k, v = torch.randn(3, 2, 8, 10, 64)
added = torch.full((10, 10), -math.inf).triu(1)
additive = torch.softmax(q @ k.mT / 8 + added, -1) @ v
boolean = torch.softmax((q @ k.mT / 8).masked_fill(added < 0, -math.inf), -1) @ v
fused = scaled_dot_product_attention(q, k, v, is_causal=True)
ours, weights = lowtri.attention(q, k, v, "causal", return_weights=True)
# {{notebook.same}}
assert all(torch.allclose(form, ours, atol=1e-5) for form in (additive, boolean, fused))
print(ours.shape, weights.shape, weights[0, 0, 0])

# %% [markdown]
# {{forcing.p1}}
#
# {{cache.p1}}

# %%
cache, rows = lowtri.KVCache("causal"), []
for t in range(10):
    rows.append(cache.attend(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1]))
assert torch.allclose(torch.cat(rows, 2), ours, atol=1e-5)
print(cache)

# %% [markdown]
# {{cache.p2}}

# %%
from lowtri.nn import Decoder, DecoderConfig

ids = torch.randint(0, 50, (1, 12))
for layers in (1, 3):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocab_size=50, hidden_size=64, num_hidden_layers=layers)).eval()
    with torch.no_grad():
        training = model(ids)[0]
        with_mask = torch.stack([model(ids[:, : n + 1])[0, -1] for n in range(12)])
        without = torch.stack([model(ids[:, : n + 1], mask="full")[0, -1] for n in range(12)])
    print(layers, f"{float((with_mask - training).abs().max()):.0e}", f"{float((without - training).abs().max()):.0e}")
