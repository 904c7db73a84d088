"""The lesson as a program of cells: every number is computed here.

    python examples/lesson.py --lang id                                    # a script that prints it; en, id, th or zh
    python examples/notebook.py examples/lesson.py lesson.ipynb --lang id  # as a notebook, its sentences as text cells

It opens as a notebook in editors that know `# %%`, too.
"""

# %%
import math
import sys

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

import lowtri
from lowtri.sentences import texts, without_markup

LANG = sys.argv[sys.argv.index("--lang") + 1] if "--lang" in sys.argv else "en"


def say(*keys):
    """Print sentences of the lesson, the first as a heading."""
    title, *others = (without_markup(texts(LANG)[key]) for key in keys)
    print(f"\n{title}\n{'=' * len(title)}", *others, sep="\n")


say("title")

# %%
say("why.title", "why.p1", "why.p2")
words = texts(LANG)["sentence.cat"].split(" ")
print(lowtri.causal().draw(len(words), tokens=words, ticks=True))

# %%
say("matrix.title", "matrix.p1")
print(lowtri.causal().draw(4, numbers=True))
print([math.exp(score) for score in (2.0, 0.0, -10.0, -math.inf)])

# %%
say("steps.title", "bench.made.p")
torch.manual_seed(42)
module = lowtri.plain.MaskedSelfAttention(d_model=2)
x = [[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]]
steps = lowtri.explain(module, x, tokens=texts(LANG)["sentence.example"].split(" "), mask="causal", lang=LANG)
print(steps)
assert np.allclose(steps["weights"][1], [0.3606, 0.6394, 0], atol=6e-5)

# %%
say("quiz.q1", "quiz.a1")
other = lowtri.explain(module, [*x[:2], [-3.0, 5.0]], mask="causal")
assert np.array_equal(other["weights"][:2], steps["weights"][:2])
assert not np.array_equal(other["weights"].unmasked[:2], steps["weights"].unmasked[:2])

# %%
say("forms.title", "forms.p1")
q, k, v = torch.randn(3, 2, 8, 10, 64)
added = torch.full((10, 10), -math.inf).triu(1)
additive = torch.softmax(q @ k.mT / 8 + added, -1) @ v
boolean = torch.softmax((q @ k.mT / 8).masked_fill(added < 0, -math.inf), -1) @ v
fused = scaled_dot_product_attention(q, k, v, is_causal=True)
ours = lowtri.attention(q, k, v, "causal")
print(max(float((form - ours).abs().max()) for form in (additive, boolean, fused)))

# %%
say("forcing.title", "forcing.p1", "cache.p1")
cache, rows = lowtri.KVCache("causal"), []
for t in range(10):
    rows.append(cache.attend(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1]))
assert torch.allclose(torch.cat(rows, 2), ours, atol=1e-5)

# %%
say("patterns.title", "patterns.p1")
for text in (
    "causal",
    "causal & window(3)",
    "causal & (window(2) | first(1))",
    "causal & documents(lengths=[2, 6])",
    "causal | first(3)",
):
    mask = lowtri.mask(text)
    print(f"{text}: {mask.pairs(8, 8)} / 64\n{mask.draw(8)}\n")

# %%
say("traps.1", "traps.1.p")
lower = torch.ones(4, 4, dtype=torch.bool).tril()
assert lowtri.table(lower) == lowtri.hidden(~lower)

# %%
say("quiz.q3", "quiz.a3")
print(torch.tensor(-1e9).half())

# %%
say("traps.4", "traps.4.p")
print(torch.softmax(torch.full((2,), -math.inf), 0), lowtri.attention(*torch.randn(3, 2, 4), ~lowtri.full()))

# %%
say("gallery.title", "notebook.audit")
torch.manual_seed(0)
layer = torch.nn.Linear(8, 8)
report = lowtri.audit(lambda x: layer(x - x.mean(1, keepdim=True)), torch.randn(2, 9, 8), mask="causal", progress=False)
print(report.message)
