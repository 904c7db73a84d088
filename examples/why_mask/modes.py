"""The same positions in three modes: all at once as in training, with a cache, and with the prefix recomputed for each token.

Masked training equals inference position by position, to rounding, when each new query reads a key/value cache (then no mask
is needed: what is to come is not there), or when the whole prefix is recomputed *with* the mask. Recomputing the prefix
*without* a mask is equal in a one-layer model only: with more layers, old positions then see newer ones, and the next
layer reads what they saw.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lowtri.generation.models import stepwise_cache
from lowtri.masks import Mask
from lowtri.nn.decoder import Decoder

__all__ = ["Differences", "all_at_once", "differences", "first_layers", "prefix_anew", "with_a_cache"]


class Differences(NamedTuple):
    """The greatest difference of each mode's logits from those of training."""

    cache: float  # a cache, and no mask at all
    prefix_with_mask: float  # the whole prefix anew for each token, with the mask
    prefix_without_mask: float  # the same, where every token of the prefix sees every other


@torch.inference_mode()
def all_at_once(model: Decoder, ids: Tensor) -> Tensor:
    """Logits (B, N, V) of one forward over ids (B, N): teacher forcing."""
    return model(ids)


@torch.inference_mode()
def with_a_cache(model: Decoder, ids: Tensor, mask: Mask | str | None = None) -> Tensor:
    """Logits (B, N, V), token by token: each is computed once and then stands in the cache.

    Args:
        mask: instead of the model's own; "full" is no mask at all.
    """
    cache = stepwise_cache(model, ids.shape[0], mask=mask)
    return torch.cat([model(ids[:, t : t + 1], cache=cache) for t in range(ids.shape[1])], dim=1)


@torch.inference_mode()
def prefix_anew(model: Decoder, ids: Tensor, mask: Mask | str | None = None) -> Tensor:
    """Logits (B, N, V): for each token everything before it is computed again, and only the last logits are kept."""
    ends = range(1, ids.shape[1] + 1)
    return torch.cat([model(ids[:, :end], mask=mask, logits_to_keep=1) for end in ends], dim=1)


def differences(model: Decoder, ids: Tensor) -> Differences:
    """The three figures for a masked model and ids (B, N).

    >>> from lowtri.nn import DecoderConfig
    >>> _ = torch.manual_seed(0)
    >>> model = Decoder(DecoderConfig(vocab_size=20, hidden_size=32, num_hidden_layers=1))
    >>> max(differences(model, torch.arange(12)[None])) < 1e-5  # one layer: all modes agree
    True
    """
    training = all_at_once(model, ids)  # (B, N, V)
    modes = (
        with_a_cache(model, ids, mask="full"),
        prefix_anew(model, ids),
        prefix_anew(model, ids, mask="full"),
    )
    return Differences(*(float((mode - training).abs().max()) for mode in modes))


def first_layers(model: Decoder, layers: int) -> Decoder:
    """A model of the first layers of another, with its embedding, last norm and output map; weights are shared."""
    shorter = Decoder(replace(model.config, num_hidden_layers=layers))
    state = model.state_dict()
    shorter.load_state_dict({name: state[name] for name in shorter.state_dict()}, assign=True)
    return shorter
