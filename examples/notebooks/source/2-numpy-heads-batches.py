# %% [markdown]
# # {{notebook.2}}
#
# {{notebook.run}}

# %%
try:
    import lowtri
except ImportError:  # {{notebook.clone}}
    raise SystemExit("pip install 'FOLDER/lowtri[torch]'") from None
import numpy as np
from lowtri.plain import make_causal_mask, masked_self_attention, softmax

# %% [markdown]
# {{forms.additive.p}}

# %%
scores = np.array(
    [
        [0.50390039, 0.5365974, 0.41871129, 0.81252469],
        [0.84036985, 0.86761153, 0.80269944, 0.87209218],
        [0.69733857, 0.93032391, 0.81018176, 0.74386275],
        [0.41280469, 0.59346427, 0.12186543, 0.97038267],
    ]
)
mask = make_causal_mask(4)
weights = softmax(scores + mask)
print(weights)
assert np.allclose(weights[1], [0.49319, 0.50681, 0, 0], atol=1e-5)

# %%
steps = lowtri.explain(scores=scores, mask="causal", lang="{{LANG}}")
assert np.allclose(steps["weights"], weights)
steps["weights"]

# %% [markdown]
# {{shapes.p1}}

# %%
B, H, T, d_model = 2, 3, 4, 6
Q, K, V = np.random.default_rng(0).standard_normal((3, B, H, T, d_model // H))
output, weights = masked_self_attention(Q, K, V, mask[None, None])
print(Q.shape, K.swapaxes(-1, -2).shape, weights.shape, output.shape)

# %% [markdown]
# {{shapes.says}}

# %%
ours, ours_weights = lowtri.attention(Q, K, V, "causal", return_weights=True)
print(abs(ours - output).max(), np.count_nonzero(np.triu(ours_weights, 1)))
assert np.allclose(ours, output) and np.allclose(ours_weights, weights)

# %% [markdown]
# {{traps.4.p}}

# %%
print(softmax(np.full((1, 3), -1e9)))
print(lowtri.attention(Q[0, 0], K[0, 0], V[0, 0], ~lowtri.full()))
