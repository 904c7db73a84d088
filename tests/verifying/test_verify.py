"""``lowtri.verify``: right attention passes, each well-known mistake is named, bad callables are described."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from wrong_kernels import PAIRS, kernel

import lowtri
from lowtri.errors import CallError, DataError, VerifyError
from lowtri.verifying.mistakes import MISTAKES

FEW = [
    *("full", "causal", "one query, 130 keys", "grouped heads", "window of 5", "window of 8, 5 queries", "documents"),
    *("padding right", "empty rows", "bias", "softcap", "softcap and bias", "scale", "scores below -1e9"),
    *("NaN in hidden keys and values", "log-sum-exp", "sink logits"),
]


def verify(attend: Any, **options: Any) -> Any:
    return lowtri.verify(attend, **{"dtypes": ["float32"], **options})


def test_a_right_kernel_in_torch_passes_in_every_dtype() -> None:
    report = lowtri.verify(kernel(), gradients=True)
    assert report.ok and report.passed > 160, report
    assert report.exit_code == 0 and "is right" in str(report)


@pytest.mark.parametrize("cases", [pytest.param(FEW, id="few"), pytest.param(None, id="all", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str, cases: list[str] | None) -> None:
    report = verify(kernel(name), cases=cases)
    assert not report.ok and report.exit_code == 1
    assert report.mistakes[0] == name, report
    assert sum(finding.mistake != name for finding in report.wrong) <= len(report.wrong) // 6, report


@pytest.mark.parametrize("cases", [pytest.param(FEW, id="few"), pytest.param(None, id="all", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_two_mistakes_together_are_named(pair: tuple[str, str], cases: list[str] | None) -> None:
    report = verify(kernel(*pair), cases=cases)
    assert set(pair) <= set(report.mistakes[:3]), report


def test_an_unexplained_difference_is_located_and_shrunk() -> None:
    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        output = kernel()(q, k, v, mask).clone()
        output[:, :, 16:, 3] *= 1.01  # the fourth feature, from the second block of queries on
        return output

    report = verify(attend, cases="causal", gradients=False)
    (finding,) = report.wrong
    assert not report.mistakes and "query 16 to the end, only the feature (3)" in finding.where
    assert "Nq 18" in finding.where and "mask causal" in finding.where, finding.where


def test_documented_differences_and_what_is_not_offered_are_listed() -> None:
    known = {"NaN from hidden keys": "torch multiplies hidden values by a weight of 0"}
    options: dict[str, Any] = {"signature": "sdpa", "differences": known}
    report = verify(F.scaled_dot_product_attention, cases=[*FEW, "NaN in hidden keys and values"], **options)
    assert report.ok and {"softcap", "log-sum-exp", "sinks"} == set(report.not_offered), report
    assert all(finding.known for finding in report.findings) and "documented" in str(report)


def test_kernels_that_take_half_types_alone_or_have_no_backward_pass() -> None:
    def half(q: Any, k: Any, v: Any, mask: Any) -> Any:
        if q.dtype == torch.float32:
            raise TypeError("float16 and bfloat16 only")
        return kernel()(q, k, v, mask)

    def forward(q: Any, k: Any, v: Any, mask: Any) -> Any:
        if q.requires_grad:
            raise RuntimeError("no backward pass")
        return kernel()(q, k, v, mask)

    report = lowtri.verify(half, cases=["causal", "full"])
    assert (
        report.ok and report.passed == 4 and report.not_offered == {"float32": "TypeError: float16 and bfloat16 only"}
    )
    report = verify(forward, cases=["causal", "full"])
    assert report.ok and report.passed == 2 and report.not_offered == {"gradients": "RuntimeError: no backward pass"}


def test_a_signature_of_ones_own() -> None:
    def call(attend: Any, given: Any) -> Any:
        if given.bias is not None or given.sinks is not None or given.case.softcap or given.case.lse:
            raise NotImplementedError("softcap")
        return attend(given.visible, given.q, given.k, given.v, given.scale)

    def attend(visible: Any, q: Any, k: Any, v: Any, factor: float) -> Any:
        return kernel()(q, k, v, lowtri.table(visible.numpy()) if visible.numel() else lowtri.full(), factor)

    report = verify(attend, signature=call)
    assert report.ok and "softcap" in report.not_offered, report


def test_changed_inputs_are_named() -> None:
    def changing(q: Any, k: Any, v: Any, mask: Any) -> Any:
        output = kernel()(q, k, v, mask)
        with torch.no_grad():
            q *= 2
        return output

    report = verify(changing, cases=["causal", "full"], gradients=False)
    assert report.mistakes == ("changes its arguments",) and "it changed its argument q" in str(report)


def test_a_kernel_that_hangs() -> None:
    def hangs(q: Any, k: Any, v: Any, mask: Any) -> Any:
        if q.shape[2] == 64:
            time.sleep(60)
        return kernel()(q, k, v, mask)

    report = verify(hangs, limit=2.0, cases=["causal", "64 tokens", "full"])
    assert report.exit_code == 3 and "64 tokens, float32: no result within 2 s" in str(report)
    with pytest.raises(lowtri.UndecidedError, match=r"gave no result within 0.05 s\.\nFix: a longer limit="):
        verify(lambda q, k, v, mask: time.sleep(1), limit=0.05)


def nothing(q: Any, k: Any, v: Any, mask: Any) -> Any:
    raise TypeError("no arrays, please")


ERRORS = {
    "no function": (lambda: verify(3), "attend is int; expected a function"),
    "nothing works": (lambda: verify(lambda q, k, v, mask: 1 / 0), "ZeroDivisionError: division by zero.\nFix: check signature="),
    "no arrays": (lambda: verify(lambda q: q, signature="flex"), "takes no arrays of torch, numpy, jax"),
    "a signature": (lambda: verify(kernel(), signature="triton"), "signature='triton'; expected mask, sdpa, flash, flex"),
    "a dtype": (lambda: verify(kernel(), dtypes=["int8"]), "dtypes=['int8']; expected float32"),
    "no dtype": (lambda: verify(kernel(), dtypes=[]), "dtypes=[]; expected float32"),
    "a case": (lambda: verify(kernel(), cases=["causl"]), "cases='causl', which is in the name of no case"),
    "a part of a name": (lambda: verify(kernel(), cases="zebra"), "cases='zebra'"),
    "a device": (lambda: verify(kernel(), device="nowhere"), "verify: device='nowhere'"),
    "a seed": (lambda: verify(kernel(), seed=-1), "verify: seed=-1; expected a whole number"),
    "a difference": (lambda: verify(kernel(), differences={"nope": "x"}), "verify: differences='nope' is neither a case nor"),
    "a function by name": (lambda: verify(nothing), "attend=nothing takes no arrays"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, words = ERRORS[name]
    with pytest.raises(CallError) as error:
        call()
    assert words in str(error.value) and len(str(error.value).splitlines()) <= 3


def test_the_report(tmp_path: Path) -> None:
    report = verify(kernel("scale missing"), cases=["causal", "full"])
    with pytest.raises(VerifyError, match="scale missing"):
        report.raise_if_wrong()
    fields = json.loads(report.to_json())
    assert fields["mistakes"] == ["scale missing"] and not fields["ok"] and fields["findings"][0]["case"] == "causal"
    for name in ("r.html", "r.json", "r.txt"):
        assert "scale missing" in report.save(tmp_path / name).read_text()
    with pytest.raises(DataError, match=r"\.html, \.json, \.txt, \.svg"):
        report.save(tmp_path / "r.doc")
    assert "scale missing" in report._repr_html_()


def test_the_picture_has_a_cell_for_each_case_and_dtype() -> None:
    known = {"NaN from hidden keys": "a weight of 0 times NaN is NaN"}
    report = lowtri.verify(
        kernel("NaN from hidden keys", "softcap missing"),
        dtypes=["float32", "float64"],
        cases=["causal", "softcap", "NaN in hidden keys and values", "no rows"],
        differences=known,
    )
    assert list(report.results.values()) == [
        {"float32": status, "float64": status} for status in ("right", "wrong", "documented", "right")
    ]
    picture = report.to_svg()
    assert all(words in picture for words in ("float64", "NaN in hidden keys and values", "wrong", "documented"))
    assert picture.count('class="lowtri-leak"') == 2  # the case of the softcap, and the legend


def test_a_crash_is_no_refusal() -> None:
    """A function may decline a case by an error that says so; an exception that only a mistake raises is a difference."""

    def crashing(q: Any, k: Any, v: Any, mask: Any) -> Any:
        groups = {1: 1}[q.shape[1] // k.shape[1]]
        return lowtri.attention(q, k, v, mask) if groups else q

    def declining(q: Any, k: Any, v: Any, mask: Any) -> Any:
        if q.shape[1] != k.shape[1]:
            raise ValueError("as many heads of keys as of queries")
        return lowtri.attention(q, k, v, mask)

    report = verify(crashing, dtypes=["float32"], cases=["causal", "grouped heads"])
    assert not report.ok and "grouped heads, float32: it raised KeyError: 3" in str(report)
    report = verify(declining, dtypes=["float32"], cases=["causal", "grouped heads"])
    assert report.ok and "right: 1 case agrees with the definition, 1 case not offered" in report.message
    assert "as many heads of keys" in report.not_offered["grouped heads"]


def test_a_mistake_must_explain_more_than_the_right_formula() -> None:
    """A log-sum-exp that is off by one is no missing key, whatever the tolerance in half precision."""

    def off_by_one(q: Any, k: Any, v: Any, mask: Any, return_lse: bool = False) -> Any:
        output, lse = lowtri.attention(q, k, v, mask, return_lse=True)
        return (output, lse - 1.0) if return_lse else output

    report = verify(off_by_one, dtypes=["float32", "bfloat16"], cases="log-sum-exp", gradients=False)
    assert not report.ok and report.mistakes == ()


def test_the_verdict_counts_in_words_and_names_the_function() -> None:
    def halved(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **more: Any) -> torch.Tensor:
        return lowtri.attention(q, k, v, mask, **more) / (1 + (q.shape[2] == 130))

    bound, cases = functools.partial(halved, scale=None), ["full", "130 tokens"]
    report = verify(bound, cases=cases, gradients=False)
    assert (
        report.message
        == "halved is wrong: 1 difference that no well-known mistake explains (1 difference, 1 case agrees)"
    )
    known = verify(bound, cases="130 tokens", gradients=False, differences={"130 tokens": "halved on purpose"})
    assert known.ok and known.message == "halved differs only as documented: 1 documented difference"


def test_right_for_finite_inputs_is_a_level_of_its_own(tmp_path: Path) -> None:
    report = verify(kernel("NaN from hidden keys"), cases=FEW, gradients=False)
    assert report.level == "right for finite inputs" and not report.ok and report.exit_code == 1
    expected = "right for finite inputs, but wrong with NaN or infinity in hidden positions: NaN from hidden keys ("
    assert expected in report.message
    assert "\n  finite inputs: right; NaN or infinity in hidden positions: wrong\n" in str(report)
    assert "finite inputs: right; NaN" in report.to_html()
    fields = json.loads(report.to_json())
    assert fields["level"] == "right for finite inputs" and fields["exit_code"] == 1
    assert fields["levels"] == {"finite inputs": "right", "NaN or infinity in hidden positions": "wrong"}
    known = {"NaN from hidden keys": "a weight of 0 times NaN is NaN"}
    report = verify(kernel("NaN from hidden keys"), cases=FEW, gradients=False, differences=known)
    assert report.level == "right" and report.exit_code == 0


def test_levels_of_right_and_wrong_functions() -> None:
    assert verify(kernel(), cases=FEW, gradients=False).level == "right"
    both = verify(kernel("NaN from hidden keys", "softcap missing"), cases=FEW, gradients=False)
    assert both.level == "wrong" and set(both.levels.values()) == {"wrong"} and "is wrong: " in both.message
    alone = verify(kernel("NaN from hidden keys"), cases="NaN in hidden keys", gradients=False)
    assert alone.level == "wrong", "no finite input was compared"


def test_what_cannot_be_compared_is_said_once() -> None:
    """A wrong dtype, nothing at all, or other dimensions is one named finding, with how many cases show it."""
    right = kernel()

    def wide(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return right(q, k, v, mask).double()

    report = verify(wide, gradients=False)
    (finding,) = report.wrong
    assert report.mistakes == ("returns float64 for inputs of float32",) and finding.cases > 50
    assert "its output is float64 for inputs of float32" in str(report)
    assert report.message.startswith(f"wide is wrong: returns float64 for inputs of float32 in {finding.cases} cases (")
    names = {
        "returns None": (lambda q, k, v, mask: None, "it returned None; expected an array"),
        "returns str": (lambda q, k, v, mask: "text", "it returned str; expected an array"),
        "returns (B, N, H, D) for (B, H, N, D)": (
            lambda q, k, v, mask: right(q, k, v, mask).transpose(1, 2),
            "its output is (2, 37, 2, 16)",
        ),
        "returns another shape": (lambda q, k, v, mask: right(q, k, v, mask)[..., :8], "expected (2, 2, 37, 16)"),
    }
    for name, (attend, words) in names.items():
        report = verify(attend, cases=["causal", "full", "130 tokens"], gradients=False)
        (finding,) = report.wrong
        assert report.mistakes == (name,) and finding.cases == 3
        assert f"\n  {name}: 3 cases\n    full, float32: it" in str(report).replace("causal,", "full,")
        assert words in str(report)
    known = {"returns float64 for inputs of float32": "sums are wide"}
    assert verify(wide, cases=["causal", "full"], differences=known).ok


def test_numbers_of_a_wrong_dtype_are_compared_too() -> None:
    """The name of the mistake stands beside the dtype, and both before what no mistake explains."""

    def attend(q: Any, k: Any, v: Any, mask: Any, scale: float | None = None) -> Any:
        output = kernel("scale missing")(q, k, v, mask, scale).double()
        return output * (3 if q.shape[2] in (1, 5, 20, 40, 64, 129, 130, 150, 200) else 1)

    report = verify(attend, gradients=False)
    assert set(report.mistakes) >= {"scale missing", "returns float64 for inputs of float32"}
    assert "that no well-known mistake explains" in report.message
    assert report.message.index("scale missing") < report.message.index("that no well-known mistake explains")
    assert str(report).index("  scale missing:") < str(report).index("  not explained:")


def test_a_missing_nan_is_said_in_words() -> None:
    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return lowtri.attention(q, k, v, mask).nan_to_num(0.0)

    report = verify(attend, cases="NaN that later queries see")
    assert "output: expected NaN, got 0.0 at (0, 0, 18, 0): query 18 to the end" in str(report)
    report = verify(kernel("empty rows not zero"), cases="empty rows", gradients=False)
    assert "output: expected 0.0, got NaN at (0, 0, 0, 0)" in str(report)


@pytest.mark.parametrize("unsteady", [torch.float32, torch.float16])
def test_each_case_runs_twice_in_each_dtype(unsteady: torch.dtype) -> None:
    """Results that differ from run to run are named, also where they differ in few cases, and in one dtype."""
    calls = [0]

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        calls[0] += 1
        output = kernel()(q, k, v, mask)
        differs = q.shape[2] == 64 and q.dtype == unsteady
        return output * (1 + torch.finfo(unsteady).eps * (calls[0] % 2)) if differs else output

    names = ["float32", "float16"]
    report = verify(attend, dtypes=names, cases=["causal", "64 tokens", "full"], gradients=False)
    dtype = str(unsteady).removeprefix("torch.")
    assert report.mistakes == ("differs from run to run",)
    assert report.results["causal"] == dict.fromkeys(names, "right")
    assert report.results["64 tokens"] == {name: "wrong" if name == dtype else "right" for name in names}
    assert f"64 tokens, {dtype}: two equal calls differ by" in str(report)


def test_causal_with_more_queries_than_keys() -> None:
    """Under flash-attn's arguments no other case has queries that see nothing: a mean of the values there must not pass."""

    def flash(mean: bool) -> Any:
        def attend(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
            nq, nk = q.shape[1], k.shape[1]
            mask = lowtri.table(np.tri(nq, nk, nk - nq, dtype=bool)) if causal and nq * nk else lowtri.full()
            output = lowtri.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask).transpose(1, 2).clone()
            if mean and causal and nq > nk:
                output[:, : nq - nk] = v.mean(1, keepdim=True)
            return output

        return attend

    name = "more queries than keys, aligned to the last key"
    options: dict[str, Any] = {"signature": "flash", "cases": ["causal", name], "gradients": False}
    assert verify(flash(mean=False), **options).passed == 2
    report = verify(flash(mean=True), **options)
    assert report.mistakes == ("hidden as -1e9",) and {one.case for one in report.wrong} == {name}


@pytest.mark.parametrize("error", [NotImplementedError, ValueError])
def test_a_kernel_that_is_causal_alone(error: type[Exception]) -> None:
    """It declines every call without a mask, and the others are compared."""

    def attend(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
        if not causal or q.shape[1] > k.shape[1]:
            raise error("causal=True alone")
        return lowtri.attention(*(x.transpose(1, 2) for x in (q, k, v)), "causal").transpose(1, 2)

    report = verify(attend, signature="flash", gradients=False)
    assert report.ok and report.passed > 20 and "causal=True alone" in str(report.not_offered), report
