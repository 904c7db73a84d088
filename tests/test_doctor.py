"""What the doctor says of this machine, and of what is missing."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest
import torch

from lowtri import doctor
from lowtri.cli.main import main
from lowtri.kernels import abi, library
from lowtri.kernels.isa import Amx, Avx2, Avx512Bf16
from lowtri.kernels.spec import functions_of
from lowtri.kernels.target import ISA


def test_without_kernels_the_doctor_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library, "unusable", lambda: "lowtri was installed without them. Fix: build them")
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "missing   there are no kernels, attention runs on torch's own or on the formula" in said
    assert "Fix: build them" in said


def test_the_doctor_names_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-measure"]) == 0
    said = capsys.readouterr().out
    for words in (
        f"torch {version('torch')}",  # without the build, which some wheels leave out of their metadata
        "rows x",
        "dot products of bf16 pairs",
        "library   ",
        "missing   nothing",
    ):
        assert words in said
    assert f"torch computes with {torch.get_num_threads()}; the kernels run on" in said


def test_the_doctor_names_amx(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("LOWTRI_ISA", raising=False)
    for has, isa, words in (
        (False, Avx2(), "AMX (tiles of bf16) no\n"),
        (
            True,
            Avx512Bf16(),
            "AMX (tiles of bf16) yes: the kernels do not use it (the system refuses it) and torch does",
        ),
        (True, Amx(), "AMX (tiles of bf16) yes: the kernels use it\n"),
    ):
        monkeypatch.setattr("lowtri.kernels.target.HAS_AMX", has)
        monkeypatch.setattr("lowtri.kernels.target.ISA", isa)
        assert main(["doctor", "--no-measure"]) == 0
        assert words in capsys.readouterr().out


def test_the_doctor_says_that_pairs_are_slower_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWTRI_ISA", raising=False)
    report = doctor.examine(measure=False)
    report["kernels"] |= {"bf16_pairs": False, "features": ["avx512bf16"]}
    assert "dot products of bf16 pairs no (this CPU has them, but computes float32 faster)" in doctor.as_text(report)
    report["kernels"] |= {"features": []}
    assert "dot products of bf16 pairs no\n" in doctor.as_text(report)


def test_the_doctor_measures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_READ_BYTES", 2**20)
    assert main(["doctor", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["trouble"] == [] and "measuring for a second" in err
    assert {"multiply", "attention", "read"} <= set(found["speed"]) and min(found["speed"].values()) > 0
    assert found["library"]["stale"] or found["kernels"]["target"] in found["library"]["sets"]
    assert "of that" in doctor.as_text(found)


def test_the_doctor_names_the_sets_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    report = doctor.examine(measure=False)
    report["library"] = {"sets": ["avx2", "baseline"], "bytes": 2**19, "functions": 33, "stale": None}
    assert "library   kernels for avx2, baseline: 33 functions, 512 KB" in doctor.as_text(report)
    report["library"] = {"sets": [], "bytes": None, "functions": 0, "stale": "the kernels' sources have changed"}
    assert "library   the kernels' sources have changed: each is compiled when" in doctor.as_text(report)


def test_the_doctor_knows_every_kernel() -> None:
    families = {name.lower() for name, one in vars(abi).items() if isinstance(one, abi.Abi)}
    assert families == {family for family, _ in functions_of(ISA)}
