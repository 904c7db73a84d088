"""The encoder-decoder of `examples/translate.py`: who sees whom in its three attentions, and that it learns to translate.

A model of seconds serves the questions that need no skill; the one that the example trains is among the sweeps.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtri

SCRIPT = Path(__file__).parents[2] / "examples" / "translate.py"


def _loaded() -> Any:
    spec = importlib.util.spec_from_file_location("translate_example", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


example = _loaded()
SMALL = replace(example.Setting(), size=32, heads=2, steps=60, batch=16, held_out=20)
SUNDAY = date(2024, 3, 17)


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any, list[float]]:
    return example.train(SMALL)


# The mapping.


def test_dates_in_two_languages() -> None:
    assert {form: example.written(SUNDAY, *form) for form in example.FORMS} == {
        ("full", "en"): ("Sunday, March 17, 2024", "Minggu, 17 Maret 2024"),
        ("full", "en_GB"): ("Sunday, 17 March 2024", "Minggu, 17 Maret 2024"),
        ("long", "en"): ("March 17, 2024", "17 Maret 2024"),
        ("long", "en_GB"): ("17 March 2024", "17 Maret 2024"),
        ("medium", "en"): ("Mar 17, 2024", "17 Mar 2024"),
        ("medium", "en_GB"): ("17 Mar 2024", "17 Mar 2024"),
    }


@pytest.mark.sweep
def test_no_source_has_two_translations_and_no_letter_is_unknown() -> None:
    letters, found = example.Letters(), {}
    days = example.split(SMALL)[0][::40]
    for source, target in (example.written(day, *form) for day in days for form in example.FORMS):
        assert found.setdefault(source, target) == target
        assert letters.text(letters.rows([source])[0].tolist()) == source
        assert letters.text(letters.rows([target], target=True)[0].tolist()) == target
    assert len(found) > 5 * len(days)


def test_held_out_dates_are_not_trained_on() -> None:
    learnt, held_out = example.split(SMALL)
    assert len(held_out) == 20 and len(learnt) + 20 == example.DAYS
    assert not set(learnt) & set(held_out)
    assert (min(learnt + held_out), max(learnt + held_out)) == (date(1900, 1, 1), date(2099, 12, 31))


# The three attentions.


@pytest.mark.sweep
def test_it_learns(trained: Any) -> None:
    _, letters, losses = trained
    uniform = torch.tensor(float(len(letters))).log()
    assert abs(losses[0] - uniform) < 1
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]


@pytest.mark.sweep
def test_the_same_setting_gives_the_same_weights(trained: Any) -> None:
    brief = replace(SMALL, steps=8)
    (one, _, losses), (two, _, again) = example.train(brief), example.train(brief)
    assert losses == again
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    other = example.train(replace(brief, seed=1))[2]
    assert other != losses


@pytest.mark.sweep
def test_maps_of_a_trained_model(trained: Any, tmp_path: Path) -> None:
    model, letters, _ = trained
    source, target = example.written(SUNDAY, "full", "en")
    m, n = len(source), len(target) + 1  # START stands in front
    maps = example.maps_of(model, letters, source, target)
    for name, (nq, nk) in {"encoder": (m, m), "decoder": (n, n), "cross": (n, m)}.items():
        assert [tuple(weights.shape) for weights in maps[name]] == [(2, nq, nk)] * 2
        for weights in maps[name]:
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, nq), atol=1e-5, rtol=0)
            future = torch.ones(nq, nk).triu(1).bool()
            assert (weights[:, ~future] > 0).all()
            assert (weights[:, future] == 0).all() if name == "decoder" else (weights[:, future] > 0).all()
    example.draw(maps, "causal", source, target, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heads.png", "maps.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


@pytest.mark.sweep
@torch.no_grad()
def test_pads_leave_no_trace(trained: Any) -> None:
    model, letters, _ = trained
    long, short = example.written(SUNDAY, "full", "en"), example.written(SUNDAY, "medium", "en")
    alone = model(letters.rows([short[0]]), letters.rows([short[1]], target=True))
    kept = model.embedding.weight[example.PAD].clone()
    try:
        model.embedding.weight[example.PAD] = torch.nan
        source, target = letters.rows([long[0], short[0]]), letters.rows([long[1], short[1]], target=True)
        together = model(source, target)[1:, : alone.shape[1]]
    finally:
        model.embedding.weight[example.PAD] = kept
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.sweep
def test_a_cache_changes_no_letter_and_neighbours_do_not_either(trained: Any) -> None:
    model, letters, _ = trained
    sources = [example.written(SUNDAY, *form)[0] for form in example.FORMS]
    together = example.translate(model, letters, sources)
    assert together == example.translate(model, letters, sources, cached=False)
    assert together == [example.translate(model, letters, [source])[0] for source in sources]
    assert len(set(together)) > 1  # a model that always writes the same would say nothing here


@pytest.mark.sweep
@torch.no_grad()
def test_the_decoder_is_audited(trained: Any) -> None:
    model, letters, _ = trained
    source, target = example.written(SUNDAY, "full", "en_GB")
    context, there = model.read(letters.rows([source]))
    ids = letters.rows([target], target=True)[:, :-1]

    def told(ids: torch.Tensor) -> torch.Tensor:
        return model.write(ids, example.places(ids), (context.expand(len(ids), -1, -1), there))

    lowtri.assert_causal(lowtri.Model(told, vocab_size=len(letters)), ids)
    unmasked = example.Translator(replace(SMALL, mask="full"), len(letters)).eval()
    unmasked.load_state_dict(model.state_dict())
    model = unmasked
    with pytest.raises(lowtri.LeakError, match="position 0 sees position"):
        lowtri.assert_causal(lowtri.Model(told, vocab_size=len(letters)), ids)


# The whole example.


@pytest.mark.sweep
def test_the_example_translates_dates_that_it_never_saw(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--out", tmp_path], capture_output=True, text=True, check=True)
    assert "translated exactly: " in done.stdout and "of 500 held-out dates, each in 6 forms" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heads.png", "maps.png", "translate.json"]
    assert json.loads((tmp_path / "translate.json").read_text("utf-8"))["exact"] > 0.99


@pytest.mark.sweep
def test_a_decoder_that_sees_the_future_translates_nothing() -> None:
    setting = replace(example.Setting(), steps=250, held_out=20)
    share, loss = {}, {}
    for mask in ("causal", "full"):
        model, letters, losses = example.train(replace(setting, mask=mask))
        share[mask] = example.exact(model, letters, example.split(setting)[1])[0]
        loss[mask] = sum(losses[-20:]) / 20
    assert loss["full"] < loss["causal"] < 0.2
    assert share["causal"] > 0.5 and share["full"] < 0.02


@pytest.mark.sweep
def test_without_babel_it_says_what_to_install() -> None:
    run = f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    code = f"import sys, runpy; sys.modules['babel'] = None; sys.argv = ['translate.py']; {run}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Babel, which knows the dates, is not installed. Fix: pip install babel" in done.stderr.replace("\n", " ")
