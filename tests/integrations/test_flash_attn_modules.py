"""The other modules of flash-attn: rotary embedding, and names that lowtri does not offer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtri.errors import CallError
from lowtri.integrations.flash_attn.layers_rotary import RotaryEmbedding, apply_rotary_emb

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


def test_leaves_are_rotated() -> None:
    """A leaf that gets gradients: new, or in place under no_grad; the module rotates a copy of it."""
    leaf = numbers(B, N, H, D).requires_grad_()
    expected = by_formula(leaf, torch.arange(N).expand(B, N), False)
    found = apply_rotary_emb(leaf, COS, SIN)
    grads = [torch.autograd.grad((y**3).sum(), leaf)[0] for y in (found, expected)]
    torch.testing.assert_close([found, grads[0]], [expected, grads[1]])
    qkv = numbers(B, N, 3, H, 2 * R).requires_grad_()
    before = qkv.detach().clone()
    rotated = RotaryEmbedding(2 * R)(qkv)
    assert torch.equal(qkv, before) and torch.autograd.grad(rotated.square().sum(), qkv)[0].any()
    with torch.no_grad():
        assert apply_rotary_emb(leaf, COS, SIN, inplace=True) is leaf
    torch.testing.assert_close(leaf, expected)


def by_module(x: Tensor, offset: int = 0, interleaved: bool = False) -> Tensor:
    """(B, N, H, 2 R) rotated by the frequencies 1 / 10000 ** (i / R)."""
    angles = (torch.arange(offset, offset + x.shape[1])[:, None] / 10000.0 ** (torch.arange(R) / R)).double()
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.split(R, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.view_as_real(turned)
    return pairs.flatten(-2) if interleaved else torch.cat(pairs.unbind(-1), -1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_module_rotates_queries_and_keys_in_place(interleaved: bool) -> None:
    module, source = RotaryEmbedding(2 * R, interleaved=interleaved), numbers(B, N, 3, H, 2 * R)
    assert list(module.state_dict()) == []
    q, k, v = source.unbind(2)
    for offset in (0, 5, torch.tensor([5, 5])):
        n = int(offset.max()) if isinstance(offset, Tensor) else offset
        expected = torch.stack([by_module(q, n, interleaved), by_module(k, n, interleaved), v], 2)
        qkv = source.clone()
        assert module(qkv, seqlen_offset=offset, max_seqlen=99) is qkv
        torch.testing.assert_close(qkv, expected, rtol=1e-6, atol=1e-6)
        separate = module(q.clone(), source[:, :, 1:].clone(), seqlen_offset=offset)
        torch.testing.assert_close(torch.cat([separate[0][:, :, None], separate[1]], 2), qkv)
        shared = torch.cat([q, k[:, :, :1], v[:, :, :1]], 2)  # three query heads and one of keys
        found = module(shared, seqlen_offset=offset, num_heads_q=H)
        wanted = torch.cat([expected[:, :, 0], expected[:, :, 1, :1], v[:, :, :1]], 2)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert module(source.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(
        CallError,
        match=r"scale_base \(XPos\) is not computed here\. Fix: the package flash_attn on a GPU; scale_base=None is",
    ):
        RotaryEmbedding(8, scale_base=512.0)


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


# Names.

SCRIPT = """
import importlib
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
import flash_attn, flash_attn.layers.rotary as rotary

assert rotary.apply_rotary_emb is apply_rotary_emb and not hasattr(flash_attn, "flash_attn_gpu")
for line in (
    "from flash_attn import flash_attn_gpu",
    "import flash_attn.ops.triton.rotary",
    "from flash_attn.modules.mha import MHA",
    "from flash_attn.layers.rotary import rotate_half",
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
        "flash_attn_gpu",
    ]
    assert done.returncode == 0 and len(lines) == len(names), done.stderr
    for line, name in zip(lines, names, strict=True):
        assert line.startswith(f"flash_attn.{name} is not offered by lowtri, which has ")
        assert line.endswith(" Fix: one of these, or the real package on a GPU.")
    assert "flash_attn_varlen_func" in lines[0] and "flash_attn.layers.rotary" in lines[1]
    assert "apply_rotary_emb" in lines[3]
