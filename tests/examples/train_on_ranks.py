"""A short training run, alone or on the processes of ``ranks``; every process makes the same model and corpus."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from corpus import Packed, Recipe
from lowtri.nn import Decoder, DecoderConfig
from processes import full_weights, resume, save, shard
from train import Run

RECIPE = Recipe(steps=4, batch=4, context=192, lr=3e-3, every=2, held_out=0.2)
VOCABULARY = 64


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 192}
    return Decoder(DecoderConfig(**{"vocab_size": VOCABULARY, **sizes, **options}))


def llama() -> Any:
    """The same sizes, as a model of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from lowtri.integrations.transformers import switch

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, **sizes, num_key_value_heads=2, max_position_embeddings=192)
    torch.manual_seed(0)
    return switch(LlamaForCausalLM(config))


MODELS = {"decoder": decoder, "llama": llama}


def corpus() -> Packed:
    """24 documents of 5 to 400 tokens."""
    random = np.random.default_rng(0)
    return Packed.of([random.integers(0, 60, int(random.integers(5, 400))).tolist() for _ in range(24)])


@dataclass(frozen=True)
class Training:
    """What is trained, and on how many processes."""

    dp: int
    sp: int
    kind: str = "decoder"
    recipe: Recipe = RECIPE
    folder: Path | None = None  # of checkpoints
    stop: int | None = None  # the step after which it ends, with a checkpoint


def training_run(group: Any, case: Training) -> dict[str, Any]:
    """Losses of the steps that were left, the validation loss, and the weights."""
    alone = case.dp * case.sp == 1
    mesh = None if alone else init_device_mesh("cpu", (case.dp, case.sp), mesh_dim_names=("dp", "sp"))
    model = MODELS[case.kind]()
    if mesh is not None:
        shard(model)
    run = Run(model, corpus(), case.recipe, "causal & window(100)", mesh)
    if case.folder is not None:
        run.done = resume(case.folder, model, run.optimizer)
    begun, losses = run.done, []
    for loss in run.train():
        losses.append(loss)
        if run.done == case.stop and case.folder is not None:
            save(case.folder, run.done, model, run.optimizer)
            break
    weights = dict(model.state_dict()) if alone else full_weights(model)
    return {
        "rank": 0 if alone else dist.get_rank(),
        "begun": begun,
        "losses": losses,
        "validation": run.validate(),
        "weights": {name: weight.detach().numpy().copy() for name, weight in weights.items()},
    }
