"""Drafts that branch: a tree in a cache equals each of its paths alone, and ``keep`` leaves the path that was accepted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtri
from lowtri.errors import CallError, MaskError

MASKS = ["causal", "causal & window(5)", "causal & (window(4) | first(2))", "causal & chunks(6)", "causal & strided(2)"]
D = 4


def tokens(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal((3, *shape, D))


def paths(parents: list[int]) -> list[list[int]]:
    """For each draft its ancestors, from the root, and itself."""
    found: list[list[int]] = []
    for draft, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), draft])
    return found


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    return [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(1, 7)))]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(MASKS), trees(), st.integers(1, 20), st.data())
def test_each_draft_gets_what_its_path_alone_gets(mask: str, parents: list[int], n: int, data: st.DataObject) -> None:
    """Then a path is kept, and the text goes on as if it had been appended alone; twice, with two layers, in blocks of one."""
    cache, block = lowtri.KVCache(mask, block=1), 0
    text = tokens(0, 2, n)  # (3, H, N, D)
    for layer in (0, 1):
        cache.attend(*text, layer=layer)
    for seed in (1, 2):
        drafts = tokens(seed, 2, len(parents))
        for layer in (0, 1):
            out = cache.attend(*drafts, layer=layer, mask=lowtri.tree(parents))
            for draft, path in enumerate(paths(parents)):
                whole = np.concatenate([text, drafts[:, :, path]], 2)
                np.testing.assert_allclose(out[:, draft], lowtri.attention(*whole, mask)[:, -1], atol=1e-12)
        path = data.draw(st.sampled_from(paths(parents)))
        kept = path[: data.draw(st.integers(0, len(path)))]
        cache.keep(kept)
        text = np.concatenate([text, drafts[:, :, kept]], 2)
        assert cache.length == text.shape[2] and cache.next_positions(1).tolist() == [text.shape[2]]
    for block in range(3):
        new = tokens(9 + block, 2, 2)
        text = np.concatenate([text, new], 2)
        for layer in (0, 1):
            out = cache.attend(*new, layer=layer)
            np.testing.assert_allclose(out, lowtri.attention(*text, mask)[:, -2:], atol=1e-12)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("mask", MASKS)
def test_rows_that_keep_other_paths_differ_in_length(mask: str, kind: str) -> None:
    convert = (lambda x: x) if kind == "numpy" else torch.from_numpy
    cache, text, parents = lowtri.KVCache(mask, block=1), tokens(0, 2, 1, 9), [[-1, 0, 0, 1], [-1, -1, 1, 2]]
    cache.attend(*map(convert, text))
    rows = [text[:, b] for b in (0, 1)]
    for seed, index in ((1, [[0, 1, 3], [1, -1, -1]]), (2, [[0, 2, -1], [1, 2, 3]])):
        drafts = tokens(seed, 2, 1, 4)
        out = np.asarray(cache.attend(*map(convert, drafts), mask=lowtri.tree(parents)))
        for b in (0, 1):
            for draft, path in enumerate(paths(parents[b])):
                whole = np.concatenate([rows[b], drafts[:, b][:, :, path]], 2)
                np.testing.assert_allclose(out[b, :, draft], lowtri.attention(*whole, mask)[:, -1], atol=1e-12)
        cache.keep(index)
        rows = [
            np.concatenate([row, drafts[:, b][:, :, [i for i in index[b] if i >= 0]]], 2) for b, row in enumerate(rows)
        ]
        assert cache.next_positions(1).tolist() == [[row.shape[2]] for row in rows]
    new = tokens(5, 2, 1, 1)
    out = np.asarray(cache.attend(*map(convert, new)))
    for b, row in enumerate(rows):
        whole = np.concatenate([row, new[:, b]], 2)
        np.testing.assert_allclose(out[b], lowtri.attention(*whole, mask)[:, -1:], atol=1e-12)


def test_keeping_the_first_tokens_is_crop() -> None:
    kept, cropped = lowtri.KVCache("causal & window(3)", block=2), lowtri.KVCache("causal & window(3)", block=2)
    for n, stays in ((4, 4), (3, 1), (5, 0), (1, 1), (6, 4)):
        x = tokens(n, n)
        start = cropped.length
        for cache in (kept, cropped):
            cache.append(x[1], x[2])
        kept.keep(range(stays))
        cropped.crop(start + stays)
        assert kept.length == cropped.length and str(kept) == str(cropped)


def test_a_mask_for_one_call_may_show_what_is_held() -> None:
    q, k, v = tokens(0, 12)
    cache = lowtri.KVCache("causal & window(4)", block=1)
    cache.attend(q[:11], k[:11], v[:11])
    cache.append(k[:0], v[:0])
    new = slice(11, 12)
    other = lowtri.KVCache("causal")
    other.append(k[:11], v[:11])
    for one, mask in ((cache, "causal & window(2)"), (other, "causal & first(5)"), (other, "causal - first(3)")):
        out = one.attend(q[new], k[new], v[new], mask=mask)
        np.testing.assert_allclose(out, lowtri.attention(q, k, v, mask)[new], atol=1e-12)
        one.crop(11)
    keys, _, positions = other.append(k[new], v[new], mask="causal")
    np.testing.assert_array_equal(keys, k)
    assert positions.tolist() == list(range(12))


def held_of(cache: lowtri.KVCache, row: int = 0) -> list[tuple[int, int]]:
    """Positions and keys of what the next token sees, itself included."""
    token = np.full((cache.rows, 1, 1, 1), 99.0)
    keys, _, positions = cache.append(token, token)
    of_row = np.broadcast_to(positions, (cache.rows, positions.shape[-1]))[row]
    return [(int(at), int(key)) for at, key in zip(of_row, keys[row, 0, :, 0], strict=True) if at >= 0]


@pytest.mark.parametrize(
    ("change", "index", "expected"),
    [
        (lambda cache: cache.crop(6), [1], [11]),
        (lambda cache: cache.drop([7]), [0, 1], [10, 11]),
        (lambda cache: cache.drop([5]), [2, 0], [12, 10]),
        (lambda cache: cache.crop(3), [], []),
        (lambda cache: cache.keep([3, 1]), [1], [11]),
    ],
    ids=["crop", "drop the last", "drop one within", "crop into the text", "keep"],
)
def test_what_is_left_of_an_append_is_kept(change: Any, index: list[int], expected: list[int]) -> None:
    cache = lowtri.KVCache()
    for numbers in ([0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]):
        tokens_of = np.array(numbers).reshape(1, 1, 4, 1)
        cache.append(tokens_of, tokens_of)
    change(cache)
    text = list(range(min(4, cache.length)))
    cache.keep(index)
    assert held_of(cache) == list(enumerate([*text, *expected, 99]))


@pytest.mark.parametrize(
    ("change", "gone"),
    [(lambda cache: cache.crop(9), 2), (lambda cache: cache.drop([9]), 2), (lambda cache: cache.shift(0), 1)],
    ids=["crop", "drop", "shift"],
)
def test_what_was_removed_of_an_append_cannot_be_kept(change: Any, gone: int) -> None:
    cache = appended()
    change(cache)
    before = cache.draw()
    with pytest.raises(CallError, match=r"keep: index names a token where its row has none \(position -1\)"):
        cache.keep([gone])
    assert cache.draw() == before


def test_rows_keep_of_their_own_append_after_they_were_reordered() -> None:
    cache = lowtri.KVCache()
    for start in (0, 10):
        numbers = np.array([[start, start + 1], [start + 5, start + 6]], float).reshape(2, 1, 2, 1)
        cache.append(numbers, numbers, positions=[[-1, 0], [0, 1]] if start == 0 else None)
    cache.reorder([1, 0, 1])
    cache.keep([[1], [0], [0]])
    expected = ([5, 6, 16, 99], [1, 10, 99], [5, 6, 15, 99])
    for row, numbers_of in enumerate(expected):
        assert held_of(cache, row) == list(enumerate(numbers_of))
        cache.crop([3, 2, 3])


def appended() -> lowtri.KVCache:
    cache = lowtri.KVCache("causal & window(2)", block=1)
    for n in (6, 1, 3):
        cache.append(np.zeros((2, 1, n, D)), np.zeros((2, 1, n, D)))
    return cache


Z = np.zeros((2, 1, 2, D))
ERRORS = [
    (lambda: appended().keep([0, 3]), r"keep: index reaches 3, but the newest append has the tokens 0 .. 2"),
    (
        lambda: appended().keep([1, 1]),
        r"keep: index is \[\[1, 1\]\]; it names each token once, and -1 stands at the end",
    ),
    (lambda: appended().keep([[0, 1], [-1, 0]]), r"it names each token once, and -1 stands at the end of a row"),
    (lambda: appended().keep([[0]]), r"keep: index is \(1, 1\); expected \(n,\) for all rows, or \(2, n\)"),
    (lambda: appended().keep(0), r"keep: index is \(\); expected"),
    (
        lambda: appended().attend(Z, Z, Z, mask=lowtri.tree([-1, 0, 0])),
        r"attend: the tree has 3 drafts, but 2 tokens are appended.\nFix: a token for each draft",
    ),
    (
        lambda: appended().attend(Z, Z, Z, positions=[10, 12], mask=lowtri.tree([-1, 0])),
        r"attend: the drafts of a tree stand at consecutive positions.\nFix: no positions=",
    ),
    (
        lambda: appended().attend(Z, Z, Z, mask="causal"),
        r"attend: causal may show keys that are evicted, since causal & window\(2\) hides them from now on.\nFix: mask & the",
    ),
]


@pytest.mark.parametrize(("act", "words"), ERRORS, ids=[words[:40] for _, words in ERRORS])
def test_errors(act: Any, words: str) -> None:
    with pytest.raises((CallError, MaskError), match=words) as caught:
        act()
    assert len(str(caught.value).splitlines()) <= 3


def test_every_layer_must_have_seen_the_drafts() -> None:
    cache = lowtri.KVCache()
    for layer in (0, 1):
        cache.append(Z, Z, layer=layer)
    cache.append(Z, Z, layer=0)
    with pytest.raises(CallError, match="keep: some layers have not seen the newest tokens yet"):
        cache.keep([0])
    ended = lowtri.KVCache()
    ended.append(Z, Z, positions=[[0, 1], [0, -1]])
    with pytest.raises(CallError, match=r"keep: index names a token where its row has none \(position -1\).\nFix: -1"):
        ended.keep([0, 1])
