"""The experiment that trains with the mask and without it: how it measures and what it writes.

What it finds is in test_what_was_asked.py.
The small experiment takes half a minute; both it, which `make demo` runs, and that of `examples/why_mask` and `make tour` are sweeps.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from experiments import experiment

import lowtri
from why_mask.consequences import as_text, draw
from why_mask.experiment import SHORT, Experiment, why_mask
from why_mask.modes import all_at_once, prefix_anew, with_a_cache
from why_mask.words import Known


@pytest.fixture(scope="module", params=[pytest.param(size, marks=pytest.mark.sweep) for size in ("small", "full")])
def found(request: pytest.FixtureRequest) -> Experiment:
    return experiment(request.param)


def test_both_models_began_alike_and_differ_by_their_mask_alone(found: Experiment) -> None:
    assert (found.masked.mask, found.unmasked.mask) == ("causal", "full")
    right, wrong = found.models["causal"], found.models["full"]
    assert {name: p.shape for name, p in right.state_dict().items()} == {
        name: p.shape for name, p in wrong.state_dict().items()
    }
    ids = torch.randint(2, 258, (1, 16), generator=torch.Generator().manual_seed(0))
    lowtri.assert_causal(right, ids)
    with pytest.raises(lowtri.LeakError, match=r"position \d+ sees position \d+"):
        lowtri.assert_causal(wrong, ids)


def test_c_the_modes_compute_what_they_say(found: Experiment) -> None:
    model = found.models["causal"]
    ids = torch.randint(2, 258, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(all_at_once(model, ids), model(ids))
        torch.testing.assert_close(prefix_anew(model, ids, "full")[:, 4], model(ids[:, :5], mask="full")[:, 4])
    assert with_a_cache(model, ids).shape == (2, 9, 258)


def test_the_text_says_every_figure(found: Experiment) -> None:
    text = as_text(found)
    losses = (found.masked.training, found.unmasked.validation, found.unmasked.stepwise, found.unigram, found.uniform)
    for figure in losses:
        assert f"{figure:.3f}" in text
    for shares in (found.masked.words, found.unmasked.words, found.real, found.letters):
        assert re.search(rf" {shares.words:.0%} +{shares.pairs:.0%} +{shares.counted:,}\n", text)
    assert repr(found.masked.written[0]) in text and repr(found.unmasked.written[0]) in text
    known = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert known["unmasked"]["stepwise"] == found.unmasked.stepwise
    assert [point["step"] for point in known["masked"]["curve"]][-1] == found.setting.recipe.steps


def test_the_picture(found: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert draw(found, tmp_path / "why.png")
    assert (tmp_path / "why.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw(found, tmp_path / "none.png")
    assert [path.name for path in tmp_path.iterdir()] == ["why.png"]


def test_known_words_and_their_order() -> None:
    known = Known.of(["The cat sat on the mat.", "A dog sat."])
    assert known.shares(["(the cat sat on the mat)"]) == (6, 1.0, 1.0)
    assert known.shares(["(mat the on sat cat the)"]) == (6, 1.0, 0.0)  # the same words, in the wrong order
    assert known.shares(["(cat cow)", "(DOG)"]) == (3, 2 / 3, 0.0)  # a pair never spans two texts
    assert known.shares(["at the cat sa"]) == (2, 1.0, 1.0)  # what stands at an edge may be cut off
    assert known.shares(["x 1 ?"]) == (0, 0.0, 0.0)


def test_a_text_that_is_too_short() -> None:
    with pytest.raises(lowtri.DataError, match="the text has 5 tokens, and one row takes 65"):
        why_mask(SHORT, texts=["abc"])
    apart = ["x" * 20] * 40
    with pytest.raises(
        lowtri.DataError, match=r"no row of 64 tokens .* within one document.\nFix: more text, or a smaller"
    ):
        why_mask(SHORT, texts=apart)


@pytest.mark.sweep
def test_the_example_runs(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "why_mask"
    done = subprocess.run(
        [sys.executable, script, "--out", tmp_path, "--steps", "10"], capture_output=True, text=True, check=True
    )
    assert "1. Cheating" in done.stdout and "4. No generation" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"why-mask.json", "why-mask.png"}
