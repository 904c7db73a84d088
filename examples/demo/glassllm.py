"""Weights that others trained, writing: the package's own forward in NumPy is the judge."""

from __future__ import annotations

import time

import numpy as np
import torch

import lowtri
from demo.context import Context, Result
from demo.glassllm_weights import GLASSLLM, load_glassllm
from lowtri.errors import DataError

__all__ = ["SENTENCE", "TITLE", "run"]

TITLE = "Weights that others trained"
SENTENCE = (
    "glassllm, 0.85 million parameters trained on Alice, in lowtri's Decoder; its own forward in NumPy is the judge."
)

_PROMPTS = ("The Queen said", "Alice was ", "“Off with")
_NEW = 40


def run(context: Context) -> Result:
    """Compare logits and texts with the package's, write, and audit."""
    result = Result("")
    try:
        model = load_glassllm()
        import glassllm
    except (DataError, ImportError):
        result.text = f"Left out: its weights are not installed. {GLASSLLM.install}"
        return result
    theirs, tokenizer = glassllm.load_pretrained("en")
    ids = np.random.default_rng(0).integers(4, model.config.vocab_size, (1, model.config.max_position_embeddings))
    with torch.no_grad():
        away = float(np.abs(model(torch.from_numpy(ids)).numpy() - theirs(ids).data).max())
    result.check(f"logits at {ids.size} places: at most {away:.0e} from the package's, below 1e-04", away < 1e-4)
    lines, same = [], []
    for prompt in _PROMPTS:
        started = time.perf_counter()
        written = "".join(lowtri.generate(model, prompt, _NEW))
        seconds = time.perf_counter() - started
        steps = theirs.generate(tokenizer.encode(prompt), _NEW, greedy=True)
        same.append(tokenizer.decode([step.token for step in steps]) == written)
        drawn = "".join(lowtri.generate(model, prompt, _NEW, temperature=0.7, seed=1))
        lines += [
            f"  0    {prompt!r} ... {written!r}   ({_NEW / seconds:.0f} tokens/s)",
            f"  0.7  {prompt!r} ... {drawn!r}",
        ]
    result.check(
        f"greedily it writes what the package writes, token by token: {sum(same)} of {len(same)} texts", all(same)
    )
    report = lowtri.audit(model, torch.from_numpy(ids[:, :16]), mask="causal", progress=False)
    result.check(f"the audit: {report.verdict}", report.ok)
    result.text = "\n".join(["what it writes, at temperature 0 and 0.7", *lines, "", report.message])
    result.files = [context.write("glassllm.txt", result.text + "\n")]
    return result
