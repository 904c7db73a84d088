"""The other modules of flash-attn: rotary embedding, FlashAttention 3's signatures, and names that lowtri does not offer."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtri.errors import CallError
from lowtri.integrations import flash_attn as version2
from lowtri.integrations.flash_attn import version3
from lowtri.integrations.flash_attn.layers_rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)

B, N, H, D, R = 2, 5, 3, 10, 4  # R pairs of a head are rotated, two entries are not
SOURCE = torch.Generator().manual_seed(0)
ANGLES = torch.rand(9, R, generator=SOURCE, dtype=torch.float64) * 6
COS, SIN = ANGLES.cos(), ANGLES.sin()


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=SOURCE, dtype=torch.float64)


def by_formula(x: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Pairs as complex numbers, times e^(i angle). x: (..., N, H, D), positions: (..., N)."""
    first = x[..., 0 : 2 * R : 2] if interleaved else x[..., :R]
    second = x[..., 1 : 2 * R : 2] if interleaved else x[..., R : 2 * R]
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(ANGLES), ANGLES)[positions][..., None, :]
    pairs = torch.view_as_real(turned)
    rotated = pairs.flatten(-2) if interleaved else torch.cat(pairs.unbind(-1), -1)
    return torch.cat([rotated, x[..., 2 * R :]], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, [4, 1]])
@pytest.mark.parametrize("inplace", [False, True])
def test_rotary_embedding_and_its_gradient(interleaved: bool, offsets: Any, inplace: bool) -> None:
    offset = torch.tensor(offsets) if isinstance(offsets, list) else offsets
    positions = (torch.tensor(offsets) * torch.ones(B, dtype=torch.int64))[:, None] + torch.arange(N)
    leaf = numbers(B, N, H, D).requires_grad_()
    expected = by_formula(leaf, positions, interleaved)
    x = leaf * 1
    found = apply_rotary_emb(x, COS, SIN, interleaved, inplace, offset)
    assert (found is x) is inplace
    grads = [torch.autograd.grad((y**3).sum(), leaf)[0] for y in (found, expected)]
    torch.testing.assert_close([found, grads[0]], [expected, grads[1]])


@pytest.mark.parametrize("offsets", [0, [2, 0, 1]])
def test_rotary_embedding_of_packed_sequences(offsets: Any) -> None:
    edges, offset = torch.tensor([0, 3, 3, 7]), torch.tensor(offsets) if isinstance(offsets, list) else offsets
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3]) + (0 if offsets == 0 else torch.tensor([2, 2, 2, 1, 1, 1, 1]))
    x = numbers(7, H, D)
    found = apply_rotary_emb(x, COS, SIN, seqlen_offsets=offset, cu_seqlens=edges, max_seqlen=4)
    torch.testing.assert_close(found, by_formula(x, positions, False))


def test_queries_and_keys_are_rotated_in_place() -> None:
    positions = torch.arange(N).expand(B, N)
    leaf = numbers(B, N, 3, H, D).requires_grad_()
    q, k, v = leaf.unbind(2)
    expected = torch.stack([by_formula(q, positions, False), by_formula(k, positions, False), v], 2)
    qkv = leaf * 1
    assert apply_rotary_emb_qkv_(qkv, COS, SIN) is qkv
    grads = [torch.autograd.grad((y**3).sum(), leaf)[0] for y in (qkv, expected)]
    torch.testing.assert_close([qkv, grads[0]], [expected, grads[1]])
    shared = torch.cat([q, k[:, :, :1], v[:, :, :1]], 2).detach()  # three query heads and one of keys
    apply_rotary_emb_qkv_(shared, COS, SIN, num_heads_q=H)
    torch.testing.assert_close(shared[:, :, : H + 1], torch.cat([expected[:, :, 0], expected[:, :, 1, :1]], 2))
    assert torch.equal(shared[:, :, H + 1], v[:, :, 0])
    with pytest.raises(CallError, match=r"num_heads_q is 4, of 5 heads in qkv\.\nFix: as many heads of keys"):
        apply_rotary_emb_qkv_(shared, COS, SIN, num_heads_q=4)
    kv = leaf[:, :, 1:].detach().clone()
    torch.testing.assert_close(apply_rotary_emb_kv_(kv, COS, SIN), expected[:, :, 1:])


@pytest.mark.parametrize("scale_base", [None, 16.0])
def test_scores_depend_on_the_distance_alone(scale_base: float | None) -> None:
    module = RotaryEmbedding(8, scale_base=scale_base)
    one = numbers(1, 1, 3, 1, 8).float().expand(1, 40, 3, 1, 8).contiguous()
    rotated = module(one.clone())
    q, k, v = rotated.unbind(2)
    scores = (q[0, :, 0] @ k[0, :, 0].T).double()
    for distance in (0, 1, 7):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)
    assert (scores[7, 0] - scores[0, 0]).abs() > 1e-2 and torch.equal(v, one[:, :, 2])
    separate = module(one[:, :, 0].clone(), one[:, :, 1:].clone())
    torch.testing.assert_close(torch.cat([separate[0][:, :, None], separate[1]], 2), rotated)


def test_tables_grow_and_have_the_dtype_of_their_input() -> None:
    module, x = RotaryEmbedding(4, base=100.0), numbers(1, 3, 3, 1, 4).float()
    assert list(module.state_dict()) == []
    angles = torch.outer(torch.arange(9.0), torch.tensor([1.0, 0.1]))
    expected = apply_rotary_emb(x[:, :, 0].clone(), angles.cos(), angles.sin(), seqlen_offsets=5)
    assert torch.equal(module(x.clone())[:, :1], x[:, :1])  # position 0; the tables have three positions
    torch.testing.assert_close(module(x.clone(), seqlen_offset=5)[:, :, 0], expected)
    offset = torch.tensor([5])
    torch.testing.assert_close(module(x.clone(), seqlen_offset=offset, max_seqlen=9)[:, :, 0], expected)
    assert module(x.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(CallError, match=r"seqlen_offset is a tensor\. Fix: max_seqlen="):
        RotaryEmbedding(4)(x, seqlen_offset=offset)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"x": torch.ones(5, 2, 8)}, r"x is \(5, 2, 8\)\. Fix: a torch tensor \(B, N, H, D\)"),
    "wide": ({"cos": torch.ones(9, 6), "sin": torch.ones(9, 6)}, "rotary tables cos .* for heads of 10. Fix"),
    "a list": ({"cos": [1.0]}, r"cos is list\. Fix: a torch tensor"),
    "short": ({"seqlen_offsets": 6}, "have 9 positions, but one is 10. Fix: longer tables"),
    "offsets": ({"seqlen_offsets": torch.ones(3, dtype=torch.int64)}, "seqlen_offsets is"),
    "edges": ({"x": torch.ones(5, H, D), "cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens is .*Fix: ascending, from 0 to 5"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    options, words = WRONG[name]
    with pytest.raises(CallError, match=f"apply_rotary_emb: .*{words}"):
        apply_rotary_emb(**{"x": torch.ones(B, N, H, D), "cos": COS, "sin": SIN, **options})


# FlashAttention 3.


def test_version_3_computes_what_version_2_does() -> None:
    q, k, v = numbers(B, N, 4, 8).float(), numbers(B, 7, 2, 8).float(), numbers(B, 7, 2, 8).float()
    q.requires_grad_()
    mask = {"causal": True, "window_size": (3, 0), "softcap": 5.0, "softmax_scale": 0.3}
    ours, lse = version3.flash_attn_func(q, k, v, **mask, num_splits=3, pack_gqa=True, return_attn_probs=True)
    theirs, expected, _ = version2.flash_attn_func(q, k, v, **mask, return_attn_probs=True)
    assert torch.equal(ours, theirs) and torch.equal(lse, expected) and ours.requires_grad
    assert torch.equal(version3.flash_attn_func(q, k, v, None, True), version2.flash_attn_func(q, k, v, causal=True))
    edges = torch.tensor([0, 2, 5])
    packed = (q[0], q[0, :, :2], q[0, :, :2], edges, edges, 3, 3)
    found = version3.flash_attn_varlen_func(*packed, causal=True, seqused_q=None)
    assert torch.equal(found, version2.flash_attn_varlen_func(*packed, causal=True))
    caches = [(k.clone(), v.clone()) for _ in range(2)]
    new = (q[:, :1].detach(), k[:, :1], v[:, :1])
    table, lengths = torch.tensor([[0], [1]]), torch.tensor([3, 5])
    found = version3.flash_attn_with_kvcache(
        new[0], *caches[0], *new[1:], cache_seqlens=lengths, page_table=table, causal=True
    )
    expected = version2.flash_attn_with_kvcache(
        new[0], *caches[1], *new[1:], cache_seqlens=lengths, block_table=table, causal=True
    )
    assert torch.equal(found, expected) and torch.equal(caches[0][0], caches[1][0])


def test_what_only_version_3_has_raises() -> None:
    x = torch.ones(1, 2, 1, 8)
    for option in ({"attention_chunk": 4}, {"qv": x}, {"q_descale": torch.ones(1, 1)}):
        with pytest.raises(
            CallError, match=rf"flash_attn_interface\.flash_attn_func: {next(iter(option))} is not offered"
        ):
            version3.flash_attn_func(x, x, x, **option)
    with pytest.raises(CallError, match=r"kvcache: rotary_seqlens is not offered by lowtri\. Fix: leave"):
        version3.flash_attn_with_kvcache(x, x, x, rotary_seqlens=torch.tensor([1]))
    with pytest.raises(TypeError, match="dropout_p"):
        version3.flash_attn_func(x, x, x, dropout_p=0.1)
    names = list(inspect.signature(version3.flash_attn_varlen_func).parameters)
    assert names[7:13] == ["seqused_q", "seqused_k", "softmax_scale", "causal", "qv", "q_descale"]


# Names.

SCRIPT = """
import importlib
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flash_attn_interface import flash_attn_func
import flash_attn, flash_attn.layers.rotary as rotary

assert rotary.apply_rotary_emb is apply_rotary_emb and not hasattr(flash_attn, "flash_attn_gpu")
for line in (
    "from flash_attn import flash_attn_gpu",
    "import flash_attn.ops.triton.rotary",
    "from flash_attn.modules.mha import MHA",
    "from flash_attn.layers.rotary import rotate_half",
    "from flash_attn_interface import get_scheduler_metadata",
):
    try:
        exec(line)
    except ImportError as error:
        print(error)
try:
    flash_attn.flash_attn_gpu
except AttributeError as error:
    print(error)
"""


def test_what_is_not_offered_is_named_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "lowtri.integrations.flash_attn", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    names = [
        "flash_attn_gpu",
        "ops",
        "modules",
        "layers.rotary.rotate_half",
        "get_scheduler_metadata",
        "flash_attn_gpu",
    ]
    assert done.returncode == 0 and len(lines) == len(names), done.stderr
    for line, name in zip(lines, names, strict=True):
        module = "flash_attn_interface" if name == "get_scheduler_metadata" else "flash_attn"
        assert line.startswith(f"{module}.{name} is not offered by lowtri, which has ")
        assert line.endswith(" Fix: one of these, or the real package on a GPU.")
    assert "flash_attn_varlen_func" in lines[0] and "flash_attn.layers.rotary" in lines[1]
    assert "apply_rotary_emb" in lines[3] and "flash_attn_func" in lines[4]
