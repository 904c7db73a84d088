"""Models of transformers whose sequences are spread over processes learn what they learn on one."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from sharded_on_ranks import curve, llama, own_tokens, sharded_curve, wrong

from lowtri.errors import CallError, EngineError
from lowtri.integrations.transformers import switch, use
from lowtri.masks import causal, documents, window


def check(ranks: Ranks, size: int, mask: Any, steps: int, given: bool = True, **options: Any) -> None:
    expected = curve(None, mask if given else None, steps, **options)
    assert expected[-1] < expected[0] - 0.1 or steps < 5, "it learns"
    results = ranks.run(sharded_curve, mask, steps, given, options, size=size)
    for losses in results:
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_twenty_steps_on_two_processes_give_the_losses_of_one(ranks: Ranks) -> None:
    check(ranks, 2, "causal", 20, given=False)


def test_a_given_mask_on_four_processes(ranks: Ranks) -> None:
    check(ranks, 4, causal() & window(90) & documents(lengths=[100, 120, 100]), 3)


@pytest.mark.sweep
def test_sweep_gradient_checkpointing_and_other_numbers_of_processes(ranks: Ranks) -> None:
    check(ranks, 2, "causal", 20, given=False, attention_dropout=0.0)  # options: with gradient checkpointing
    check(ranks, 3, causal() & documents(lengths=[33, 200, 87]), 20)


def test_whole_sequences_or_own_tokens(ranks: Ranks) -> None:
    for difference in ranks.run(own_tokens, size=2):
        assert max(map(abs, difference.values())) < 1e-5, difference


def test_errors_come_on_every_rank(ranks: Ranks) -> None:
    words = {
        "length": r"input_ids is \(2, 319\).*the plan has 320 tokens.*context.shard",
        "padding": "hides keys.*keys\\(valid\\)",
        "labels": r"labels are \(2, 319\).*labels of the whole sequence, \(B, 320\)",
        "cache": "got use_cache.*use_cache=False",
        "mask": "mask is full, but the plan was made for causal",
        "logits to keep": "got logits_to_keep.*context.positions",
        "logits to keep on one": "got logits_to_keep.*context.positions",
        "a list of labels": r"labels are list. Fix: a tensor \(B, 320\)",
        "text of a mask": "MaskError: .*widow",
        "another argument": "unexpected keyword argument 'label'",
        "position_ids": "position_ids is list",
        "mask as a list": "attention_mask is list",
        "no ids": "Error: .*input_ids",
        "a token that is too large": "IndexError: index out of range",
        "a label that is too large": "IndexError: Target .* out of bounds",
        "a number of items": "TypeError: .*str",
        "generate": ", but the keys of a cache",
        "dropout": "dropout.*attention_dropout=0",
        "weights": "output_attentions",
        "own mask": r"has the mask causal, but the plan was made for causal & window\(50\)",
        "documents": "position_ids jump.*documents\\(ids\\)",
        "no tokens": "gives some of 2 ranks none.*Fix: fewer ranks",
        "not in the plan": "mask is causal, but the plan",
    }
    for messages in ranks.run(wrong, size=2):
        assert messages.keys() == words.keys()
        for name, message in messages.items():
            assert re.search(words[name], message, re.S), (name, message)


def test_models_that_cannot_be_spread() -> None:
    import transformers

    with pytest.raises(CallError, match=r"context_parallel is str.\nFix: lowtri.parallel.ContextParallel\(plan\)"):
        use(switch(llama()), context_parallel="causal")  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="Fix: switch\\(model\\) first"):
        use(llama(), context_parallel="causal")  # type: ignore[arg-type]
    assert torch.is_tensor(use(switch(llama()))(torch.ones(1, 4, dtype=torch.long)).logits)
    assert transformers.__version__
