"""The mask of ``use`` belongs to its model: no other model has it, and copies, wrappers and threads neither lose nor share it."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from lowtri.errors import EngineError
from lowtri.integrations.transformers import switch, use

SIZE: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IDS = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(1))
NARROW, WIDE = "causal & window(2)", "causal & window(5)"
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
GREEDY |= {"attention_mask": torch.ones_like(IDS)}


def llama(config: Any = None, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = tf.LlamaForCausalLM(config or tf.LlamaConfig(**SIZE, initializer_range=0.2))
    return model.eval()


def two_of_one_config() -> tuple[Any, Any]:
    first = switch(llama())
    return first, llama(first.config, seed=1)


@torch.no_grad()
def logits(model: Any, **options: Any) -> Tensor:
    result: Tensor = model(IDS, **options).logits
    return result


def changes(found: Tensor, own: Tensor) -> bool:
    return not torch.allclose(found, own, atol=1e-2)


@pytest.mark.parametrize("switched", [True, False])
def test_a_model_of_the_same_config_keeps_its_own_mask(switched: bool) -> None:
    a, b = two_of_one_config()
    assert a.config is b.config and b.config._attn_implementation == "lowtri"
    b = switch(b) if switched else b
    own = logits(b), b.generate(IDS, **GREEDY, cache_implementation="static")
    use(a, mask=NARROW)
    assert torch.equal(logits(b), own[0])
    assert torch.equal(b.generate(IDS, **GREEDY, cache_implementation="static"), own[1])
    expected = logits(a)
    assert changes(expected, logits(use(a)))
    if switched:
        assert changes(logits(use(b, mask=WIDE)), own[0])
        assert torch.equal(logits(use(a, mask=NARROW)), expected)


@pytest.mark.parametrize("mask", [None, WIDE])
def test_a_model_called_inside_the_forward_of_another_keeps_its_mask(mask: str | None) -> None:
    a, b = two_of_one_config()
    expected = [logits(use(a, mask=NARROW)), logits(use(switch(b), mask=mask))]
    found = []
    a.model.layers[1].register_forward_pre_hook(lambda *_: found.append(logits(b)))
    found.append(logits(a))
    assert torch.equal(found[0], expected[1]) and torch.equal(found[1], expected[0])


def test_generate_uses_the_mask_of_its_model_while_another_has_one() -> None:
    a, b = two_of_one_config()
    for options in ({}, {"cache_implementation": "static"}):
        expected = use(a, mask=NARROW).generate(IDS, **GREEDY, **options)
        use(switch(b), mask=WIDE)
        assert torch.equal(a.generate(IDS, **GREEDY, **options), expected)
        assert not torch.equal(use(a, mask=WIDE).generate(IDS, **GREEDY, **options), expected)


def test_a_decoder_that_is_called_without_its_head_uses_the_mask() -> None:
    model = use(switch(llama()), mask=NARROW)
    with torch.no_grad():
        hidden = model.model(IDS).last_hidden_state
        torch.testing.assert_close(model.lm_head(hidden), logits(model), rtol=0, atol=0)
        assert changes(hidden, use(model).model(IDS).last_hidden_state)


def test_a_model_that_shares_its_decoder_has_its_own_mask() -> None:
    a, b = two_of_one_config()
    own = logits(a)
    b.model, b.lm_head = a.model, a.lm_head
    use(switch(b), mask=NARROW)
    assert torch.equal(logits(a), own) and changes(logits(b), own)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_the_mask_and_then_their_own(how: Any) -> None:
    model = use(switch(llama()), mask=NARROW)
    expected, tokens = logits(model), model.generate(IDS, **GREEDY, cache_implementation="static")
    other = how(model)
    assert torch.equal(logits(other), expected) and torch.equal(logits(other, attention_mask=NARROW), expected)
    assert torch.equal(other.generate(IDS, **GREEDY, cache_implementation="static"), tokens)
    use(other, mask=None)
    assert torch.equal(logits(model), expected) and changes(logits(other), expected)
    with torch.no_grad():
        assert torch.equal(other.model(IDS).last_hidden_state, how(other).model(IDS).last_hidden_state)


def test_a_model_is_freed_without_the_garbage_collector() -> None:
    model = use(switch(llama()), mask=NARROW)
    logits(model)
    alive = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_threads_have_their_own_forwards() -> None:
    a, b = two_of_one_config()
    model, other = switch(a), switch(b)
    calls: list[tuple[Any, dict[str, Any]]] = [
        (model, {}), (model, {"attention_mask": NARROW}), (model, {"attention_mask": WIDE}), (other, {}),
    ]  # fmt: skip
    expected = [logits(one, **options) for one, options in calls]
    found: list[Any] = [None] * len(calls)
    together = threading.Barrier(len(calls), timeout=60)
    for one in (a, b):  # all forwards have begun before any mask is made
        one.model.embed_tokens.register_forward_hook(lambda *_: None if together.wait() >= 0 else 0)

    def run(n: int) -> None:
        found[n] = logits(calls[n][0], **calls[n][1])

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_computed_again_with_the_mask_of_their_forward(reentrant: bool) -> None:
    model = use(switch(llama()), mask=NARROW).train()
    expected = torch.autograd.grad(model(IDS, labels=IDS).loss, list(model.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions call it by another name
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    loss = model(IDS, labels=IDS, use_cache=False).loss
    use(model, mask=None)
    loss.backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-5, atol=1e-6)


def test_an_interrupted_forward_leaves_no_mask_behind() -> None:
    model = switch(llama())
    own = logits(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[0].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(model, attention_mask=NARROW)
    hook.remove()
    assert torch.equal(logits(model), own)
    assert changes(logits(use(model, mask=NARROW)), own)


@pytest.mark.filterwarnings("ignore")  # of a group of one process
def test_wrappers_of_torch_pass_the_mask_on() -> None:
    model, expected = llama(), logits(switch(llama()), attention_mask=NARROW)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        assert use(switch(wrapped), mask=NARROW) is wrapped
        assert torch.equal(logits(wrapped), expected)
    finally:
        torch.distributed.destroy_process_group()
    compiled = torch.compile(model, backend="eager")
    assert use(switch(compiled), mask=WIDE) is compiled  # type: ignore[comparison-overlap]
    assert torch.equal(logits(model), logits(use(model), attention_mask=WIDE))
    with pytest.raises(EngineError, match='use: the model\'s attention is "None"'):
        use(torch.nn.Linear(2, 2), mask=NARROW)
