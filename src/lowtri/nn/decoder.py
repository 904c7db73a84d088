"""A decoder-only language model, with Llama's layers or GPT-2's.

Parameters have Llama's names, so a ``state_dict`` can be exchanged with transformers' ``LlamaForCausalLM``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lowtri.errors import CallError
from lowtri.generation.cache import KVCache
from lowtri.masks import Mask, as_mask
from lowtri.masks.arrays import positions_in_numpy
from lowtri.nn.attention import Body
from lowtri.nn.config import DecoderConfig, check_not_set
from lowtri.nn.folders import load_folder, save_folder

if TYPE_CHECKING:
    from lowtri.nn.attention import Cache

_FIXES = {
    "config": "Decoder(config), or Decoder.load(folder, mask=...)",
    "mask": "Decoder.load(folder, mask=...), or mask= in the call or in make_cache()",
}


class Decoder(nn.Module):
    """A decoder-only language model, from token ids to logits, with or without a key/value cache.

    Its layers are those of Llama, or those of GPT-2 for a :class:`~lowtri.nn.GPT2Config`.

    >>> import torch
    >>> from lowtri.nn import Decoder, DecoderConfig
    >>> _ = torch.manual_seed(0)
    >>> model = Decoder(DecoderConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2))
    >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
    >>> model(ids).shape
    torch.Size([1, 5, 50])
    >>> cache = model.make_cache()  # the same, token by token
    >>> steps = [model(ids[:, t : t + 1], cache=cache) for t in range(5)]
    >>> torch.allclose(torch.cat(steps, 1), model(ids), atol=1e-5)
    True

    Weights are initialised as in Llama, normal with standard deviation 0.02; projections into the residual stream are scaled by
    1 / sqrt(2 layers), so that its variance does not grow with depth (Radford et al. 2019).

    Source: Touvron et al. 2023; RMSNorm, Zhang and Sennrich 2019; SwiGLU, Shazeer 2020; rotary, Su et al. 2021.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tokenizer: Any = None  # of prompts given as text, for lowtri.generate
        self.mask = as_mask(config.mask)
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.init_weights()
        self.tie_weights()

    def __setattr__(self, name: str, value: Any) -> None:
        check_not_set(self, name, _FIXES)
        super().__setattr__(name, value)

    def forward(
        self,
        ids: Tensor,
        *,
        mask: Mask | str | None = None,
        positions: Any = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
        attend: Callable[..., Any] | None = None,
    ) -> Tensor:
        """Next-token logits.

        Args:
            ids: (B, N) int64.
            mask: replaces the model's own mask in this call; for packed documents ``causal() & documents(ids)``.
            positions: positions in the sequence, (N,) or (B, N), -1 for padding; default 0 .. N-1, or the next ones in the cache.
            cache: from :meth:`make_cache`; ``ids`` then holds the new tokens only, which are appended to the cache.
            attend: a function with the arguments of :func:`lowtri.attention`, called instead of it in every layer;
                ``ContextParallel.attend`` where other processes hold the rest of the sequence, with ``positions``.
            logits_to_keep: compute the logits of only this many last tokens; 0 computes all.

        Returns:
            (B, N, V); the rows at padding are undefined.

        Raises:
            CallError: if ids have another shape or dtype, or are outside the vocabulary, or exceed the context length.
        """
        if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise CallError(
                f"Decoder: ids are {tuple(ids.shape)} {ids.dtype}; expected (B, N) int64.\n"
                "Fix: ids[None] of one row (N,); ids.long() of another dtype."
            )
        if cache is not None and mask is not None and as_mask(mask) != cache.mask:
            raise CallError(
                f"Decoder: mask {as_mask(mask)!r} differs from the mask of the cache, {cache.mask!r}.\n"
                "Fix: make_cache(batch_size, mask=...), and no mask here."
            )
        if positions is not None:
            positions = positions_in_numpy("Decoder: positions", positions, "(N,) or (B, N)")
        elif cache is not None:
            positions = cache.next_positions(ids.shape[1])
        self._check_context(ids.shape[1], positions)
        if cache is not None:
            mask = cache.mask
        elif mask is None:
            mask = self.mask
        else:
            mask = as_mask(mask)
        x = self.model(ids, mask, positions, cache, attend)  # (B, N, hidden)
        return self.lm_head(x[:, -logits_to_keep:])

    def save(self, folder: str | Path) -> None:
        """Write config.json (the sizes, and the mask's text) and model.safetensors, each atomically; tied weights once.

        A tokenizer is saved beside them by its own library: ``tokenizer.save(f"{folder}/tokenizer.json")``, or ``save_pretrained``.

        Args:
            folder: created if it is missing.

        Raises:
            DataError: if a file cannot be written.
        """
        save_folder(folder, self.config, self.state_dict())

    @classmethod
    def load(cls, folder: str | Path, *, mask: Mask | str | None = None) -> Decoder:
        """A model from a folder that :meth:`save` wrote, in evaluation mode, with weights in the dtype in which they were saved.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Decoder(DecoderConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1)).save(folder)
        ...     model = Decoder.load(folder, mask="causal & window(64)")
        >>> model.config.hidden_size, model.mask
        (32, causal & window(64))

        Args:
            folder: with config.json and model.safetensors.
            mask: replaces the mask that was saved.

        Raises:
            DataError: if a file is missing, damaged or of another model; the message names it.
        """
        return load_folder(folder, "lowtri_decoder", cls, mask=mask)

    def make_cache(
        self, batch_size: int = 1, *, mask: Mask | str | None = None, capacity: int = 0, allow_missing: bool = False
    ) -> KVCache:
        """An empty key/value cache for ``batch_size`` sequences.

        Args:
            mask: replaces the model's own mask.
            capacity: initial number of slots; the cache grows as needed.
            allow_missing: as in :class:`lowtri.KVCache`: allow queries before keys that the mask shows them.
        """
        mask = self.mask if mask is None else as_mask(mask)
        if batch_size < 1 or (mask.batch and mask.batch[0] not in (1, batch_size)):
            raise CallError(f"make_cache: batch_size is {batch_size}, and the mask {mask!r} has batch {mask.batch}.")
        return KVCache(mask, capacity=capacity, allow_missing=allow_missing)

    def init_weights(self) -> None:
        """Draw the weights anew: after ``to_empty`` of a model that was made under ``torch.device("meta")``."""
        for name, weight in self.named_parameters():
            self.init_weight(name, weight)

    def init_weight(self, name: str, weight: Tensor) -> None:
        """Draw one weight anew. One after the other, in the order of ``named_parameters``, they are those of :meth:`init_weights`."""
        if weight.is_meta:  # there is nothing to draw
            return
        if weight.ndim == 2:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * self.config.num_hidden_layers) if residual else 1))
        elif name.endswith(".bias"):
            nn.init.zeros_(weight)
        else:  # norms
            nn.init.ones_(weight)

    def tie_weights(self) -> None:
        """Share the embedding's weights with the output projection, if the configuration says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _check_context(self, n: int, positions: NDArray[np.int64] | None) -> None:
        end = n if positions is None else int(positions.max(initial=-1)) + 1
        limit = self.config.max_position_embeddings
        if end > limit:
            raise CallError(
                f"Decoder: the last position is {end - 1}, but the context has {limit} positions (0 .. {limit - 1}).\n"
                f"Fix: keep the last {limit} ids, or a model with a larger max_position_embeddings."
            )
