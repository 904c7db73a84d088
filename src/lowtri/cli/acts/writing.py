"""Both models write; and what a cache holds while they do."""

from __future__ import annotations

import torch

import lowtri
from lowtri.cli.acts.stage import Stage, Told
from lowtri.cli.acts.tables import KIN, as_text
from lowtri.nn.checkpoint import save
from lowtri.nn.decoder import Decoder

__all__ = ["SENTENCE", "TITLE", "play"]

TITLE = "Both models write"
SENTENCE = "The same prompts, the same draws. Each token is the next input; a cache keeps what may still be seen."

_PROMPTS = ("The object ", "If the argument is ", "Return a ")
_WINDOW = "causal & window(32)"


def play(stage: Stage) -> Told:
    """Let both models continue the same prompts, and weigh the caches."""
    found = stage.experiment
    told, lines = Told(""), []
    for mask, title in (("causal", "with the mask"), ("full", "without it")):
        model = found.models[mask]
        lines.append(f"trained {title}")
        for prompt in _PROMPTS:
            for temperature in (0.0, found.setting.temperature):
                lines.append(f"  {temperature:g}  {prompt!r} ... {_written(model, prompt, stage, temperature)!r}")
        save(model, stage.out / title.replace(" ", "-"), found.tokenizer)
    model, n = found.models["causal"], found.setting.recipe.context
    anew = [_written(model, prompt, stage, 0.0, cached=False) for prompt in _PROMPTS]
    same = anew == [_written(model, prompt, stage, 0.0) for prompt in _PROMPTS]
    told.promise("with the cache and without it the masked model writes the same", same)

    sizes = {mask: _cache(model, n, mask) for mask in ("causal", _WINDOW)}
    lines += ["", f"the cache after {n} tokens"]
    for mask, cache in sizes.items():
        lines.append(f"  {mask:<20} holds {cache.held:>4} tokens, {cache.bytes:>9,} bytes")
    told.promise(
        f"a window's cache stops growing: {sizes[_WINDOW].bytes:,} bytes beside {sizes['causal'].bytes:,}",
        sizes[_WINDOW].bytes < sizes["causal"].bytes,
    )
    config = model.config
    torch.manual_seed(0)
    lstm = lowtri.nn.RecurrentLM(config.vocab_size, config.hidden_size, cell="lstm").eval()
    tokens = list(lowtri.generate(lstm, [1, 2, 3], 8))
    told.promise("the same loop serves a recurrent model (here an untrained LSTM)", len(tokens) == 8)
    told.text = "\n".join(lines) + f"\n\n{as_text(KIN)}"
    told.files = [
        stage.write("written.txt", told.text + "\n"),
        *(
            f"{folder}/{name}"
            for folder in ("with-the-mask", "without-it")
            for name in ("config.json", "model.safetensors")
        ),
    ]
    return told


def _written(model: Decoder, prompt: str, stage: Stage, temperature: float, cached: bool = True) -> str:
    tokenizer = stage.experiment.tokenizer
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    new = min(80, model.config.max_position_embeddings - len(ids))
    return tokenizer.decode(list(lowtri.generate(model, ids, new, temperature=temperature, stop=(), cached=cached)))


@torch.inference_mode()
def _cache(model: Decoder, n: int, mask: str) -> lowtri.KVCache:
    state = model.start(mask=mask)
    for t in range(n):
        model(torch.tensor([[t % 100]]), state=state)
    return state
