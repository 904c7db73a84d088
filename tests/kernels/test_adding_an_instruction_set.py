"""The recipe "Adding an instruction set" of CONTRIBUTING.md, executed in a copy of the package."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipes import blocks, copy_of_lowtri, replace_line, run

from lowtri.kernels.isa import ALL

TITLE = "Adding an instruction set or a dtype to the kernels"


@pytest.mark.sweep
def test_the_recipe(tmp_path: Path) -> None:
    file, lines = blocks(TITLE)
    isa = copy_of_lowtri(tmp_path) / "kernels" / "isa.py"
    replace_line(isa, "ALL: tuple[Baseline, ...] = (", f"{file.strip()}\n\n\n{lines.strip()}")
    code = """
    import numpy as np, torch, lowtri
    from lowtri.kernels import target

    blocks = {x.spec.register_block for x in target.VARIANTS if x.spec.operand in ("direct", "widened")}
    assert target.ISA.name == "tall" and blocks == {(4, 1, 4)}
    q, k, v = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 1, 2, 70, 32), np.float32))
    mask = "causal & window(40)"
    output = lowtri.attention(q, k, v, mask, engine="cpu")
    reference = lowtri.attention(q.double(), k.double(), v.double(), mask, engine="reference")
    plain = lowtri.attention(q, k, v, mask, engine="formula")
    error, allowed = ((x.double() - reference).abs().max() for x in (output, plain))
    assert error <= 2 * allowed + 1e-6, (error, allowed)
    """
    run(code, tmp_path, LOWTRI_ISA="tall")


def test_the_table_of_the_recipe_extends_the_list() -> None:
    _, lines = blocks(TITLE)
    classes = [type(isa).__name__ for isa in ALL if type(isa).__module__.startswith("lowtri.")]
    assert (
        lines.splitlines()[-1]
        == f"ALL: tuple[Baseline, ...] = ({', '.join(f'{name}()' for name in [*classes, 'Tall'])})"
    )
