# %% [markdown]
# # {{notebook.5}}
#
# {{notebook.run}}

# %%
try:
    import lowtri
except ImportError:  # {{notebook.clone}}
    raise SystemExit("pip install 'FOLDER/lowtri[torch]'") from None
import torch
import torch.nn.functional as F
from lowtri.nn import Decoder, DecoderConfig

# %% [markdown]
# {{notebook.twice}}

# %%
torch.set_num_threads(1)  # for models as small as these, more threads wait more than they compute
verbs, nouns = ["saw", "liked", "found", "drew"], ["cat", "dog", "bird", "fish", "fox"]
dice = torch.Generator().manual_seed(0)


def pick(words):
    return words[int(torch.randint(len(words), (1,), generator=dice))]


text = " ".join(f"the {pick(nouns)} {pick(verbs)} the {pick(nouns)}." for _ in range(2000))
characters = sorted(set(text))
data = torch.tensor([characters.index(c) for c in text])
size, steps = 32, 150


def rows(count):
    starts = torch.randint(len(data) - size, (count,), generator=dice)
    return data[starts[:, None] + torch.arange(size)]


def loss(model, batch):
    return F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def stepwise_loss(model, batch):
    logits = [model(batch[:, :n])[:, -1] for n in range(1, size)]
    return F.cross_entropy(torch.stack(logits, 2), batch[:, 1:])


# %%
models = {}
for mask in ("causal", "full"):
    torch.manual_seed(0)
    dice.manual_seed(1)
    config = DecoderConfig(vocab_size=len(characters), hidden_size=48, num_hidden_layers=2, mask=mask)
    model = models[mask] = Decoder(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        value = loss(model, rows(16))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    with torch.no_grad():
        held = rows(16)
        print(f"{mask:6} {float(loss(model, held)):.3f} {float(stepwise_loss(model, held)):.3f}")

# %% [markdown]
# {{notebook.copier}}

# %%
for mask, model in models.items():
    ids = [characters.index(c) for c in "the cat "]
    written = lowtri.generate(model, ids, max_new_tokens=24, temperature=0.5, seed=0)
    print(f"{mask:6} the cat {''.join(characters[i] for i in written)!r}")

# %% [markdown]
# {{notebook.audit}}

# %%
for mask, model in models.items():
    print(mask, lowtri.audit(model.eval(), rows(2)[:, :9], mask="causal", progress=False).message)
