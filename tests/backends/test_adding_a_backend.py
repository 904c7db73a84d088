"""The recipe "Adding a backend" of CONTRIBUTING.md, executed in a copy of the package."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipes import blocks, copy_of_lowtri, replace_line, run

from lowtri.backends import BACKENDS

CALLS = """
    import numpy as np, torch, lowtri

    arrays = np.random.default_rng(0).standard_normal((3, 2, 5, 4))
    tensors = [torch.from_numpy(x) for x in arrays]
    later = {"q_positions": range(5), "k_positions": range(5, 10)}  # under "causal" no query sees these keys
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a copy of the package in which the recipe was followed."""
    folder = tmp_path_factory.mktemp("backend")
    file, line, rules = blocks("Adding a backend")
    package = copy_of_lowtri(folder)
    (package / "backends" / "zeros.py").write_text(file, encoding="utf-8")
    replace_line(package / "backends" / "__init__.py", "BACKENDS = (", line.strip())
    replace_line(package / "dispatch" / "choose.py", "RULES = (", rules.rstrip())
    return folder


def test_the_line_of_the_recipe_extends_the_list() -> None:
    _, line, _ = blocks("Adding a backend")
    assert line.strip() == f"BACKENDS = {(*BACKENDS, 'zeros')}".replace("'", '"')


@pytest.mark.sweep
def test_auto_chooses_the_new_backend_where_its_rule_is_the_first(folder: Path) -> None:
    code = """
    for q, k, v in (arrays, tensors):
        hidden = lowtri.which_engine(q, k, v, "causal", **later)
        assert hidden.engine == "zeros" and next(iter(hidden.answers)) == "zeros", hidden
        assert lowtri.which_engine(q, k, v, "causal").engine != "zeros"
        output = lowtri.attention(q, k, v, "causal", **later)
        reference = lowtri.attention(q, k, v, "causal", engine="reference", **later)
        assert type(output) is type(reference) and output.dtype == reference.dtype
        assert output.shape == reference.shape and not output.any() and not reference.any()
    """
    run(CALLS + code, folder)


def test_the_new_backend_runs_by_name(folder: Path) -> None:
    code = """
    assert not lowtri.attention(*arrays, "~full", engine="zeros").any()
    assert lowtri.attention(*tensors, "~full", engine="zeros").shape == (2, 5, 4)
    batched = lowtri.causal() - lowtri.keys(lengths=[5])  # a mask with a batch dimension
    assert not lowtri.attention(*arrays[:, None], batched, engine="zeros").any()
    """
    run(CALLS + code, folder)


@pytest.mark.sweep
def test_which_engine_prints_the_answer_of_the_new_backend(folder: Path) -> None:
    printed = run(
        CALLS
        + """
    print(lowtri.which_engine(*arrays, "causal", **later))
    print(lowtri.which_engine(*arrays, "causal"))
    """,
        folder,
    )
    lines = [line.split(maxsplit=1) for line in printed.splitlines()]
    assert [answer for name, answer in lines if name == "zeros"] == [
        "runs: the mask hides every pair",
        "yes: the mask hides every pair",
        "no: the mask may show some pairs",
    ]


@pytest.mark.sweep
def test_an_unsupported_call_raises_with_the_reason(folder: Path) -> None:
    code = """
    tensors[0].requires_grad_()
    for options, reason in (
        ({}, "no: the mask may show some pairs"),
        ({**later, "return_weights": True}, "no: it returns the output alone"),
        ({**later, "q": tensors[0]}, "no: it has no gradients"),
    ):
        _, k, v = tensors
        try:
            lowtri.attention(options.pop("q", tensors[0].detach()), k, v, "causal", engine="zeros", **options)
        except lowtri.EngineError as error:
            assert reason in str(error) and 'Fix: drop engine="zeros"' in str(error), error
        else:
            raise AssertionError(f"no error for {options}")
    """
    run(CALLS + code, folder)
