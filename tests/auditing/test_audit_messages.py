"""What the audit says where an example, a mask or an answer is not what it needs, and the module that it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audited_models import vectors
from torch import Tensor, nn

import lowtri
from lowtri.cli.main import main

N, D = 8, 4
IDS = torch.randint(0, 5, (2, N), generator=torch.Generator().manual_seed(0))


class TwoTables(nn.Module):
    """A table of positions that is larger than that of tokens, and made first."""

    def __init__(self, tokens: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.place, self.token = nn.Embedding(500, D), nn.Embedding(tokens, D)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.token(ids) + self.place(torch.arange(ids.shape[1]))).cumsum(1)


def test_ids_are_drawn_for_the_table_that_they_reach() -> None:
    report = lowtri.audit(TwoTables(), IDS, length=0)
    assert report.ok, report


def test_an_index_that_does_not_exist_becomes_advice() -> None:
    table = np.random.default_rng(0).standard_normal((6, D))
    with pytest.raises(lowtri.CallError) as caught:
        lowtri.audit(lowtri.Model(lambda ids: np.cumsum(table[ids], axis=1), vocab_size=50), IDS.numpy(), length=0)
    text = str(caught.value)
    assert "raised IndexError: index" in text and "in the probe change" in text and "vocab_size=" in text
    assert len(text.splitlines()) <= 3


@pytest.mark.parametrize("probe", ["change", "cache"])
def test_an_index_that_does_not_exist_becomes_advice_in_every_trial(probe: str) -> None:
    embed = nn.Embedding(6, D)

    def step(state: Any, ids: Tensor) -> Any:
        state = embed(ids) + (0 if state is None else state)
        return state, state

    words = rf"the model raised IndexError: .*, in the probe {probe}.\nFix: Model\(vocab_size=\), .* drawn up to 49"
    with pytest.raises(lowtri.CallError, match=words):
        lowtri.audit(lowtri.Model(lambda ids: embed(ids).cumsum(1), vocab_size=50, step=step), IDS, probes=[probe])


def test_a_model_that_refuses_what_is_put_in_place_of_hidden_inputs() -> None:
    def model(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if np.abs(x).max() > 50:  # as no random value is, but every extreme one
            raise ValueError("x is too large")
        return np.cumsum(x, axis=-2)

    words = "the model raised ValueError: x is too large, in the probe change.\nFix: the model must take any values"
    with pytest.raises(lowtri.CallError, match=words):
        lowtri.audit(model, vectors(2, N, D).numpy(), length=0)


@pytest.mark.parametrize("ask", [lowtri.audit, lowtri.infer_mask])
def test_an_example_that_the_model_does_not_take(ask: Callable[..., Any]) -> None:
    with pytest.raises(lowtri.CallError, match=r"raised IndexError: .*, on the example itself.\nFix: an example that"):
        ask(nn.Embedding(9, D), torch.tensor([[50, 1, 2]]))


@dataclass
class Output:
    hidden: Any = None
    loss: Any = None
    scores: Any = None


def test_a_dataclass_is_an_answer() -> None:
    x = vectors(2, N, D)
    assert lowtri.audit(lambda x: Output(hidden=x.cumsum(1), loss=torch.zeros(())), x, probes=["change"]).ok
    with pytest.raises(
        lowtri.CallError, match=r"returns a Output of hidden .*; 2 of them(.|\n)*output=lambda answer"
    ) as caught:
        lowtri.audit(lambda x: Output(hidden=x, scores=x), x, probes=["change"])
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: lowtri.causal & lowtri.window(3),
        lambda: lowtri.window(3) | lowtri.causal,
        lambda: lowtri.audit(lambda x: x, vectors(N, D), mask=lowtri.causal),
    ],
)
def test_forgotten_parentheses(wrong: Callable[[], Any]) -> None:
    with pytest.raises(
        lowtri.MaskError, match=r"causal is a function; the parentheses were forgotten.\nFix: causal\(\)\."
    ):
        wrong()


def test_eval_mode_alone() -> None:
    class Leaking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.cumsum(1) + (x.flip(1) if self.training else 0)

    x = vectors(2, N, D)
    assert not lowtri.audit(Leaking(), x).ok
    report = lowtri.audit(Leaking(), x, conditions="eval,code_paths,longer")
    assert report.ok and "in eval mode" in report.message
    with pytest.raises(lowtri.CallError, match="no condition is called 'no'; there are eval, code_paths, training"):
        lowtri.audit(Leaking(), x, conditions="no")
    with pytest.raises(lowtri.CallError, match=r"prefill= was given without step=.\nFix: "):
        lowtri.audit(lowtri.Model(Leaking(), prefill=lambda x: (x, None)), x)


def test_eval_mode_and_probes_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.py"
    file.write_text(
        "import torch\n"
        "class Leaking(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x.cumsum(1) + (x.flip(1) if self.training else 0)\n"
        "def make():\n"
        "    return Leaking(), torch.randn(2, 6, 3)\n"
    )
    target = f"{file}:make"
    assert main(["audit", target, "--probes", "change", "--conditions", "eval,training"]) == 1
    assert "in training mode" in capsys.readouterr().out
    assert main(["audit", target, "--conditions", "eval", "--probes", "change, prefix"]) == 0
    assert "in eval mode, 4 draws, probes change, prefix." in capsys.readouterr().out
    for arguments, words in (
        (
            ["--conditions", "evil"],
            "no condition is called 'evil'; there are eval, code_paths, training, longer, compiled",
        ),
        (["--probes", "chnge"], "no probe is called 'chnge'"),
        (["--probes", ","], "probes=',' would look at nothing"),
    ):
        assert main(["audit", target, *arguments]) == 2
        assert words in capsys.readouterr().err


class Strided(nn.Module):
    """Downsampled by two, mixed, and upsampled again. The convolution is causal, or centred."""

    def __init__(self, *, centred: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.down, self.after = nn.Linear(D, D), nn.Conv1d(D, D, 4, stride=2), nn.Linear(D, D)
        self.centred = centred

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x).mT
        y = nn.functional.pad(y, (1, 1) if self.centred else (3, -1))
        return self.after(x + self.down(y).repeat_interleave(2, dim=-1).mT[:, : x.shape[1]])


def test_strided_modules_are_not_skipped() -> None:
    x = vectors(2, N, D)
    report = lowtri.audit(Strided(centred=True), x, probes=["change"])
    assert report.first is not None and report.first.module == "down", report
    assert lowtri.audit(Strided(centred=False), x, probes=["change"]).ok


class Mixing(nn.Module):
    """Sees what `fault` says, in its part `mix` alone."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.mix, self.after = nn.Linear(D, D), _Mix(fault), nn.Linear(D, D)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.after(self.mix(self.before(x), attention_mask))


class _Mix(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        real = x if mask is None else x * mask[..., None]
        y = real.cumsum(1)
        if self.fault == "rows":
            return y + x.mean(0)
        return y + (x.mean(1, keepdim=True) if mask is not None and self.fault == "pads" else 0)


@pytest.mark.parametrize(("fault", "probe"), [("rows", "batch"), ("pads", "padding")])
def test_leaks_of_rows_and_pads_name_the_module(fault: str, probe: str) -> None:
    more: dict[str, Any] = {"pads": "attention_mask"} if fault == "pads" else {}
    report = lowtri.audit(lowtri.Model(Mixing(fault), **more), vectors(2, N, D), probes=[probe])
    assert report.first is not None and report.first.module == "mix", report
    assert lowtri.audit(lowtri.Model(Mixing(""), **more), vectors(2, N, D), probes=[probe]).ok
