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
    report = lowtri.audit(lowtri.Model(model, step=model.step), IDS)
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
    report = lowtri.audit(lowtri.Model(Summing(), step=step), IDS)
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

    report = lowtri.audit(lowtri.Model(model, step=only_the_example), IDS)
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
    report = lowtri.audit(
        lowtri.Model(lambda t: table[: t.shape[1], : t.shape[1]] @ embed(t), alone=lambda: 3), IDS, mask=mask
    )
    assert report.verdict == "could not decide"
    with pytest.raises(UndecidedError, match=f"packing: alone= was requested and did not run: {words}"):
        report.raise_for_leak()


def test_a_pad_mask_that_the_model_does_not_take() -> None:
    with pytest.raises(CallError, match=r"pads='atention_mask', but the model takes \(ids\)"):
        lowtri.audit(lowtri.Model(Summing(), pads="atention_mask"), IDS)

    def refusing(ids: torch.Tensor, **named: Any) -> torch.Tensor:
        if named:
            raise TypeError(f"unknown {sorted(named)}")
        return ids[..., None].double().cumsum(1)

    report = lowtri.audit(lowtri.Model(refusing, pads="mask"), IDS)
    assert report.message.startswith("could not decide against causal: padding: pads= was requested and did not run: ")
    assert "unknown ['mask']" in report.message


def test_a_requested_probe_that_is_skipped_is_no_verdict() -> None:
    report = lowtri.audit(Summing(), IDS, probes=["padding"])
    assert report.finding("padding").status == "skipped"
    assert report.message.startswith(
        "could not decide against causal: padding was requested and did not run: the model takes no known padding"
    )


def test_an_argument_whose_probe_is_left_out_is_noted() -> None:
    model = Summing()
    report = lowtri.audit(lowtri.Model(model, step=model.step), IDS, probes=["change"])
    assert report.ok and "step= was not used: probes= leaves cache out" in report.notes


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"step": 3}, "step=3, expected something to call.\nFix: a function"),
        ({"alone": "model"}, "alone='model', expected something to call"),
        ({"output": 0}, "output=0, expected something to call"),
        ({"pads": ""}, "pads='', expected a name.\nFix: the keyword that marks real positions"),
        ({"vocab_size": "x"}, r"vocab_size='x', expected a whole number from 2 to 2\*\*24.\nFix: how many ids"),
        ({"vocab_size": 10**18}, "vocab_size=1000000000000000000, expected a whole number from 2"),
        ({"inputs": []}, r"inputs=\[\], expected a key of the example or a list of keys.\nFix: inputs="),
        ({"inputs": ()}, r"inputs=\(\), expected a key"),
        ({"inputs": 0.5}, "inputs=0.5, expected a key"),
        ({"inputs": [["x"]]}, r"inputs=\[\['x'\]\], expected a key"),
        ({"axes": 1}, r"axes=1, expected a letter for each axis, N the positions and B the batch.\nFix: axes="),
        ({"axes": "BB"}, "axes='BB', expected a letter for each axis"),
        ({"axes": "BD"}, "axes='BD', expected a letter for each axis"),
        ({"axes": "BN->BN->BN"}, "axes='BN->BN->BN', expected a letter"),
        ({"axes": "BND"}, r"axes='BND' names 3 axes, the example has the shape \(2, 8\).\nFix: a letter for each axis"),
        ({"axes": "BN -> N"}, r"no axis with one row for each of the 8 positions was found.\nFix: .* say its axes with Model\(axes="),
        ({"prefill": lambda x: (x, None)}, "prefill= was given without step=.\nFix: say how decoding continues"),
    ],
)  # fmt: skip
def test_fields_of_a_model_that_cannot_be_used(fields: dict[str, Any], words: str) -> None:
    for check in (lowtri.audit, lowtri.assert_causal, lowtri.infer_mask):
        with pytest.raises(CallError, match=words):
            check(lowtri.Model(Summing(), **fields), IDS)


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
        ({"size": 3}, {}, "example has no array among"),
        (7, {}, "example is a int, not an array of token ids or of vectors"),
        (np.ones((1, 3)), {}, "example has 1 position"),
        (np.array([3, 3, 3]), {}, "the example repeats one id"),
        (IDS[:0], {}, r"example has no rows, shape \(0, 8\)"),
        (IDS.to("meta"), {}, "example is on the device meta, which stores no values"),
        (IDS, {"mask": np.ones((4, 4), bool)}, r"mask gives a table of \(1, 4, 4\)"),
        (IDS, {"layers": 0}, "layers=0, expected a whole number of at least 1"),
        (IDS, {"layers": 1.5}, "layers=1.5, expected a whole number of at least 1"),
        (IDS, {"layers": True}, "layers=True, expected a whole number of at least 1"),
        (IDS, {"seed": -1}, "seed=-1, expected a whole number of at least 0"),
        (IDS, {"redraw": -1.0}, "redraw=-1.0, expected True, False or a standard deviation above 0"),
        (IDS, {"redraw": float("nan")}, "redraw=nan, expected True, False"),
        (IDS, {"redraw": "much"}, "redraw='much', expected True, False"),
        (IDS, {"probes": 3}, r"probes=3, expected a list of names.\nFix: "),
        (IDS, {"probes": []}, r"probes=\[\] would look at nothing.\nFix: name a probe"),
        (IDS, {"probes": ["hope"]}, "no probe is called 'hope'; there are state, change"),
        (IDS, {"conditions": ","}, r"conditions=',' would look at nothing.\nFix: name a condition"),
        (IDS, {"conditions": "evil"}, r"no condition is called 'evil'; there are eval, code_.*\nFix: conditions='eval'"),
    ],
)  # fmt: skip
def test_examples_and_arguments_that_cannot_be_used(example: Any, arguments: dict[str, Any], words: str) -> None:
    model = Summing() if isinstance(example, torch.Tensor) else lambda x: x
    with pytest.raises(CallError, match=words):
        lowtri.audit(model, example, **arguments)


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
