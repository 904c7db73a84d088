"""The recipe "Adding a mask" of CONTRIBUTING.md, executed: its file is written, imported, and tested by the laws."""

from __future__ import annotations

import doctest
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import test_laws as laws
from random_masks import Case

from lowtri import causal, first, heads, mask
from lowtri.errors import MaskError
from lowtri.masks.mask import CONSTRUCTORS
from lowtri.masks.plan import plan
from lowtri.masks.text import from_text, to_text

RECIPE = Path(__file__).parents[2].joinpath("CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPE = RECIPE.split("## Adding a mask")[1].split("\n## ")[0]
TILES = [(a, a + n, b, b + m) for a in range(0, 12, 2) for b in range(0, 12, 3) for n in (1, 2, 5) for m in (1, 3, 6)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The module of the recipe's first block of code."""
    file = tmp_path_factory.mktemp("recipe") / "dilated.py"
    file.write_text(RECIPE.split("```python\n")[1].split("```")[0], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("dilated", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dilated"] = module  # so that its masks can be pickled
    spec.loader.exec_module(module)
    yield module
    del sys.modules["dilated"], CONSTRUCTORS["dilated"]


def dilated_cases(recipe: ModuleType) -> Iterator[Case]:
    for n, step in [(1, 1), (3, 1), (1, 4), (3, 2), (2, 5), (9, 3)]:

        def sees(q: int, k: int, b: int, h: int, n: int = n, step: int = step) -> bool:
            return any(k == q - i * step for i in range(n))

        made = recipe.dilated(n, step)
        yield Case(made, sees)
        yield Case(~made, lambda *at, sees=sees: not sees(*at))
        yield Case(causal() - made | first(2), lambda q, k, *at, sees=sees: (k <= q and not sees(q, k, *at)) or k < 2)


LAWS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (laws.test_arrays_of_positions_agree_with_single_pairs, ()),
    (laws.test_dense_pairs_and_is_causal_agree_with_the_pairs, ()),
    (laws.test_tile_answers_are_never_wrong, (TILES,)),
    (laws.test_arrays_of_tiles_agree_with_single_tiles, (TILES,)),
    (laws.test_the_repr_can_be_read, ()),
    (laws.test_masks_are_values, ()),
    (laws.test_at_is_one_row_and_head_of_the_batch, ()),
]


@pytest.mark.parametrize(("law", "more"), LAWS, ids=[law.__name__ for law, _ in LAWS])
def test_the_mask_of_the_recipe_keeps_the_laws(recipe: ModuleType, law: Any, more: tuple[Any, ...]) -> None:
    for case in dilated_cases(recipe):
        law.hypothesis.inner_test(case, *more)


def test_its_plan_is_its_table(recipe: ModuleType) -> None:
    for case in dilated_cases(recipe):
        n = np.arange(200)
        np.testing.assert_array_equal(plan(case.mask, n, n, tile_k=32).dense(), case.mask.dense(200))


def test_text_and_serialisation_derive_from_its_fields(recipe: ModuleType) -> None:
    made = recipe.dilated(3, 2)
    assert repr(made) == "dilated(3, 2)" and mask("dilated(3, step=2)") == made
    joined = heads([made & causal(), ~made])
    assert from_text(*to_text(joined)) == joined
    with pytest.raises(MaskError, match="Did you mean dilated"):
        mask("dilatet(3, 2)")


def test_its_picture_and_its_errors(recipe: ModuleType) -> None:
    assert doctest.testmod(recipe).failed == 0
    with pytest.raises(MaskError, match="dilated: step is 0"):
        recipe.dilated(3, 0)
