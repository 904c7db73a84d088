# %% [markdown]
# # {{notebook.4}}
#
# {{notebook.run}}

# %%
try:
    import lowtri
except ImportError:  # {{notebook.clone}}
    raise SystemExit("pip install 'FOLDER/lowtri[torch]'") from None
import torch

# %% [markdown]
# {{kin.p1}}

# %%
torch.manual_seed(0)
module = lowtri.plain.MaskedSelfAttention(embed_dim=4)
output, weights = module(torch.randn(1, 5, 4))
print(output.shape, weights.shape)
head = lowtri.plain.AutoRegressiveModel(embed_dim=4, vocab_size=10_000)
print(head(output[:, -1:]))

# %%
print(lowtri.full().draw(4, tokens="I love Machine Learning", ticks=True))
print(lowtri.causal().draw(4, tokens="I love Machine Learning", ticks=True))

# %% [markdown]
# {{forcing.p1}}

# %%
words = ["[START]", "I", "love", "NLP"]


def model(ids):
    following = torch.tensor([1, 2, 3, 0])[torch.as_tensor(ids)]
    return torch.nn.functional.one_hot(following, 4) * 9.0


for n, i in enumerate(lowtri.generate(model, [0], max_new_tokens=3)):
    print(words[: n + 1], "->", words[i])

# %% [markdown]
# {{recurrent.p1}}

# %%
from lowtri.nn import Decoder, DecoderConfig, RecurrentLM

ids = torch.randint(0, 20, (2, 9))
for name, lm in (
    ("rnn", RecurrentLM(cell="rnn", vocab_size=20, hidden_size=16)),
    ("lstm", RecurrentLM(cell="lstm", vocab_size=20, hidden_size=16)),
    ("attention", Decoder(DecoderConfig(vocab_size=20, hidden_size=32, num_hidden_layers=2))),
):
    print(name, list(lowtri.generate(lm, [1], max_new_tokens=4)), lowtri.audit(lm, ids, progress=False).ok)

# %% [markdown]
# {{patterns.p1}}

# %%
for text in (
    "causal & window(3)",
    "causal & (window(2) | first(1))",
    "causal & documents(lengths=[2, 6])",
    "causal | first(3)",
):
    mask = lowtri.mask(text)
    print(f"{text}: {mask.pairs(8, 8)} / 64\n{mask.draw(8)}\n")
