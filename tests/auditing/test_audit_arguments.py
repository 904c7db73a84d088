"""What an argument requests either runs or is reported not to have run; it never ends in `no leak found`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtri
from lowtri.auditing.loading import load_target
from lowtri.errors import CallError, DataError, UndecidedError


class Summing(nn.Module):
    """A right model: every output is a map of the sum of what came so far."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids).cumsum(1))

    def step(self, state: Any, x: torch.Tensor) -> Any:
        state = self.embed(x) + (0 if state is None else state)
        return self.head(state), state


IDS = torch.randint(0, 30, (2, 8), generator=torch.Generator().manual_seed(0))


def test_a_step_that_runs_is_run() -> None:
    model = Summing()
    report = lowtri.audit(model, IDS, step=model.step)
    assert report.ok and report.finding("cache").status == "clean"


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda state, x: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda state, x: torch.zeros(len(x), 30), r"TypeError: step returned a Tensor, expected \(output, state\)"),
        (lambda state: (state, state), "TypeError: .* takes 1 positional argument but 2 were given"),
        (lambda state, x: (torch.zeros(len(x), 3), state), r"step answers \(2, 3\), expected 2 x 30 numbers"),
    ],
)
def test_a_step_that_does_not_run_is_no_verdict(step: Any, words: str) -> None:
    report = lowtri.audit(Summing(), IDS, step=step)
    assert not report.ok and report.exit_code == 3
    measured = report.finding("cache").measured
    assert measured["runs"] == len(measured["refused"]) > 0 and not measured["ways"]
    with pytest.raises(UndecidedError, match=f"cache: step= was requested and did not run: .*{words}") as caught:
        report.raise_for_leak()
    assert str(caught.value).endswith("Fix: correct the argument that requests it, or drop it.")


def test_a_step_that_fails_on_other_ids_is_no_verdict() -> None:
    model = Summing()

    def only_the_example(state: Any, x: torch.Tensor) -> Any:
        t, inner = (0, None) if state is None else state
        if not torch.equal(x, IDS[:, t]):
            raise LookupError("other ids")
        y, inner = model.step(inner, x)
        return y, (t + 1, inner)

    report = lowtri.audit(model, IDS, step=only_the_example)
    assert (
        report.message
        == "could not decide against causal: cache: step= was requested and did not run: LookupError: other ids."
    )


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ("causal", "the mask has one document"),
        ("causal & documents(lengths=[4, 4])", "no document could be run alone: TypeError: .* takes 0 positional"),
    ],
)
def test_an_alone_that_does_not_run_is_no_verdict(mask: str, words: str) -> None:
    table = torch.from_numpy(np.array(lowtri.mask(mask).dense(8))).float()
    embed = nn.Embedding(30, 8)
    report = lowtri.audit(lambda t: table[: t.shape[1], : t.shape[1]] @ embed(t), IDS, mask=mask, alone=lambda: 3)
    assert report.verdict == "could not decide"
    with pytest.raises(UndecidedError, match=f"packing: alone= was requested and did not run: {words}"):
        report.raise_for_leak()


def test_a_pad_mask_that_the_model_does_not_take() -> None:
    with pytest.raises(CallError, match=r"pad_mask='atention_mask', but the model takes \(ids\)"):
        lowtri.audit(Summing(), IDS, pad_mask="atention_mask")

    def refusing(ids: torch.Tensor, **named: Any) -> torch.Tensor:
        if named:
            raise TypeError(f"unknown {sorted(named)}")
        return ids[..., None].double().cumsum(1)

    report = lowtri.audit(refusing, IDS, pad_mask="mask")
    assert report.message.startswith(
        "could not decide against causal: padding: pad_mask= was requested and did not run: "
    )
    assert "unknown ['mask']" in report.message


def test_a_requested_probe_that_is_skipped_is_no_verdict() -> None:
    report = lowtri.audit(Summing(), IDS, probes=["padding"])
    assert report.finding("padding").status == "skipped"
    assert report.message.startswith(
        "could not decide against causal: padding was requested and did not run: the model takes no padding"
    )


def test_an_argument_whose_probe_is_left_out_is_noted() -> None:
    model = Summing()
    report = lowtri.audit(model, IDS, probes=["change"], step=model.step)
    assert report.ok and "step= was not used: probes= leaves cache out" in report.notes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"probes": []}, r"probes=\[\] would look at nothing"),
        ({"probes": "change"}, r"probes='change' is one text, expected a list of names.\nFix: probes=\['change'\]"),
        ({"draws": 0}, "draws=0, expected a whole number of at least 1"),
        ({"draws": 1.5}, "draws=1.5, expected a whole number"),
        ({"exact": -1}, "exact=-1, expected a whole number of at least 0"),
        ({"seed": -1}, "seed=-1, expected a whole number of at least 0"),
        ({"redraw": -1.0}, "redraw=-1.0, expected True, False or a standard deviation above 0"),
        ({"redraw": float("nan")}, "redraw=nan, expected True, False"),
        ({"redraw": "much"}, "redraw='much', expected True, False"),
        ({"step": 3}, "step=3, expected something to call"),
        ({"alone": "model"}, "alone='model', expected something to call"),
        ({"output": 0}, "output=0, expected something to call"),
        ({"pad_mask": ""}, "pad_mask='', expected the name of a keyword"),
        ({"vocab_size": "x"}, "vocab_size='x', expected a whole number of at least 2"),
        ({"probes": 3}, "probes=3, expected a list of names"),
        ({"position_axis": "a"}, "position_axis='a', expected the number of an axis"),
        ({"output_axis": 0.5}, "output_axis=0.5, expected the number of an axis"),
        ({"output_axis": -9}, r"no axis with one row for each of the 8 positions was found.\nFix: .* output_axis="),
        ({"batch_axis": "b"}, "batch_axis='b', expected the number of an axis"),
        ({"batch_axis": 9}, r"batch_axis=9 is no axis of an example of shape \(2, 8\) besides the positions' axis 1"),
        ({"batch_axis": 1}, "batch_axis=1 is no axis"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(CallError, match=words):
        lowtri.audit(Summing(), IDS, **arguments)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (None, "model is a NoneType, expected a module or a function"),
        ("gpt2", "model is the text 'gpt2', expected a module or a function.\nFix: load or build the model first"),
        (Summing, r"model is the class Summing.\nFix: make one of it, Summing\(...\)"),
        (Summing().to("meta"), "embed.weight of the model is on the device meta, which stores no values"),
    ],
)
def test_what_is_no_model(model: Any, words: str) -> None:
    with pytest.raises(CallError, match=words):
        lowtri.audit(model, IDS)


@pytest.mark.parametrize(
    ("example", "arguments", "words"),
    [
        ({"x": [[1, 2], [3]]}, {}, r"example\['x'\] is a list, not an array"),
        (IDS[:0], {}, r"example has no rows, shape \(0, 8\)"),
        (IDS.to("meta"), {}, "example is on the device meta, which stores no values"),
        (IDS, {"layers": 1.5}, "layers=1.5, expected a whole number of at least 1"),
        (IDS, {"layers": True}, "layers=True, expected a whole number of at least 1"),
    ],
)
def test_examples_and_layers_that_cannot_be_used(example: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(CallError, match=words):
        lowtri.audit(Summing(), example, **arguments)


def test_an_answer_of_one_shape_whatever_came() -> None:
    """A length that happens to be the answer's width is not taken for its positions."""
    report = lowtri.audit(lambda t: torch.zeros(2, 8, 5), IDS)
    assert report.finding("prefix").message == "the model takes no shorter input"
    assert report.finding("prefix").measured["refused"] == [1, 2, 3, 4, 5, 6, 7]


def test_a_name_that_holds_a_module_is_that_model(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from torch import nn\nmodel = nn.Embedding(9, 4)\nModel = lambda: nn.Embedding(9, 4)\n")
    assert isinstance(load_target(f"{file}:model").model, nn.Embedding)
    assert isinstance(load_target(f"{file}:Model").model, nn.Embedding)


def test_a_report_for_a_folder_that_is_not_there(tmp_path: Path) -> None:
    report = lowtri.audit(Summing(), IDS, probes=["change"])
    with pytest.raises(
        DataError, match=r"save: .*away/report.html cannot be written: .* Fix: a file in a folder that exists"
    ):
        report.save(tmp_path / "away" / "report.html")
    (tmp_path / "taken.json").mkdir()
    with pytest.raises(
        DataError, match=r"save: .*taken.json cannot be written: is a folder, and only a file can be written"
    ):
        report.save(tmp_path / "taken.json")
    assert [path.name for path in tmp_path.iterdir()] == ["taken.json"]
