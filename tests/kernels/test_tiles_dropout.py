"""Dropout, weights and what keys received in bf16 on tile registers, emulated where the CPU has none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import EPS, draw

import lowtri
from lowtri.backends.cpu import forward, parts
from lowtri.dispatch.prepared import PREPARED
from lowtri.kernels.abi import KEYS
from lowtri.masks.plan import plan

MASKS = ("causal", "causal & window(40)", "full")


@pytest.mark.usefixtures("tiles")
def test_what_is_dropped_on_tiles() -> None:
    for nq, nk in ((64, 96), (70, 131), (33, 200)):
        q, k = torch.zeros(1, 2, nq, 32, dtype=torch.bfloat16), torch.zeros(1, 2, nk, 32, dtype=torch.bfloat16)
        v, found = torch.eye(nk, dtype=torch.bfloat16).expand(1, 2, nk, nk), {}
        for engine in ("cpu", "reference"):
            torch.manual_seed(3)
            found[engine] = lowtri.attention(q, k, v, "full", dropout=0.4, engine=engine) != 0
        assert torch.equal(found["cpu"], found["reference"]), (nq, nk)


@pytest.mark.usefixtures("tiles")
def test_outputs_gradients_weights_and_their_sums_on_tiles() -> None:
    for seed, mask in enumerate(MASKS):
        for n in (40, 200):
            x = [t.requires_grad_() for t in draw(b=1, nq=n, nk=n, d=64, dv=64, seed=seed, dtype="bfloat16")]
            found = {}
            for engine in ("cpu", "reference"):
                torch.manual_seed(seed)
                out = lowtri.attention(*x, mask, dropout=0.3, engine=engine)
                gradients = torch.autograd.grad(out, x, torch.ones_like(out))
                again = {"return_weights": True, "return_received": True, "engine": engine}
                found[engine] = [out, *gradients, *lowtri.attention(*x, mask, **again)[1:]]
            for i, (one, two) in enumerate(zip(found["cpu"], found["reference"], strict=True)):
                # Products on tiles of the emulation round as the CPU's do.
                assert (one - two).abs().max() <= 8 * EPS["bfloat16"] * two.abs().max().clamp(min=1), (mask, n, i)


@pytest.mark.usefixtures("tiles")
def test_gradients_on_tiles_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one part but for rounding: dQ is read again in each round, and transposed."""
    x = [t.requires_grad_() for t in draw(b=1, hq=2, hkv=1, nq=250, nk=400, d=40, dv=24, dtype="bfloat16")]
    rows = parts.Rows(plan(lowtri.causal(), np.arange(150, 400), np.arange(400), tile_k=KEYS), 2)
    cuts = [parts.uncut(rows), *(parts.with_fewest_rounds(rows, *parts.folded(8, 4), most) for most in (1000, 0))]
    assert [cut.rounds for cut in cuts if cut is not None] == [1, 1, 4]
    results = []
    for cut in cuts:
        monkeypatch.setattr(forward, "choose_cut", lambda *call, cut=cut: cut)
        PREPARED.clear()
        out = lowtri.attention(*x, "causal", engine="cpu")
        results.append(torch.autograd.grad(out, x, torch.ones_like(out)))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert (one - two).abs().max() <= 8 * EPS["bfloat16"] * one.abs().max()
