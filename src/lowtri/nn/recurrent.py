"""A recurrent language model: LSTM, GRU or plain RNN.

It is autoregressive by construction. It has the decoder's interface, so training, ``generate`` and the audit work unchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lowtri.errors import CallError
from lowtri.masks import Mask, as_mask
from lowtri.masks.arrays import positions_in_numpy
from lowtri.masks.label_masks import check_packed_totals
from lowtri.nn.config import RecurrentConfig, check_not_set
from lowtri.nn.folders import load_folder, save_folder


class RecurrentState:
    """The recurrent state of each row; the ``cache`` of a :class:`RecurrentLM`. Its size does not depend on the length."""

    def __init__(self, hidden: tuple[Tensor, ...] | None, batch: int) -> None:
        self.hidden = hidden  # (layers, B, hidden_size) each; None before the first token
        self.batch = batch
        self.last = np.full(batch, -1)  # the position of each row's newest token

    @property
    def length(self) -> int:
        """The next position; the greatest over the rows."""
        return int(self.last.max()) + 1

    @property
    def bytes(self) -> int:
        """Memory of the state, constant."""
        return sum(part.numel() * part.element_size() for part in self.hidden or ())

    def next_positions(self, n: int, layer: int = 0) -> NDArray[np.int64]:
        """Positions of the next ``n`` tokens, (B, n)."""
        return np.asarray(self.last[:, None] + 1 + np.arange(n))

    def reorder(self, index: Any) -> None:
        """Row ``i`` continues from row ``index[i]``."""
        rows = torch.as_tensor(np.asarray(index), dtype=torch.long)
        if self.hidden is not None:
            self.hidden = tuple(part[:, rows.to(part.device)] for part in self.hidden)
        self.last = self.last[rows.numpy()]
        self.batch = len(rows)


class RecurrentLM(nn.Module):
    """An LSTM, GRU or plain recurrent language model, from token ids to logits, with or without a cache.

    >>> import torch
    >>> from lowtri.nn.recurrent import RecurrentLM
    >>> _ = torch.manual_seed(0)
    >>> model = RecurrentLM(50, 32, cell="gru")
    >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
    >>> model(ids).shape
    torch.Size([1, 5, 50])
    >>> cache = model.make_cache()  # the same, token by token
    >>> steps = [model(ids[:, t : t + 1], cache=cache) for t in range(5)]
    >>> torch.allclose(torch.cat(steps, 1), model(ids), atol=1e-6)
    True

    Args:
        vocab_size: number of tokens.
        hidden_size: size of the embeddings and of the hidden state.
        num_hidden_layers: number of layers.
        cell: "lstm" (Hochreiter and Schmidhuber 1997), "gru" (Cho et al. 2014) or "rnn" (Elman 1990).
        tie_word_embeddings: whether the output projection shares the embedding's weights.

    Raises:
        CallError: if a size or the cell's name is invalid.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int = 256,
        *,
        num_hidden_layers: int = 2,
        cell: str = "lstm",
        tie_word_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.config = RecurrentConfig(vocab_size, hidden_size, num_hidden_layers, cell, tie_word_embeddings)
        self.mask = as_mask("causal")
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.cells = getattr(nn, cell.upper())(hidden_size, hidden_size, num_hidden_layers, batch_first=True)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.tie_weights()

    def __setattr__(self, name: str, value: Any) -> None:
        check_not_set(self, name, {"config": "RecurrentLM.from_config(config)"})
        super().__setattr__(name, value)

    def tie_weights(self) -> None:
        """Share the embedding's weights with the output projection, if the configuration says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    @classmethod
    def from_config(cls, config: RecurrentConfig) -> RecurrentLM:
        """A newly initialised model."""
        return cls(**{name: value for name, value in vars(config).items() if name != "mask"})

    def save(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors, each atomically; tied weights once. A tokenizer is saved by its own library.

        Args:
            folder: created if it is missing.

        Raises:
            DataError: if a file cannot be written.
        """
        save_folder(folder, self.config, self.state_dict())

    @classmethod
    def load(cls, folder: str | Path) -> RecurrentLM:
        """A model from a folder that :meth:`save` wrote, in evaluation mode, with weights in the dtype in which they were saved.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     RecurrentLM(50, 32, cell="gru").save(folder)
        ...     RecurrentLM.load(folder).config.cell
        'gru'

        Raises:
            DataError: if a file is missing, damaged or of another model; the message names it.
        """
        return load_folder(folder, "lowtri_recurrent", cls.from_config)

    def make_cache(self, batch_size: int = 1, *, mask: Mask | str | None = None, capacity: int = 0) -> RecurrentState:
        """An empty state for ``batch_size`` sequences.

        ``mask`` and ``capacity`` exist for compatibility with :meth:`Decoder.make_cache`: the mask can only be causal.
        """
        if mask is not None and as_mask(mask) != self.mask:
            raise CallError(
                f"make_cache: the mask is {as_mask(mask)!r}, but a recurrent model is causal. Fix: no mask here."
            )
        if batch_size < 1:
            raise CallError(f"make_cache: batch_size is {batch_size}; at least 1.")
        return RecurrentState(None, batch_size)

    def forward(
        self,
        ids: Tensor,
        *,
        mask: Mask | str | None = None,
        positions: Any = None,
        cache: RecurrentState | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Next-token logits.

        Args:
            ids: (B, N) int64.
            mask: ``causal``, or ``causal & documents(...)``, which resets the state at the start of each document.
            positions: (N,) or (B, N); -1 is padding, which leaves the state unchanged; 0 starts a new document.
            cache: from :meth:`make_cache`; ``ids`` then holds the new tokens only.
            logits_to_keep: compute the logits of only this many last tokens; 0 computes all.

        Returns:
            (B, N, V); the rows at padding are undefined.

        Raises:
            CallError: if ids are not (B, N) integers, or the mask is neither of these.
        """
        if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise CallError(
                f"RecurrentLM: ids are {tuple(ids.shape)} {ids.dtype}; expected (B, N) int64.\n"
                "Fix: ids[None] of one row (N,); ids.long() of another dtype."
            )
        batch, n = ids.shape
        cache = cache if cache is not None else self.make_cache(batch)
        if cache.batch != batch:
            raise CallError(f"RecurrentLM: ids have {batch} rows, the cache {cache.batch}. Fix: make_cache({batch}).")
        if positions is None:
            positions = cache.next_positions(n)
        positions = np.broadcast_to(
            positions_in_numpy("RecurrentLM: positions", positions, "(N,) or (B, N)"), (batch, n)
        )
        reset = (positions == 0) | _document_starts(mask, batch, n)
        x = self._run(self.embed_tokens(ids), reset, positions < 0, cache)
        cache.last = np.maximum(cache.last, positions.max(axis=1, initial=-1))
        return self.lm_head(x[:, -logits_to_keep:])

    def _run(self, x: Tensor, reset: NDArray[np.bool_], pad: NDArray[np.bool_], state: RecurrentState) -> Tensor:
        """Run the cells over segments in which no row is reset and the same rows are padding."""
        lstm = isinstance(self.cells, nn.LSTM)
        if state.hidden is None:
            layers = self.cells.num_layers * (1 + self.cells.bidirectional)
            zeros = x.new_zeros(layers, x.shape[0], self.cells.hidden_size)
            state.hidden = (zeros, zeros) if lstm else (zeros,)
        cut = np.asarray(reset.any(axis=0))
        cut[1:] |= (pad[:, 1:] != pad[:, :-1]).any(axis=0)
        starts = sorted({0, *np.flatnonzero(cut).tolist()})
        outputs = []
        for start, stop in zip(starts, [*starts[1:], x.shape[1]], strict=True):
            old = tuple(_where(reset[:, start], torch.zeros_like(part), part) for part in state.hidden)
            output, new = self.cells(x[:, start:stop], old if lstm else old[0])
            new = new if lstm else (new,)
            state.hidden = tuple(_where(pad[:, start], before, after) for before, after in zip(old, new, strict=True))
            outputs.append(output)
        return torch.cat(outputs, dim=1)


def _where(rows: NDArray[np.bool_], x: Tensor, y: Tensor) -> Tensor:
    """Of (layers, B, hidden): these rows of ``x``, the others of ``y``."""
    if not rows.any():
        return y
    return torch.where(torch.from_numpy(np.ascontiguousarray(rows)).to(y.device)[None, :, None], x, y)


def _document_starts(mask: Mask | str | None, batch: int, n: int) -> NDArray[np.bool_]:
    """Where each row starts another document, (B, N): where the mask hides the previous position."""
    starts = np.zeros((batch, n), bool)
    if mask is None or n == 0:
        return starts
    mask = as_mask(mask)
    check_packed_totals("RecurrentLM", mask, n)
    table = np.asarray(mask.dense(n))  # (N, N) or (B, N, N)
    if table.ndim > 3 or (table.ndim == 3 and table.shape[0] not in (1, batch)):
        raise CallError(f"RecurrentLM: mask {mask!r} has batch {mask.batch}, the ids have {batch} rows and no heads.")
    table = np.broadcast_to(table, (batch, n, n))
    starts[:, 1:] = ~np.diagonal(table, -1, axis1=1, axis2=2)
    document = starts.cumsum(axis=1)
    causal_documents = (document[:, :, None] == document[:, None, :]) & np.tri(n, dtype=bool)
    if not np.array_equal(table, causal_documents):
        raise CallError(
            f"RecurrentLM: a recurrent model cannot follow the mask {mask!r}: it sees the whole past of a document.\n"
            "Fix: causal, causal & documents(...), or a Decoder."
        )
    return starts
