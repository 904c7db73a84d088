"""How well a model predicts a text: teacher-forced (all positions at once), as in training, and step by step, as in generation.

With a causal mask the two agree to rounding: each position sees the same keys in both. With a mask that shows later
positions they do not, and generation behaves as the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from lowtri.errors import DataError
from lowtri.generation.models import stepwise_cache
from lowtri.nn.decoder import Decoder
from lowtri.nn.recurrent import RecurrentLM


class Score(NamedTuple):
    """How well every token of a text was predicted from those before it."""

    loss: float  # nats a token
    perplexity: float  # exp(loss)
    bits_per_byte: float  # does not depend on the tokenizer


class Evaluation(NamedTuple):
    """Both ways to predict the same tokens."""

    tokens: int  # predicted ones
    bytes: int  # of the text, in UTF-8
    at_once: Score  # teacher-forced: one forward over each row
    stepwise: Score | None  # a token at a time, with the cache; the true tokens are fed
    greatest_difference: float | None  # of one position's loss between the two, nats
    greatest_logit_difference: float | None


_ROW = 1024  # tokens in a row for a model that has no longest input


@torch.inference_mode()
def evaluate(
    model: Decoder | RecurrentLM,
    texts: Sequence[Sequence[int]],
    size_in_bytes: int,
    *,
    stepwise: bool = True,
    progress: Callable[[int], object] = lambda _: None,
) -> Evaluation:
    """Score a model on texts, each a list of token ids that begins with the model's begin token.

    A text longer than the model's context is cut into rows of that length. Every token but the first is predicted
    once, from the tokens before it in its row.

    Args:
        size_in_bytes: of all texts, in UTF-8, for the bits per byte.
        stepwise: score step by step too, which takes a forward for each position.
        progress: is called with the number of tokens scored so far.

    Raises:
        DataError: if there is nothing to predict.
    """
    was_training = model.training
    model.eval()
    count, losses, difference, logit_difference = 0, [0.0, 0.0], 0.0, 0.0
    context = getattr(model.config, "max_position_embeddings", _ROW)
    for inputs, targets in _rows(texts, context, model.config.vocab_size):
        logits = model(inputs)  # (B, N, V)
        loss_at_once = _losses(logits, targets)  # (B, N)
        losses[0] += loss_at_once.sum().item()
        if stepwise:
            for t, logits_t in enumerate(_steps(model, inputs)):  # (B, V)
                loss = _losses(logits_t, targets[:, t])  # (B,)
                losses[1] += loss.sum().item()
                difference = max(difference, (loss - loss_at_once[:, t]).abs().max().item())
                logit_difference = max(logit_difference, (logits_t - logits[:, t]).abs().max().item())
        count += targets.numel()
        progress(count)
    model.train(was_training)
    if not count:
        raise DataError("there is nothing to predict: the text has no token after the first")
    at_once, by_step = (_score(loss, count, size_in_bytes) for loss in losses)
    compared = (by_step, difference, logit_difference) if stepwise else (None, None, None)
    return Evaluation(count, size_in_bytes, at_once, *compared)


def _rows(texts: Sequence[Sequence[int]], context: int, vocabulary: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets (B, N): full rows of all texts together, several a batch, then each text's last, shorter row."""
    full: list[torch.Tensor] = []
    rest: list[torch.Tensor] = []
    for text in texts:
        for start in range(0, len(text) - 1, context):
            piece = torch.tensor(text[start : start + context + 1])
            (full if len(piece) == context + 1 else rest).append(piece)
    batch = max(1, min(32, 2**26 // (context * vocabulary)))  # the logits of a batch take at most 256 MB
    for start in range(0, len(full), batch):
        rows = torch.stack(full[start : start + batch])
        yield rows[:, :-1], rows[:, 1:]
    for piece in rest:
        yield piece[None, :-1], piece[None, 1:]


def _steps(model: Decoder | RecurrentLM, inputs: torch.Tensor) -> Iterator[torch.Tensor]:
    cache = stepwise_cache(model, inputs.shape[0])
    for position in range(inputs.shape[1]):
        yield model(inputs[:, position : position + 1], cache=cache)[:, 0]  # (B, V)


def _losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    flat = F.cross_entropy(logits.flatten(0, -2).double(), targets.flatten(), reduction="none")
    return flat.view(targets.shape)


def _score(loss: float, count: int, size_in_bytes: int) -> Score:
    mean = loss / count
    return Score(mean, math.exp(min(mean, 700.0)), loss / math.log(2) / max(1, size_in_bytes))
