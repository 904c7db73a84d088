"""Both models write; and what a cache holds while they do."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import torch

import lowtri
from demo.context import Context, Result
from demo.tables import KIN, as_text
from lowtri.cli.main import main
from lowtri.nn.checkpoint import save
from lowtri.nn.decoder import Decoder

__all__ = ["SENTENCE", "TITLE", "run"]

TITLE = "Both models write"
SENTENCE = "The same prompts, the same draws. Each token is the next input; a cache keeps what may still be seen."

_PROMPTS = ("This function returns the ", "If the argument is not ", "the name of the ")
_CACHED = ("causal", "causal & window(32)", "causal & (window(32) | first(4))")
_AFTER = (128, 2000)


def run(context: Context) -> Result:
    """Let both models continue the same prompts, and weigh the caches."""
    experiment = context.experiment
    result, lines = Result(""), []
    for mask, title in (("causal", "with the mask"), ("full", "without it")):
        model = experiment.models[mask]
        lines.append(f"trained {title}")
        for prompt in _PROMPTS:
            for temperature in (0.0, experiment.setting.temperature):
                lines.append(f"  {temperature:g}  {prompt!r} ... {_written(model, prompt, context, temperature)!r}")
        save(model, context.out / title.replace(" ", "-"), experiment.tokenizer)
    model = experiment.models["causal"]
    anew = [_written(model, prompt, context, 0.0, cached=False) for prompt in _PROMPTS]
    same = anew == [_written(model, prompt, context, 0.0) for prompt in _PROMPTS]
    result.check("with the cache and without it the masked model writes the same", same)

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(["generate", str(context.out / "without-it"), _PROMPTS[0]])
    result.check("lowtri generate rejects the model that saw the future", code == 2 and "mask full" in said.getvalue())

    lines += ["", f"what the cache of such a model holds, in {model.config.num_hidden_layers} layers"]
    lines.append(f"  {'':<34}" + "".join(f"{f'after {n:,} tokens':>30}" for n in _AFTER))
    grown = {mask: _held(model, mask) for mask in _CACHED}
    for mask, sizes in grown.items():
        lines.append(f"  {mask:<34}" + "".join(f"{f'{held:,} tokens, {size:,} B':>30}" for held, size in sizes))
    result.check(
        "a window's cache stops growing: " + ", ".join(f"{sizes[-1][1]:,} bytes" for sizes in grown.values()),
        all(sizes[0][1] == sizes[-1][1] for mask, sizes in grown.items() if mask != "causal"),
    )
    config = model.config
    torch.manual_seed(0)
    lstm = lowtri.nn.RecurrentLM(config.vocab_size, config.hidden_size, cell="lstm").eval()
    tokens = list(lowtri.generate(lstm, [1, 2, 3], 8))
    result.check("the same loop serves a recurrent model (here an untrained LSTM)", len(tokens) == 8)
    result.text = "\n".join(lines) + f"\n\n{as_text(KIN)}"
    result.files = [
        context.write("written.txt", result.text + "\n"),
        *(
            f"{folder}/{name}"
            for folder in ("with-the-mask", "without-it")
            for name in ("config.json", "model.safetensors")
        ),
    ]
    return result


def _written(model: Decoder, prompt: str, context: Context, temperature: float, cached: bool = True) -> str:
    tokenizer = context.experiment.tokenizer
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    new = min(80, model.config.max_position_embeddings - len(ids))
    return tokenizer.decode(list(lowtri.generate(model, ids, new, temperature=temperature, stop=(), cached=cached)))


def _held(model: Decoder, mask: str) -> list[tuple[int, int]]:
    """Tokens and bytes in a cache of the model's sizes after as many tokens as ``_AFTER`` says."""
    config = model.config
    cache, sizes = lowtri.KVCache(mask), []
    one = np.zeros((1, config.num_key_value_heads, 1, config.head_dim), np.float32)  # a token's key, and its value
    for t in range(1, _AFTER[-1] + 1):
        for layer in range(config.num_hidden_layers):
            cache.append(one, one, layer=layer)
        if t in _AFTER:
            sizes.append((cache.held, cache.bytes))
    return sizes
