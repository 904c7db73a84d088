"""The demo's act about transformers, on a model trained in a second."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo import context, switched
from demo.context import Context
from lowtri.training.corpus import Document
from lowtri.training.recipe import Recipe
from why_mask.experiment import Setting, why_mask


@pytest.mark.sweep
def test_the_act_keeps_its_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(steps=40, batch=8, context=48, lr=5e-3, validate_every=20)
    text = [Document("rhyme", "the black cat sat on the mat and saw the dog.\n" * 400)]
    monkeypatch.setattr(context, "why_mask", lambda setting, note: why_mask(setting, documents=text, note=note))
    result = switched.run(Context(tmp_path, setting=Setting(layers=2, hidden=32, rows=4, prompt=8, recipe=recipe)))
    assert len(result.checks) == 9 and all(check.passed for check in result.checks), result.checks
    assert result.checks[3].text == "audited with lowtri's attention: no leak found"
    assert "LlamaForCausalLM" in result.text and "BART" in result.text
    assert all((tmp_path / name).stat().st_size for name in result.files)


def test_without_transformers_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switched, "find_spec", lambda name: None)
    result = switched.run(Context(tmp_path))
    assert result.text.endswith("Fix: pip install transformers") and not result.checks
