"""Which backend ``engine="auto"`` chooses: the first rule that holds, from facts of the call alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lowtri
from lowtri.backends import BACKENDS
from lowtri.dispatch import choose
from lowtri.dispatch.choose import RULES, Choice

PADS = lowtri.causal() & lowtri.keys(lengths=[40, 16])
DTYPES = ("float32", "bfloat16", "float16", "float64")


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package was installed without its library."""
    monkeypatch.setattr("lowtri.kernels.library.unusable", lambda: "there are none")
    monkeypatch.setattr(choose, "_warn_without_kernels", lambda: None)


def tensors(n: int, nq: int | None = None, *, d: int = 16, dtype: str = "float32", grad: bool = False) -> list[Any]:
    """q (2, 4, nq, d), k and v (2, 2, n, d): views of one number, since the choice reads none."""
    one = torch.zeros((), dtype=getattr(torch, dtype), requires_grad=grad)
    return [one.expand(2, heads, size, d) for heads, size in ((4, n if nq is None else nq), (2, n), (2, n))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("mask", ["causal", "full", "window(5)", "causal & chunks(8)"])
def test_the_kernels_run_whatever_they_support(mask: Any, grad: bool, dtype: str) -> None:
    for n, nq in ((1, 1), (16, 16), (40, 40), (40, 1), (40, 7)):
        assert lowtri.which_engine(*tensors(n, nq, dtype=dtype, grad=grad), mask).engine == "cpu"
    assert lowtri.which_engine(*tensors(40, 1, d=3, dtype=dtype), mask, softcap=2.0, return_lse=True).engine == "cpu"


@pytest.mark.parametrize(
    ("mask", "n", "options", "engine"),
    [
        ("causal", 40, {}, "sdpa"),  # is_causal
        ("full", 40, {}, "sdpa"),  # no mask
        ("window(64)", 40, {}, "sdpa"),  # no mask: it shows all
        ("window(5)", 40, {}, "sdpa"),  # a small table
        (PADS, 40, {}, "sdpa"),
        ("window(5)", 8192, {}, "formula"),  # a large one
        ("causal", 8192, {}, "sdpa"),  # none
        ("causal", 40, {"softcap": 2.0}, "formula"),
        ("causal", 40, {"return_weights": True}, "formula"),
        ("causal", 40, {"return_received": True}, "formula"),
        ("causal", 40, {"dropout": 0.1}, "formula"),  # torch's own draws other numbers
    ],
)
def test_torch_computes_where_there_are_no_kernels(
    mask: Any, n: int, options: dict[str, Any], engine: str, no_kernels: None
) -> None:
    assert lowtri.which_engine(*tensors(n), mask, **options).engine == engine


@pytest.mark.parametrize("options", [{"return_weights": True}, {"return_received": True}, {"dropout": 0.1}])
@pytest.mark.parametrize("grad", [False, True])
def test_the_kernels_have_weights_and_dropout(grad: bool, options: dict[str, Any]) -> None:
    for n in (8, 40, 8192):
        assert lowtri.which_engine(*tensors(n, grad=grad), "causal & window(5)", **options).engine == "cpu"
        arrays = [x.numpy() for x in tensors(n)]
        assert lowtri.which_engine(*arrays, "causal & window(5)", **options).engine == "cpu"


def test_numpy_arrays_run_on_the_definition_only_where_there_are_few_pairs(no_kernels: None) -> None:
    def chosen(n: int, **options: Any) -> str:
        return lowtri.which_engine(*(x.numpy() for x in tensors(n)), "causal", **options).engine

    assert [chosen(n, return_weights=True) for n in (40, 1024)] == ["reference", "formula"]
    assert [chosen(n) for n in (40, 2048)] == ["reference", "formula"]
    assert chosen(40, dropout=0.1) == "reference"


def test_inputs_that_cannot_be_inspected_run_on_the_formula() -> None:
    q, k, v = (x.contiguous() for x in tensors(8))
    seen = []
    torch.vmap(lambda x: (seen.append(lowtri.which_engine(x, k, v, "causal")), x)[1])(q[None])
    assert seen[0].engine == "formula"
    assert seen[0].answers["sdpa"].endswith("torch.func, where its inputs cannot be inspected")


def test_the_first_engine_that_answers_yes_runs() -> None:
    assert {rule.backend for rule in RULES} == set(BACKENDS)
    for options in ({}, {"dropout": 0.1}, {"return_weights": True}, {"softcap": 2.0, "dropout": 0.1}):
        for arrays in (tensors(20), tensors(20, grad=True), [x.numpy() for x in tensors(20)]):
            choice = lowtri.which_engine(*arrays, "causal & window(5)", **options)
            yes = [name for name, answer in choice.answers.items() if answer.startswith("yes: ")]
            assert yes[0] == choice.engine
            assert choice.answers[choice.engine] == f"yes: {choice.reason}"
            assert set(choice.answers) == set(BACKENDS)


def test_inputs_may_exclude_the_first_one(no_kernels: None) -> None:
    q, k, v = (x.contiguous() for x in tensors(40))
    clean = lowtri.which_engine(q, k, v, "causal")
    assert (clean.engine, clean.reason) == ("sdpa", "one argument of torch's function expresses the mask")
    assert clean.answers["cpu"] == "no: there are none"
    v[:, :, -1] = torch.nan
    choice = lowtri.which_engine(q, k, v, "causal")
    assert choice.engine == "formula"
    assert str(choice).startswith("formula runs: sdpa is excluded, since an input holds NaN, infinity or huge numbers")
    assert lowtri.which_engine(q, k, v, "causal", engine="sdpa").reason == "requested by name"


def test_what_is_shown() -> None:
    choice = Choice("fast", "it <b>can</b>", {"fast": "yes: it <b>can</b>", "none": "no: <script>"})
    assert str(choice).splitlines() == [
        "fast runs: it <b>can</b>",
        "fast       yes: it <b>can</b>",
        "none       no: <script>",
    ]
    html = choice._repr_html_()
    assert "<script" not in html
    assert "<b>" not in html
    assert html.count("<tr>") == 1 + 2  # the head of the table, and a row for each engine
