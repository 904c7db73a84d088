"""What transformers builds on attention (packing, chunks, guessed tokens, its Trainer), on lowtri and on eager attention."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from lowtri.integrations.transformers import switch, use

SIZE: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FALCON: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FALCON |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def two(kind: Any, config: Any, seed: int = 0) -> tuple[Any, Any]:
    """A model with eager attention, and the same switched."""
    torch.manual_seed(seed)
    models = []
    for _ in range(2):
        model = kind(copy.deepcopy(config)) if not models else copy.deepcopy(models[0])
        models.append(model.eval())
    with torch.no_grad():
        for p, other in zip(*(model.parameters() for model in models), strict=True):
            p.add_(0.15 * torch.randn_like(p))
            other.copy_(p)
    eager, switched = models
    if kind is tf.FalconForCausalLM:
        eager.config._attn_implementation = "eager"
    else:
        eager.set_attn_implementation("eager")
    return eager, switch(switched)


def llamas(seed: int = 0) -> tuple[Any, Any]:
    return two(tf.LlamaForCausalLM, tf.LlamaConfig(**SIZE), seed)


def mistrals() -> tuple[Any, Any]:
    return two(tf.MistralForCausalLM, tf.MistralConfig(**SIZE, sliding_window=6))


def ids_of(n: int, rows: int = 1, seed: int = 1) -> Tensor:
    return torch.randint(3, 99, (rows, n), generator=torch.Generator().manual_seed(seed))


GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.mark.parametrize("models", [llamas, mistrals])
def test_rows_that_a_collator_packs_give_eagers_loss_and_gradients(models: Any) -> None:
    rows = [{"input_ids": ids_of(n, seed=n)[0].tolist()} for n in (5, 9, 3)]
    batch = tf.DataCollatorWithFlattening(return_tensors="pt")(rows)
    assert batch["input_ids"].shape == (1, 17) and "attention_mask" not in batch
    found = []
    for model in models():
        loss = model(**batch, use_cache=False).loss
        found.append([loss.detach()[None], *torch.autograd.grad(loss, list(model.parameters()))])
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("models", [llamas, mistrals])
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_prefill_in_chunks_gives_eagers_tokens(models: Any, chunk: int) -> None:
    ids = ids_of(16, rows=2)
    found = [
        model.generate(ids, prefill_chunk_size=chunk, attention_mask=torch.ones_like(ids), **GREEDY)
        for model in models()
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("how", ["another model", "the prompt", "itself"])
def test_guessed_tokens_are_accepted_as_under_eager(how: str) -> None:
    ids, found, forwards = ids_of(6).repeat(1, 3), [], []
    for model, helper in zip(llamas(), llamas(seed=5), strict=True):
        options = {"another model": {"assistant_model": helper}, "the prompt": {"prompt_lookup_num_tokens": 4}}
        calls: list[int] = []
        model.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        more = options.get(how, {"assistant_model": copy.deepcopy(model)})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers warns of its own settings
            found.append(model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY, **more))
            alone = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
        forwards.append(len(calls))
        assert torch.equal(found[-1], alone)
    assert torch.equal(*found) and forwards[0] == forwards[1]


@pytest.mark.sweep
def test_continuous_batching_takes_names_of_transformers_only() -> None:
    """Its manager takes "paged|eager", "sdpa" and names that contain "flash", which it then runs on flash-attn's kernels. The refusal
    does not change the model, and what it generates under "sdpa" is what the model generates under lowtri.
    """
    _, model = llamas()
    with pytest.raises(ValueError, match="lowtri is not supported for continuous batching"):
        model.generate_batch(
            [ids_of(5)[0].tolist()], generation_config=tf.GenerationConfig(**GREEDY), progress_bar=False
        )
    assert model.config._attn_implementation == "lowtri"
    prompts = [ids_of(n, seed=n)[0].tolist() for n in (5, 9, 3)]
    expected = [model.generate(torch.tensor([row]), **GREEDY)[0, len(row) :].tolist() for row in prompts]
    model.set_attn_implementation("sdpa")
    found = model.generate_batch(prompts, generation_config=tf.GenerationConfig(**GREEDY), progress_bar=False)
    assert sorted(x.generated_tokens for x in found.values()) == sorted(expected)


@pytest.mark.parametrize(
    ("kind", "config"),
    [(tf.LlamaForCausalLM, tf.LlamaConfig(**SIZE)), (tf.FalconForCausalLM, tf.FalconConfig(**FALCON))],
)
@pytest.mark.filterwarnings("ignore")  # of accelerate, and of loading from a checkpoint
def test_the_trainer_runs_end_to_end(kind: Any, config: Any, tmp_path: Path) -> None:
    rows = [{"input_ids": row, "labels": row} for row in ids_of(10, rows=16)]
    losses, weights = [], []
    for model in two(kind, config):
        options = tf.TrainingArguments(
            output_dir=str(tmp_path / model.config._attn_implementation),
            max_steps=4,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=3,
        )
        trainer = tf.Trainer(model=model, args=options, train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert len(losses[0]) == 4 and losses[0][-1] < losses[0][0]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=1e-3)
    assert (weights[1] - weights[0]).abs().max() < 4e-3  # Adam turns rounding of a gradient near 0 into a whole step


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_trains_under_a_mask(tmp_path: Path) -> None:
    """With window(1) nothing but the last token is seen, so the order of the others does not matter to the logits."""
    _, model = llamas()
    rows = [{"input_ids": row, "labels": row} for row in ids_of(10, rows=8)]
    options = tf.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
    )
    tf.Trainer(model=use(model, mask="window(1)"), args=options, train_dataset=rows).train()
    ids = ids_of(10)
    with torch.no_grad():
        one, other = (model.eval()(x).logits[:, -1] for x in (ids, torch.cat([ids[:, 1:9], ids[:, :1], ids[:, 9:]], 1)))
        torch.testing.assert_close(one, other)
        assert not torch.allclose(one, use(model, mask=None)(ids).logits[:, -1], atol=1e-3)
