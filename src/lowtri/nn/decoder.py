"""A Llama-style decoder language model.

    ids -> embedding -> layers of (RMSNorm, attention, RMSNorm, SwiGLU), each added to its input -> RMSNorm -> logits

Parameters have Llama's names, so a ``state_dict`` can be exchanged with transformers' ``LlamaForCausalLM``.
"""

from __future__ import annotations

import math
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
from lowtri.nn.config import DecoderConfig
from lowtri.nn.fixed import Fixed
from lowtri.nn.multi_head import MultiHeadAttention
from lowtri.nn.rotary import rotary_tables

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from lowtri.nn.cache import Cache

__all__ = ["Decoder", "DecoderConfig", "embedded"]


class Decoder(nn.Module):
    """A decoder-only language model: token ids to logits, with or without a key/value cache.

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

    Weights are initialised as Llama's, normal with standard deviation 0.02; projections into the residual stream are scaled by
    1 / sqrt(2 layers), so that its variance does not grow with depth (Radford et al. 2019).

    Source: Touvron et al. 2023; RMSNorm, Zhang and Sennrich 2019; SwiGLU, Shazeer 2020; rotary, Su et al. 2021.
    """

    config: Fixed[DecoderConfig] = Fixed("Decoder(config), or from_pretrained(path, mask=...)")
    mask: Fixed[Mask] = Fixed("from_pretrained(path, mask=...), or mask= in the call or in make_cache()")

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tokenizer: Tokenizer | None = None  # set by from_pretrained
        self.mask = as_mask(config.mask)
        self.model = self._body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * config.num_hidden_layers) if residual else 1))
            elif name.endswith(".bias"):
                nn.init.zeros_(weight)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        ids: Tensor,
        *,
        mask: Mask | str | None = None,
        positions: Any = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Next-token logits.

        Args:
            ids: (B, N) int64.
            mask: for this call, instead of the model's own; for packed documents ``causal() & documents(ids)``.
            positions: positions in the sequence, (N,) or (B, N), -1 for padding; default 0 .. N-1, or the next in the cache.
            cache: from :meth:`make_cache`; ``ids`` then holds the new tokens only, which are appended to the cache.
            logits_to_keep: compute the logits of this many last tokens; 0 computes all.

        Returns:
            (B, N, V); the rows at padding are undefined.

        Raises:
            CallError: if ids have another shape or dtype, or are outside of the vocabulary or the context.
        """
        if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise CallError(f"Decoder: ids are {tuple(ids.shape)} {ids.dtype}; expected (B, N) int64. Fix: ids[None].")
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
        mask = cache.mask if cache is not None else self.mask if mask is None else as_mask(mask)
        x = self.model(ids, mask, positions, cache)  # (B, N, hidden)
        return self.lm_head(x[:, -logits_to_keep:])

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: torch.dtype | str | None = None, mask: Mask | str | None = None
    ) -> Decoder:
        """Load a checkpoint folder in transformers' format (Llama, Mistral, Qwen2, Qwen3, SmolLM, GPT-2), a GGUF file, or the
        weights of an installed package (``"smollm2"``, ``"glassllm"``).

        Weights keep their stored dtype; GGUF weights are dequantised to float32 once and kept in the user's cache folder.
        ``model.tokenizer`` is the checkpoint's tokenizer, or None.

        >>> import tempfile
        >>> from lowtri.nn.checkpoint import save
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(Decoder(DecoderConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1)), folder)
        ...     model = Decoder.from_pretrained(folder, dtype="bfloat16", mask="causal & window(64)")
        >>> model.lm_head.weight.dtype, model.mask
        (torch.bfloat16, causal & window(64))

        Args:
            path: a folder with config.json and model.safetensors (or its shards), a file ``*.gguf``, or a package's name.
            dtype: convert the weights to this torch dtype, or its name.
            mask: replaces the mask that the checkpoint declares.

        Raises:
            DataError: if a file is missing or damaged, or describes an unsupported model; the message names the key.
        """
        from lowtri.nn.pretrained import read

        return read(path, dtype, mask)

    def make_cache(
        self, batch_size: int = 1, *, mask: Mask | str | None = None, capacity: int = 0, allow_missing: bool = False
    ) -> KVCache:
        """An empty key/value cache for ``batch_size`` sequences.

        Args:
            mask: instead of the model's own.
            capacity: initial number of slots; the cache grows as needed.
            allow_missing: as in :class:`lowtri.KVCache`: allow queries before keys that the mask shows them.
        """
        chosen = self.mask if mask is None else as_mask(mask)
        if batch_size < 1 or (chosen.batch and chosen.batch[0] not in (1, batch_size)):
            raise CallError(
                f"make_cache: batch_size is {batch_size}, and the mask {chosen!r} has batch {chosen.batch}."
            )
        return KVCache(chosen, capacity=capacity, allow_missing=allow_missing)

    def _body(self, config: DecoderConfig) -> Any:
        """The layers below the output projection."""
        return _Body(config)

    def _check_context(self, n: int, positions: NDArray[np.int64] | None) -> None:
        end = n if positions is None else int(positions.max(initial=-1)) + 1
        limit = self.config.max_position_embeddings
        if end > limit:
            raise CallError(
                f"Decoder: the last position is {end - 1}, but the context has {limit} positions (0 .. {limit - 1}).\n"
                f"Fix: keep the last {limit} ids, or a model with a larger max_position_embeddings."
            )


class _Body(nn.Module):
    """Everything below the output projection; ``model`` in a checkpoint."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids: Tensor, mask: Mask, positions: NDArray[np.int64] | None, cache: Cache | None) -> Tensor:
        x = embedded(ids, self.embed_tokens)  # (B, N, hidden)
        c = self.config
        at = np.arange(ids.shape[1]) if positions is None else positions
        rotary = rotary_tables(at, c.head_dim, c.rope_theta, c.rope_scaling, device=x.device)
        for index, layer in enumerate(self.layers):
            x = layer(x, mask=mask, positions=positions, cache=cache, layer=index, rotary=rotary)
        return self.norm(x)


class _Layer(nn.Module):
    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        rotary = config.rope_layers is None or config.rope_layers[index]
        self.self_attn = MultiHeadAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim=config.head_dim,
            mask=config.mask,
            rope_theta=config.rope_theta if rotary else None,
            rope_scaling=config.rope_scaling,
            bias=config.qkv_bias,
            out_bias=config.o_bias,
            qk_norm=config.rms_norm_eps if config.qk_norm else None,
        )
        self.mlp = _SwiGLU(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), **options)
        return x + self.mlp(self.post_attention_layernorm(x))


class _SwiGLU(nn.Module):
    def __init__(self, size: int, width: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, width, bias=bias)
        self.up_proj = nn.Linear(size, width, bias=bias)
        self.down_proj = nn.Linear(width, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def embedded(ids: Tensor, table: nn.Embedding) -> Tensor:
    """Embeddings (B, N, hidden) of ids (B, N)."""
    try:
        return table(ids)
    except IndexError:
        raise CallError(
            f"Decoder: ids reach from {int(ids.min())} to {int(ids.max())}, but the vocabulary has the ids "
            f"0 .. {table.num_embeddings - 1}. Fix: the tokenizer that the model was trained with."
        ) from None
