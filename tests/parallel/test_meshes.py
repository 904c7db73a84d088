"""Groups of a DeviceMesh: rows over "dp", tokens of a row over "sp", with torch's own wrappers around the model."""

from __future__ import annotations

import re

import pytest
from mesh_on_ranks import gradients, meshes
from ranks import Ranks


@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_gradients_are_those_of_one_process(ranks: Ranks, kind: str) -> None:
    assert max(ranks.run(gradients, kind)) < 1e-5


@pytest.mark.sweep
def test_sweep_a_compiled_model_has_the_gradients_of_one_process(ranks: Ranks) -> None:
    assert max(ranks.run(gradients, "compiled")) < 1e-5


def test_a_dimension_of_a_mesh_is_a_group(ranks: Ranks) -> None:
    words = [
        "rank . of 2",
        "rank . of 2",
        r"mesh of 2 dimensions, \('dp', 'sp'\).*Fix: mesh\[\"sp\"\]",
        "2 ranks.*4 proc",
    ]
    for messages in ranks.run(meshes):
        for message, expected in zip(messages, words, strict=True):
            assert re.search(expected, message, re.S), message
