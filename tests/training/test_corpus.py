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

from lowtri.errors import CallError, DataError
from lowtri.nn.checkpoint import BEGIN, END
from lowtri.training.corpus import (
    BYTES,
    IGNORED,
    Document,
    Packed,
    Recipe,
    encode_document,
    learn,
    read_files,
    rows_of_step,
    split,
)
from python_text import python_text

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


def test_packing_nothing_gives_no_rows() -> None:
    assert Packed.of([]).count(4) == 0


def test_the_digest_tells_other_tokens_and_other_borders() -> None:
    assert Packed.of([[1, 2, 3]]).digest() == Packed.of([[1, 2, 3]]).digest()
    assert len({Packed.of(lists).digest() for lists in ([[1, 2, 3]], [[1, 2], [3]], [[1, 2, 4]])}) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read .*: No such file or directory"),
        (b"  \n", "has no text in it"),
        (b"abc\xff", "is not UTF-8 text: byte 3 is 0xff"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        read_files([path])
    assert str(path) in str(caught.value)


def test_a_folder_is_rejected_as_a_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is a folder.\nFix: name the files in it"):
        read_files([tmp_path])


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


def test_bytes_are_the_smallest_vocabulary() -> None:
    assert TOKENIZERS[0].get_vocab_size() == BYTES
    assert len(TOKENIZERS[0].encode("你好", add_special_tokens=False).ids) == 6
    with pytest.raises(DataError, match="vocabulary: got 100; at least 258 are needed"):
        learn(["abc"], 100)


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


def test_the_order_changes_with_the_seed_and_the_epoch() -> None:
    rows = np.arange(50)
    orders = [rows_of_step(rows, step, Recipe(batch=50, seed=seed)).tolist() for step in (0, 1) for seed in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("steps", [1, 5, 10, 99, 1000])
def test_the_learning_rate_rises_falls_and_ends_on_its_floor(steps: int) -> None:
    recipe = Recipe(steps=steps, lr=2.0, warmup=50, lr_floor=0.1)
    rates = [recipe.lr_at(step) for step in range(steps)]
    top = rates.index(max(rates))
    assert max(rates) == 2.0 and min(rates) > 0
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)
    if steps > 1:
        assert rates[-1] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 0}, "steps: got 0; at least 1 is needed"),
        ({"batch": -1}, "batch: got -1; at least 1 is needed"),
        ({"lr": 0.0}, "lr: got 0.0; a number above 0 is needed"),
        ({"lr": float("nan")}, "lr: got nan; a number above 0 is needed"),
        ({"held_out": 1.0}, "held_out: got 1.0; a share of the rows from 0 to below 1 is needed"),
    ],
)
def test_an_invalid_recipe_is_rejected(options: dict[str, float], words: str) -> None:
    with pytest.raises(CallError, match=words):
        Recipe(**options)  # type: ignore[arg-type]
