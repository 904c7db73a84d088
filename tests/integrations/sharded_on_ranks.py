"""Functions of test_transformers_sharded that run on each rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from lowtri.integrations.transformers import switch, use
from lowtri.parallel import ContextParallel, plan_shards

N, VOCABULARY = 320, 99


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes, **options)
    return LlamaForCausalLM(config)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that can be learnt, and their labels, of which very many are ignored on some processes."""
    source = torch.Generator().manual_seed(step)
    ids = torch.randint(7, (2, 1), generator=source) + torch.arange(N) * torch.randint(1, 4, (2, 1), generator=source)
    labels = ids % VOCABULARY
    labels[:, 10 * step % 100 : 200] = -100
    return ids % VOCABULARY, labels


def curve(context: ContextParallel | None, mask: Any, steps: int, **options: Any) -> list[float]:
    """The losses of a few steps, on this process or on all."""
    model = switch(llama(**options).train())
    if options:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    model = use(model, mask=mask, context_parallel=context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        ids, labels = batch(step)
        loss = model(ids, labels=labels, **({} if context else {"use_cache": False})).loss
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        if context is not None:
            dist.all_reduce(total, group=context.group)
            for weight in model.parameters():
                dist.all_reduce(weight.grad, group=context.group)
        optimizer.step()
        losses.append(float(total))
    return losses


def sharded_curve(group: Any, mask: Any, steps: int, given: bool, options: dict[str, Any]) -> list[float]:
    context = ContextParallel(plan_shards(mask, N, dist.get_world_size(group), block=64), group)
    return curve(context, mask if given else None, steps, **options)


def own_tokens(group: Any) -> dict[str, float]:
    """The greatest differences of logits from those of one process, however the arguments come."""
    context = ContextParallel(plan_shards("causal", N, dist.get_world_size(group), block=64), group)
    model, (ids, labels) = switch(llama().eval()), batch(0)
    whole = model(ids, labels=labels)
    expected = context.shard(whole.logits.detach())
    use(model, context_parallel=context)
    mine = context.shard(ids)
    targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    count = int((targets != -100).sum())
    positions = torch.arange(N)[None].expand(2, -1)
    outputs = {
        "whole": model(ids, labels=labels),
        "own": model(
            mine, labels=context.shard(targets), shift_labels=context.shard(targets), num_items_in_batch=count
        ),
        "positional": model(ids, torch.ones(2, N), positions, labels=labels),
        "embeddings": model(inputs_embeds=model.get_input_embeddings()(mine)),
    }
    difference = {name: float((output.logits - expected).abs().max()) for name, output in outputs.items()}
    for name, output in outputs.items():
        if output.loss is not None:
            total = output.loss.detach().clone()
            dist.all_reduce(total, group=group)
            difference[f"loss {name}"] = float(total - whole.loss.detach())
    use(model)
    difference["afterwards"] = float((model(ids).logits - whole.logits).abs().max())
    return difference


class Limited(LlamaForCausalLM):
    """A model whose forward takes no other arguments."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None) -> Any:
        return super().forward(input_ids, attention_mask, position_ids, use_cache=False)


def wrong(group: Any) -> dict[str, str]:
    """The errors of forwards, each of which every rank must raise, also where one rank alone is wrong."""
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    context = ContextParallel(plan_shards("causal", N, dist.get_world_size(group), block=64), group)
    model, (ids, labels) = switch(llama().eval()), batch(0)
    dropout = use(switch(llama(attention_dropout=0.1).train()), context_parallel=context)
    limited = use(switch(Limited(model.config).eval()), context_parallel=context)
    padded = torch.ones(2, N)
    padded[0, 0] = 0
    windowed = ContextParallel(plan_shards("causal & window(50)", N, dist.get_world_size(group), block=64), group)
    tiny = ContextParallel(plan_shards("causal", 50, dist.get_world_size(group), block=64), group)
    calls = {
        "length": lambda: model(ids[:, : N - last]),
        "padding": lambda: model(ids, attention_mask=padded if last else None),
        "labels": lambda: model(ids, labels=labels[:, :-1] if last else labels),
        "cache": lambda: model(ids, use_cache=last),
        "mask": lambda: model(ids, attention_mask="full" if last else None),
        "logits to keep": lambda: model(ids, logits_to_keep=1),
        "logits to keep on one": lambda: model(ids, logits_to_keep=torch.tensor([3]) if last else 0),
        "a list of labels": lambda: model(ids, labels=labels.tolist() if last else labels),
        "text of a mask": lambda: model(ids, attention_mask="causal & widow(3)" if last else None),
        "another argument": lambda: limited(ids, **({"label": labels} if last else {})),
        "position_ids": lambda: model(ids, position_ids=[1] if last else None),
        "mask as a list": lambda: model(ids, attention_mask=[1] if last else None),
        "no ids": lambda: model(None if last else ids),
        "a token that is too large": lambda: model(ids + 50 * last),
        "a label that is too large": lambda: model(ids, labels=labels + 50 * last),
        "a number of items": lambda: model(ids, labels=labels, num_items_in_batch="2" if last else 2),
        "generate": lambda: model.generate(ids, max_new_tokens=1),
        "dropout": lambda: dropout(ids),
        "weights": lambda: model(ids, output_attentions=True),
        "own mask": lambda: use(model, context_parallel=windowed)(ids),
        "documents": lambda: model(ids, position_ids=(torch.arange(N) % 100)[None]),
        "no tokens": lambda: use(model, context_parallel=tiny),
        "not in the plan": lambda: use(model, mask="causal", context_parallel=windowed),
    }
    messages = {}
    for name, call in calls.items():
        use(model, context_parallel=context)
        try:
            call()
            messages[name] = "no error"
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
    use(model, context_parallel=context)(ids)  # afterwards everything still works
    return messages
