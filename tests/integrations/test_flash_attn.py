"""flash-attn's functions on lowtri: its test matrix beside a plain float64 reference, forward and backward."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from flash_reference import attend, batch, rotated, visible
from torch import Tensor

import lowtri
from lowtri.errors import CallError
from lowtri.integrations import flash_attn as ours
from lowtri.integrations.flash_attn.bert_padding import index_first_axis, pad_input, unpad_input

WINDOWS = [(-1, -1), (3, 0), (2, 4), (-1, 2), (5, -1), (0, 0)]


def test_the_reference_draws_the_picture_of_flash_attn() -> None:
    """
    visible(6, 6, False, (2, 1)):

        ██····
        ███···
        ████··
        ·████·
        ··████
        ···███
    """
    lines = str(test_the_reference_draws_the_picture_of_flash_attn.__doc__).split()
    drawn = [[square == "█" for square in line] for line in lines if set(line) == {"█", "·"}]
    assert visible(6, 6, False, (2, 1)).tolist() == drawn


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(output: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Within 2 ulp of the largest value, as in the precision contract, times a few for sums of 64 terms."""
    worst = (output.double() - expected.double()).nan_to_num(0).abs().max() if output.numel() else 0
    same = output.isfinite() == expected.isfinite()
    return bool(same.all()) and bool(
        worst <= 16 * torch.finfo(dtype).eps * max(1.0, expected.nan_to_num(0, 0, 0).abs().max())
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("nq", "nk"), [(1, 7), (9, 9), (4, 9), (9, 4)])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
def test_every_mask_and_group(causal, window, nq, nk, heads):
    q, k, v = draw(2, nq, heads[0], 8), draw(2, nk, heads[1], 8, seed=1), draw(2, nk, heads[1], 8, seed=2)
    expected, lse = batch(q, k, v, causal=causal, window_size=window)
    output, found, weights = ours.flash_attn_func(q, k, v, causal=causal, window_size=window, return_attn_probs=True)
    assert output.is_contiguous()
    assert close(output, expected)
    assert close(found, lse)
    assert found.dtype == torch.float32
    assert weights.numel() == 0
    if nq == nk and heads[0] == heads[1]:
        packed = ours.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), causal=causal, window_size=window)
        assert close(packed, output)
    packed = ours.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=causal, window_size=window)
    assert close(packed, output)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 3)},
    "softcap": {"causal": True, "softcap": 1.5, "softmax_scale": 0.7},
    "alibi": {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0])},
    "alibi both ways": {"alibi_slopes": torch.tensor([[0.5, 0.25, 0.125, 0.0], [1.0, 0.1, 0.2, 0.3]])},
    "alibi window": {"window_size": (4, 6), "softcap": 5.0, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0])},
}


def edges(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("of_q", "of_k", "extra"),
    [
        ([5, 1, 7], [5, 1, 7], 0),
        ([5, 1, 7], [5, 1, 7], 3),
        ([2, 0, 3, 6], [9, 4, 3, 0], 0),
        ([6], [9], 1),
        ([0, 4], [0, 4], 0),
    ],
)
def test_packed_sequences(name, of_q, of_k, extra):
    options = {**OPTIONS[name]}
    slopes = options.pop("alibi_slopes", None)
    if slopes is not None and slopes.ndim == 2:
        slopes = torch.rand(len(of_q), 4, generator=torch.Generator().manual_seed(5))
    total_q, total_k = sum(of_q) + extra, sum(of_k) + extra
    arrays = [draw(total_q, 4, 16), draw(total_k, 2, 16, seed=1), draw(total_k, 2, 16, seed=2)]
    if extra:  # tokens past the last edge: no trace of them
        arrays = [x.index_fill(0, torch.arange(len(x) - extra, len(x)), torch.nan) for x in arrays]
    found, expected = ([x.clone().to(kind).requires_grad_() for x in arrays] for kind in (torch.float32, torch.float64))
    cu_q, cu_k = edges(of_q), edges(of_k)
    arguments = (cu_q, cu_k, max(of_q), max(of_k))
    output, lse, _ = ours.flash_attn_varlen_func(
        *found, *arguments, **options, alibi_slopes=slopes, return_attn_probs=True
    )
    rows = [
        attend(
            *(x[cu[b] : cu[b + 1]] for x, cu in zip(expected, (cu_q, cu_k, cu_k), strict=True)),
            alibi_slopes=slopes if slopes is None or slopes.ndim == 1 else slopes[b],
            **options,
        )
        for b in range(len(of_q))
    ]
    reference, real = torch.cat([row[0] for row in rows]), int(cu_q[-1])
    assert close(output[:real], reference)
    assert close(lse[:, :real], torch.cat([row[1] for row in rows], 1))
    assert not output[real:].any()
    cotangent = draw(real, 4, 16, seed=3)
    output[:real].backward(cotangent)
    reference.backward(cotangent.double())
    for x, y, last in zip(found, expected, (real, int(cu_k[-1]), int(cu_k[-1])), strict=True):
        assert close(x.grad[:last], y.grad[:last])
        assert not x.grad[last:].any()
    packed = ours.flash_attn_varlen_kvpacked_func(
        found[0], torch.stack(found[1:], 1), *arguments, **options, alibi_slopes=slopes
    )
    assert close(packed, output)


def test_packed_queries_keys_and_values_and_pages():
    qkv, cu = draw(11, 3, 2, 8), edges([4, 7])
    whole = ours.flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 7, 7, causal=True)
    assert close(ours.flash_attn_varlen_qkvpacked_func(qkv, cu, 7, causal=True), whole)
    pages, table = torch.full((6, 3, 2, 2, 8), torch.nan), torch.tensor([[5, 2, 0], [1, 4, 3]])
    for b, (start, stop) in enumerate([(0, 4), (4, 11)]):
        for i in range(stop - start):
            pages[table[b, i // 3], i % 3] = qkv[start + i, 1:]
    k, v = pages.unbind(2)
    paged = ours.flash_attn_varlen_func(qkv[:, 0], k, v, cu, cu, 7, 7, causal=True, block_table=table.int())
    assert torch.equal(paged, whole)


@pytest.mark.parametrize("new", [0, 1, 3])
@pytest.mark.parametrize("place", ["rows", "chosen rows", "pages"])
@pytest.mark.parametrize("leftpad", [False, True])
@pytest.mark.parametrize("rotary", [None, False, True])
@pytest.mark.parametrize("name", ["plain", "causal", "window", "alibi", "alibi both ways"])
def test_cache(new, place, leftpad, rotary, name):
    if rotary is not None and not new:
        new = 2
    generator = torch.Generator().manual_seed(new)
    lengths, slots, nq = torch.tensor([4, 9]), 16, max(new, 1) + (name == "window")
    options = OPTIONS[name]
    caches = [draw(5, slots, 2, 16, seed=s) for s in (1, 2)]
    index, table = torch.tensor([3, 1]), torch.tensor([[3, 0, 6, 8], [7, 2, 5, 1]])
    own = index if place == "chosen rows" else torch.arange(2)
    if place == "rows":
        caches = [cache[:2] for cache in caches]
    held = [cache[own].clone() for cache in caches]  # (B, slots, H, D)
    if place == "pages":
        pages = [torch.full((9, 4, 2, 16), torch.nan) for _ in caches]
        for page, cache in zip(pages, held, strict=True):
            page[table] = cache.unflatten(1, (4, 4))
        caches = pages
    for cache in caches if place == "rows" else ():  # slots that hold no key may hold anything
        for b in range(2):
            cache[b, lengths[b] :] = torch.nan
    q, fresh = draw(2, nq, 4, 16, seed=4), [draw(2, new, 2, 16, seed=s) for s in (5, 6)] if new else [None, None]
    starts = torch.tensor([2, 1]) if leftpad else None
    angles = torch.rand(slots, 4, generator=generator) * 6
    tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": bool(rotary)}
    output, lse = ours.flash_attn_with_kvcache(
        q,
        *caches,
        *fresh,
        **(tables if rotary is not None else {}),
        cache_seqlens=lengths.int(),
        cache_batch_idx=index if place == "chosen rows" else None,
        cache_leftpad=starts,
        block_table=table.int() if place == "pages" else None,
        return_softmax_lse=True,
        **options,
    )
    for b in range(2):
        query, n = q[b], int(lengths[b])
        keys, values = (cache[b, :n] for cache in held)
        if new:
            k_new, v_new = (x[b] for x in fresh)
            if rotary is not None:
                turn = (angles.cos(), angles.sin())
                steps = (
                    torch.arange(nq) if name in ("causal", "window", "alibi") else torch.zeros(nq, dtype=torch.int64)
                )
                query = rotated(query, *turn, n + steps, rotary)
                k_new = rotated(k_new, *turn, n + torch.arange(new), rotary)
            keys, values = torch.cat([keys, k_new]), torch.cat([values, v_new])
            stored = (
                caches[0][own[b], n : n + new] if place != "pages" else caches[0][table[b]].flatten(0, 1)[n : n + new]
            )
            assert close(stored, k_new)
        first = int(starts[b]) if leftpad else 0
        slopes = options.get("alibi_slopes")
        chosen = {**options, "alibi_slopes": slopes[b] if slopes is not None and slopes.ndim == 2 else slopes}
        expected, expected_lse = attend(query, keys[first:], values[first:], **chosen)
        assert close(output[b], expected)
        assert close(lse[b], expected_lse)


def test_a_cache_without_lengths_is_full_and_one_length_serves_all_rows():
    q, k, v = draw(2, 1, 4, 8), draw(2, 6, 2, 8, seed=1), draw(2, 6, 2, 8, seed=2)
    assert close(ours.flash_attn_with_kvcache(q, k, v), batch(q, k, v)[0])
    assert close(ours.flash_attn_with_kvcache(q, k, v, cache_seqlens=4), batch(q, k[:, :4], v[:, :4])[0])
    assert close(ours.flash_attn_with_kvcache(q, k, v, cache_seqlens=0), torch.zeros(2, 1, 4, 8))


def test_dropout_keeps_the_mean():
    q, k, v = draw(1, 8, 2, 8).requires_grad_(), draw(1, 8, 2, 8, seed=1), draw(1, 8, 2, 8, seed=2)
    torch.manual_seed(0)
    draws = torch.stack([ours.flash_attn_func(q, k, v, dropout_p=0.3, causal=True) for _ in range(400)]).detach()
    mean = batch(q, k, v, causal=True)[0].detach()
    assert ((draws.mean(0) - mean).abs() <= 6 * draws.std(0) / 20 + 1e-5).all()  # six standard errors
    assert draws.std(0).mean() > 0.1
    _, _, weights = ours.flash_attn_func(q, k, v, dropout_p=0.3, return_attn_probs=True)
    assert weights.shape == (1, 2, 8, 8)
    assert torch.allclose(weights.sum(-1), torch.ones(()))


def test_padding():
    x, real = draw(3, 5, 2, 4).requires_grad_(), torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])
    tokens, indices, cu, longest, used = unpad_input(x, real)
    assert torch.equal(tokens, x[real.bool()])
    assert (cu.tolist(), longest, used.tolist()) == ([0, 3, 3, 7], 4, [3, 0, 4])
    assert cu.dtype == used.dtype == torch.int32
    back = pad_input(tokens, indices, 3, 5)
    assert torch.equal(back, x * real[..., None, None])
    back.sum().backward()
    assert torch.equal(x.grad, real[..., None, None].expand_as(x).float())
    assert torch.equal(index_first_axis(x.flatten(0, 1), indices), tokens)
    assert unpad_input(x, real, 1 - real)[2].tolist() == [0, 5, 10, 15]


def test_signatures_are_those_of_flash_attn():
    shared = "softmax_scale causal window_size softcap alibi_slopes"
    tail = f"dropout_p {shared} deterministic return_attn_probs"
    lengths = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    cache = "rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table softmax_scale causal window_size softcap"
    expected = {
        "flash_attn_func": f"q k v {tail}",
        "flash_attn_qkvpacked_func": f"qkv {tail}",
        "flash_attn_kvpacked_func": f"q kv {tail}",
        "flash_attn_varlen_func": f"q k v {lengths} {tail} block_table",
        "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {tail}",
        "flash_attn_varlen_kvpacked_func": f"q kv {lengths} {tail}",
        "flash_attn_with_kvcache": f"q k_cache v_cache k v {cache} rotary_interleaved alibi_slopes num_splits return_softmax_lse",
    }
    assert {name: " ".join(inspect.signature(getattr(ours, name)).parameters) for name in expected} == expected


MODEL = """
import sys
import torch
from flash_attn import flash_attn_func, flash_attn_varlen_func, __version__
from flash_attn.bert_padding import unpad_input, pad_input
from flash_attn.flash_attn_interface import flash_attn_with_kvcache
import flash_attn

torch.manual_seed(0)
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.out = torch.nn.Embedding(7, 16), torch.nn.Linear(16, 48), torch.nn.Linear(16, 7)
    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = self.qkv(x).view(*ids.shape, 3, 2, 8).unbind(2)
        return self.out(x + flash_attn_func(q, k, v, causal=True).view(*ids.shape, 16))
model, ids = Block(), torch.randint(7, (4, 12))
optimizer = torch.optim.Adam(model.parameters(), 0.03)
losses = []
for step in range(40):
    loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad(); loss.backward(); optimizer.step(); losses.append(loss.item())
assert losses[-1] < 0.6 * losses[0], losses
print("trained", __version__.split("+")[1], *sys.argv[1:])
"""


def test_a_model_that_imports_flash_attn_trains_without_a_gpu(tmp_path):
    script = tmp_path / "model.py"
    script.write_text(MODEL, encoding="utf-8")
    command = [sys.executable, "-m", "lowtri.integrations.flash_attn"]
    done = subprocess.run([*command, script, "--steps"], capture_output=True, text=True, check=False)
    assert done.stdout == "trained lowtri --steps\n", done.stderr
    assert done.stderr.startswith("flash_attn is now lowtri's: flash_attn, ")


def test_the_command_names_a_missing_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from lowtri.integrations.flash_attn.__main__ import main

    missing = str(tmp_path / "missing.py")
    for arguments, code, message in ([], 2, "``python -m"), (["--help"], 0, "``python -m"), ([missing], 2, missing):
        monkeypatch.setattr(sys, "argv", ["flash_attn", *arguments])
        assert main() == code
        assert capsys.readouterr().err.startswith(message)


def test_install_is_done_once_and_never_shadows_the_real_package(monkeypatch: pytest.MonkeyPatch):
    from lowtri.integrations.flash_attn.install import _MODULES

    for name in _MODULES:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # restored afterwards
        monkeypatch.delitem(sys.modules, name)
    assert ours.install().startswith("flash_attn is now lowtri's")
    assert ours.install().startswith("flash_attn is already lowtri's")
    assert sys.modules["flash_attn"].flash_attn_func is ours.flash_attn_func
    real = ModuleType("flash_attn")
    real.__spec__ = ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    with pytest.raises(CallError, match=r"is installed, and is not shadowed\.\nFix:"):
        ours.install()
    assert sys.modules["flash_attn"] is real


def test_memory_of_packed_sequences_is_that_of_documents():
    """The mask is asked tile by tile: sequences of 64 tokens leave nearly all tiles of 4,096 empty."""
    from lowtri.integrations.flash_attn.functions import _documents

    cu = edges([64] * 64).tolist()
    mask, positions = _documents(cu, cu, 4096, 4096)
    assert positions == {}
    assert mask == lowtri.documents(lengths=[64] * 64)


def test_whole_numbers_are_read_in_each_call():
    """Lengths and edges are tensors that callers change in place, also by an array that shares their memory."""
    q, cache = draw(2, 1, 4, 8), draw(2, 2, 16, 4, 8, seed=1)
    lengths, edges = torch.tensor([5, 5], dtype=torch.int32), torch.tensor([0, 3, 8], dtype=torch.int32)
    x = draw(8, 4, 8, seed=2)
    for add in (0, 1, 3):
        lengths.numpy()[:] = 5 + add
        lengths.numpy()[1] -= add // 2  # equal rows, then others
        output = ours.flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths, causal=True)
        for row, n in enumerate(lengths.tolist()):
            assert close(output[row], attend(q[row], cache[0, row, :n], cache[1, row, :n])[0])
        edges.numpy()[1] = 3 + add
        packed = ours.flash_attn_varlen_func(x, x, x, edges, edges, 8, 8, causal=True)
        for start, end in ((0, 3 + add), (3 + add, 8)):
            assert close(packed[None, start:end], batch(*[x[None, start:end]] * 3, causal=True)[0])


def test_a_cache_is_written_without_gradients():
    cache, (q, k, v) = draw(2, 1, 8, 2, 8), draw(3, 1, 1, 2, 8).requires_grad_()
    output = ours.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=3, causal=True)
    assert not output.requires_grad and not cache.requires_grad
    assert torch.equal(cache[0, :, 3:4], k.detach())
