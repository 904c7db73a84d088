"""Text to packed rows: nothing is lost, nothing is predicted twice, nothing crosses from one document into another."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus import (
    BEGIN,
    BYTES,
    END,
    IGNORED,
    Packed,
    Recipe,
    Rows,
    encode_document,
    learn,
    read_corpus,
    rows_of_step,
    split,
)
from lowtri.errors import DataError
from python_text import Document, python_text

documents = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=12), min_size=1, max_size=8)


@given(documents, st.integers(1, 9))
@settings(deadline=None, max_examples=100)
def test_every_token_is_a_target_once_unless_it_opens_a_document(lists: list[list[int]], context: int) -> None:
    packed = Packed.of(lists)
    rows = packed.rows(range(packed.count(context)), context)
    flat = [token for tokens in lists for token in tokens]
    owner = [number for number, tokens in enumerate(lists) for _ in tokens]
    covered = packed.count(context) * context
    assert rows.inputs.ravel().tolist() == flat[:covered]
    assert rows.documents.ravel().tolist() == owner[:covered]
    wanted = [flat[i + 1] if owner[i + 1] == owner[i] else IGNORED for i in range(covered)]
    assert rows.targets.ravel().tolist() == wanted
    assert len(flat) - 1 - context < covered <= len(flat) - 1


def test_targets_are_counted_and_a_group_without_rows_computes_one_that_counts_for_nothing() -> None:
    rows = Packed.of([[1, 2, 3], [4, 5, 6, 7], [8]]).rows([0, 1], context=3)
    assert rows.targets.tolist() == [[2, 3, IGNORED], [5, 6, 7]] and rows.predicted == 5
    parts = [rows.share(number, 3) for number in range(3)]
    assert [part.inputs.tolist() for part in parts] == [[[1, 2, 3]], [[4, 5, 6]], [[1, 2, 3]]]
    assert (parts[2].targets == IGNORED).all() and parts[2].predicted == 1


@given(documents, st.integers(1, 4))
@settings(deadline=None, max_examples=50)
def test_groups_share_every_target_once(lists: list[list[int]], groups: int) -> None:
    packed = Packed.of([*lists, [0, 0]])
    rows = packed.rows(range(packed.count(2)), 2) if packed.count(2) else packed.rows([0], 1)
    parts: list[Rows] = [rows.share(number, groups) for number in range(groups)]
    shared = np.concatenate([part.targets.ravel() for part in parts])
    assert sorted(shared[shared != IGNORED]) == sorted(rows.targets[rows.targets != IGNORED])


def test_a_corpus_is_read_from_files_and_one_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    good, latin = tmp_path / "good.txt", tmp_path / "latin.txt"
    good.write_text("the cat", encoding="utf-8")
    latin.write_bytes(b"abc\xff")
    tokenizer, packed = read_corpus([good, good])
    ids = encode_document(tokenizer, "the cat")
    assert packed.ids.tolist() == ids * 2 and packed.documents.tolist() == [0] * len(ids) + [1] * len(ids)
    for path, words in (
        (latin, "can't decode byte 0xff"),
        (tmp_path / "no.txt", "No such file"),
        (tmp_path, "directory"),
    ):
        with pytest.raises(DataError, match=f"cannot be read: .*{words}.*\nFix: a file of UTF-8 text") as caught:
            read_corpus([good, path])
        assert str(caught.value).startswith(str(path))


@pytest.fixture(scope="module")
def python() -> list[Document]:
    return python_text()  # some seconds of parsing


@pytest.mark.sweep
def test_python_brings_text_of_its_own(python: list[Document]) -> None:
    assert sum(len(document.text) for document in python) > 1_000_000
    names = [document.name for document in python]
    assert "topic assert" in names and "json.decoder" in names and len(names) == len(set(names))
    by_name = dict(python)
    assert "Simple JSON <https://json.org> decoder" in by_name["json.decoder"]
    assert by_name["topic assert"].startswith('The "assert" statement')
    assert not any("site-packages" in name or "idlelib" in name for name in names)


@pytest.mark.sweep
def test_python_s_text_is_the_same_in_any_process_and_imports_no_module_of_it(python: list[Document]) -> None:
    program = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from python_text import python_text
before = set(sys.modules)
text = repr(python_text())
print(hashlib.sha256(text.encode()).hexdigest())
print(sorted(set(sys.modules) - before))
"""
    examples = str(Path(python_text.__code__.co_filename).parent)
    command = [sys.executable, "-W", "error", "-c", program, examples]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
    )
    digest, new = ran.stdout.splitlines()
    assert digest == hashlib.sha256(repr(python).encode()).hexdigest()
    assert "tkinter" not in new and "antigravity" not in new and "distutils" not in new


# The tokenizer


@given(st.text(max_size=200))
@settings(deadline=None, max_examples=100)
def test_any_text_survives_bytes_and_merges(text: str) -> None:
    for tokenizer in TOKENIZERS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text


TOKENIZERS = [learn(["the cat sat on the mat, the cat sat"], vocabulary) for vocabulary in (BYTES, 300)]


@pytest.mark.sweep
def test_learning_is_deterministic_and_documents_are_framed(python: list[Document]) -> None:
    texts = [document.text for document in python[:60]]
    once, twice = learn(texts, 1000), learn(texts, 1000)
    assert once.to_str() == twice.to_str()
    assert once.get_vocab_size() == 1000
    ids = encode_document(once, "Hello")
    assert ids[0] == once.token_to_id(BEGIN) == 0 and ids[-1] == once.token_to_id(END) == 1
    assert once.decode(ids) == "Hello"


# The recipe


@given(st.integers(0, 500), st.floats(0, 0.99))
@settings(deadline=None, max_examples=200)
def test_split_is_a_partition_spread_evenly(rows: int, held_out: float) -> None:
    kept, apart = split(rows, held_out)
    assert sorted([*kept, *apart]) == list(range(rows))
    assert len(apart) <= 64
    if held_out and rows > 1:
        assert len(apart) >= 1 and len(kept) >= 1
    if len(apart) > 1:
        gaps = np.diff(apart)
        assert gaps.max() - gaps.min() <= 1


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 5))
@settings(deadline=None, max_examples=100)
def test_every_row_is_seen_once_an_epoch(count: int, batch: int, seed: int) -> None:
    rows = np.arange(100, 100 + count)
    recipe = Recipe(batch=batch, seed=seed)
    steps = -(-2 * count // batch)
    seen = np.concatenate([rows_of_step(rows, step, recipe) for step in range(steps)])
    assert sorted(seen[:count]) == sorted(seen[count : 2 * count]) == rows.tolist()


@pytest.mark.parametrize("steps", [1, 5, 10, 99, 1000])
def test_the_learning_rate_rises_falls_and_ends_on_its_floor(steps: int) -> None:
    recipe = Recipe(steps=steps, lr=2.0, warmup=50, lr_floor=0.1)
    rates = [recipe.lr_at(step) for step in range(steps)]
    top = rates.index(max(rates))
    assert max(rates) == 2.0 and min(rates) > 0
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)
    if steps > 1:
        assert rates[-1] == pytest.approx(0.2)


def test_random_numbers_differ_between_steps_and_processes_and_not_between_runs() -> None:
    seeds = [Recipe(seed=seed).seed_at(step, rank) for seed in (0, 1) for step in (0, 1) for rank in (0, 1)]
    assert len(set(seeds)) == 8 and seeds[0] == Recipe().seed_at(0, 0)
