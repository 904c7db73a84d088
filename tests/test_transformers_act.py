"""The demo's act about transformers, on a model trained in a second."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtri.cli.acts import stage, switched
from lowtri.cli.acts.stage import Stage
from lowtri.training.corpus import Document
from lowtri.training.experiment import Setting, why_mask
from lowtri.training.recipe import Recipe


def test_the_act_keeps_its_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(steps=40, batch=8, context=48, lr=5e-3, validate_every=20)
    text = [Document("rhyme", "the black cat sat on the mat and saw the dog.\n" * 400)]
    monkeypatch.setattr(stage, "why_mask", lambda setting, note: why_mask(setting, documents=text, note=note))
    told = switched.play(Stage(tmp_path, setting=Setting(layers=2, hidden=32, rows=4, prompt=8, recipe=recipe)))
    assert len(told.promises) == 8 and all(promise.kept for promise in told.promises), told.promises
    assert told.promises[2].text == "audited on this road: no leak found"
    assert "LlamaForCausalLM" in told.text and "BART" in told.text
    assert all((tmp_path / name).stat().st_size for name in told.files)


def test_without_transformers_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switched, "find_spec", lambda name: None)
    told = switched.play(Stage(tmp_path))
    assert told.text.endswith("Fix: pip install transformers") and not told.promises
