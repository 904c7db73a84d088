"""A cache under masks that show the future: either every query gets all keys that its mask shows, or an append is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_masks import HEADS, ROWS, Case, cases
from random_masks import SIZE as MOST

import lowtri
from lowtri import KVCache, generate
from lowtri.errors import CallError
from lowtri.nn import Decoder, DecoderConfig, MultiHeadAttention

N, SIZE = 48, 4
Q, K, V = np.random.default_rng(0).normal(size=(3, HEADS, N, SIZE))


def chunks(mask, sizes, **options):
    """Outputs (H, N, SIZE) of the tokens appended in chunks."""
    cache, outputs, start = KVCache(mask, **options), [], 0
    for size in sizes:
        new = slice(start, start + size)
        outputs.append(cache.attend(Q[:, new], K[:, new], V[:, new]))
        start += size
    return np.concatenate(outputs, 1)


FUTURE = {
    "causal | first(16)": r"the query at 0 the key at 1, .*\nFix: append all tokens up to 15 in one call; or KVCache",
    "band(2, 2)": r"the query at 0 the key at 1, .*\nFix: append all tokens up to 2 in one call",
    "chunks(4)": r"the query at 0 the key at 1, .*\nFix: append all tokens up to 3 in one call",
    "documents(lengths=[6, 40], open_end=True)": r"the query at 0 the key at 1, .*\nFix: append all tokens up to 5 in one call",
    "full": r"the query at 0 the key at 1, .*\nFix: attend to the whole sequence in one call; or .*allow_missing=True",
    "strided(100)": r"the query at 0 the key at 100, .*\nFix: attend to the whole sequence in one call",
    "~causal": r"the query at 0 the key at 1, ",
    "causal | first(40) - first(39)": r"the query at 0 the key at 39, .*\nFix: append all tokens up to 39 in one call",
    "heads([causal, full])": r"the query at 0 the key at 1, ",
}


@pytest.mark.parametrize("mask", FUTURE)
def test_a_query_before_a_key_that_it_may_see_is_refused(mask):
    with pytest.raises(CallError, match=FUTURE[mask]):
        chunks(mask, [1] * N if mask != "strided(100)" else [N])


@pytest.mark.parametrize(
    ("mask", "sizes"),
    [
        ("causal | first(16)", [16] + [1] * 32),
        ("causal | first(16)", [20, 5, 1, 22]),
        ("chunks(4)", [4] * 12),
        ("chunks(4)", [8, 12, 28]),
        ("causal | documents(lengths=[6, 42], open_end=True)", [6, 42]),
        ("band(2, 0)", [1] * N),
        ("causal | first(40) - first(39)", [40] + [1] * 8),
    ],
)
def test_a_prefix_within_one_append_is_accepted(mask, sizes):
    if mask == "causal | documents(lengths=[6, 42], open_end=True)":
        mask = "causal | documents(lengths=[6, 42, 1], open_end=True) & first(48)"  # the last document goes on, so it is ended here
    assert np.abs(chunks(mask, sizes) - lowtri.attention(Q, K, V, mask)).max() < 1e-12


def test_a_refused_append_changes_nothing():
    cache = KVCache("causal | first(16)")
    for size in (1, 9, 15):
        with pytest.raises(CallError, match=rf"the query at 0 the key at {size}, which is not in the cache yet"):
            cache.append(K[:, :size], V[:, :size])
        assert cache.length == cache.held == 0
    found = cache.attend(Q[:, :16], K[:, :16], V[:, :16])
    assert np.abs(found - lowtri.attention(Q[:, :16], K[:, :16], V[:, :16], "causal | first(16)")).max() < 1e-12


def test_allow_missing_for_the_keys_of_an_encoder():
    for mask in ("full", "band(2, 2)"):
        with pytest.raises(CallError, match="not in the cache yet"):
            chunks(mask, [N])
        found = chunks(mask, [N], allow_missing=True)
        assert np.abs(found - lowtri.attention(Q, K, V, mask)).max() < 1e-12
    steps = chunks("full", [1] * N, allow_missing=True)
    assert np.abs(steps - lowtri.attention(Q, K, V, "causal")).max() < 1e-12, "each query sees the keys that are there"


def test_where_tiles_are_partial_the_append_of_the_key_is_refused():
    def two_ahead(q, k):
        return np.maximum(k - q, 0) <= 2  # a function whose tile answers are not known

    cache = KVCache(lowtri.where(two_ahead))
    cache.append(K[:, :5], V[:, :5])  # nobody can say yet whether a sixth token comes
    with pytest.raises(CallError, match=r"shows the query at 3 the key at 5, which comes only after it.\nFix: "):
        cache.append(K[:, 5:6], V[:, 5:6])
    assert cache.length == 5
    cache.crop(0)
    cache.append(K[:, :N], V[:, :N])
    far = KVCache("strided(1000)")
    far.append(K, V)
    with pytest.raises(CallError, match="shows the query at 2 the key at 1002, which comes only after it"):
        far.append(K[:, :1], V[:, :1], [1002])


def test_formulas_and_tables_that_are_causal_are_never_refused():
    table = np.tril(np.random.default_rng(1).random((N, N)) < 0.5)
    for mask in (
        lowtri.where(lambda q, k: k <= q),
        lowtri.table(table),
        lowtri.table(np.stack([table, table.T & table])),
    ):
        if mask.batch:
            mask = lowtri.heads([mask.for_row(0), mask.for_row(1)])
        for sizes in ([1] * N, [7, 1, 1, 30, 9]):
            assert np.abs(chunks(mask, sizes) - lowtri.attention(Q, K, V, mask)).max() < 1e-12


def test_rows_of_different_lengths_are_checked_separately():
    """Under a prefix of 4, a row with 4 tokens is whole and a row with 3 is not."""
    k = np.ones((2, 1, 6, SIZE))
    with pytest.raises(CallError, match="the query at 0 the key at 3, which is not in the cache yet"):
        KVCache("causal | first(4)").append(k[:, :, :4], k[:, :, :4], [[0, 1, 2, 3], [-1, 0, 1, 2]])
    cache = KVCache("causal | first(4)")
    cache.append(k, k, [[0, 1, 2, 3, 4, 5], [-1, -1, 0, 1, 2, 3]])
    cache.append(k[:, :, :1], k[:, :, :1], [[-1], [4]])  # a row that has ended
    lengths = lowtri.causal() | lowtri.keys(lengths=[2, 5])  # each row with a prefix of its own
    KVCache(lengths).append(k[:, :, :5], k[:, :, :5])
    with pytest.raises(CallError, match="the query at 0 the key at 4, which is not in the cache yet"):
        KVCache(lengths).append(k[:, :, :4], k[:, :, :4])


def test_a_row_that_starts_again_is_checked_while_others_are_past_the_prefix():
    cache, k = KVCache("causal | first(4)"), np.ones((2, 1, 6, SIZE))
    cache.append(k, k)
    cache.crop([6, 0])
    with pytest.raises(CallError, match="the query at 0 the key at 1, which is not in the cache yet"):
        cache.append(k[:, :, :2], k[:, :, :2], [[6, 7], [-1, 0]])
    cache.append(k, k, [[6, 7, 8, 9, 10, 11], [-1, -1, 0, 1, 2, 3]])


def test_a_crop_within_a_prefix_is_refused():
    cache = KVCache("causal | first(4)")
    cache.append(K[:, :6], V[:, :6])
    cache.crop(5)
    cache.append(K[:, 5:6], V[:, 5:6])
    words = r"crop: n is \[2\], but .* shows the query at 0, which stays, the key at 2.\nFix: crop to 0 or earlier"
    with pytest.raises(CallError, match=words):
        cache.crop(2)
    assert cache.length == 6
    cache.crop(0)
    cache.append(K[:, :6], V[:, :6])


def decoder(mask):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": N}
    return Decoder(DecoderConfig(vocab_size=20, mask=mask, **sizes)).eval()


def test_models_refuse_such_appends_and_generate_allows_them():
    model, ids = decoder("full"), torch.arange(5)[None]
    with pytest.raises(CallError, match="full shows the query at 0 the key at 1"), torch.no_grad():
        model(ids[:, :1], cache=model.make_cache())
    cache = model.make_cache(allow_missing=True)
    with torch.no_grad():
        assert torch.allclose(model(ids, cache=cache), model(ids), atol=1e-5)
    assert len(list(generate(model, [1, 2, 3], 5))) == 5, "a model that peeks writes with what is there"


def test_a_module_refuses_a_cache_of_another_mask():
    module = MultiHeadAttention(8, 2, mask="full")
    with pytest.raises(CallError, match=r"the mask is full, but the cache drops keys by causal.\nFix: KVCache\(mask\)"):
        module(torch.zeros(1, 1, 8), cache=KVCache("causal"))


# Random masks, random appends


@st.composite
def schedules(draw):
    """Appends and crops: each step is ("append", positions (R, n), with pads and gaps) or ("crop", n)."""
    steps, length = [], [0, 0]
    for _ in range(draw(st.integers(1, 7))):
        if max(length) and draw(st.integers(0, 5)) == 0:
            length = [draw(st.integers(0, one)) for one in length]
            steps.append(("crop", list(length)))
            continue
        together = draw(st.booleans()) and length[0] == length[1]
        n, rows = draw(st.integers(1, 6)), []
        for b in range(1 if together else ROWS):
            kinds = draw(st.lists(st.sampled_from([0, 0, 0, 0, 0, 1, -1]), min_size=n, max_size=n))
            row = []
            for kind in kinds:  # a pad, the next position, or one position left out
                row.append(-1 if kind < 0 or length[b] + kind >= MOST else length[b] + kind)
                length[b] = max(length[b], row[-1] + 1)
            rows.append(row)
        length = [length[0]] * ROWS if together else length
        steps.append(("append", rows))
    return steps


def tokens(rows, seed):
    return np.random.default_rng(seed).normal(size=(3, ROWS, HEADS, len(rows[0]), SIZE))


def check(case: Case, steps, block: int) -> None:
    """Whatever was not taken back equals one call over all tokens, or the append or crop at fault raises."""
    cache, done, length = KVCache(case.mask, block=block), [], [0] * ROWS
    for seed, (what, where) in enumerate(steps):
        q, k, v = tokens(where, seed) if what == "append" else (None,) * 3
        given = np.array(where if len(where) > 1 else where * ROWS)
        output, refused = None, ""
        try:
            if what == "crop":
                cache.crop(where)
            else:
                output = cache.attend(q, k, v, where if len(where) > 1 else where[0])
        except CallError as error:
            refused = str(error)
        if refused:  # a crop further back than what was dropped is refused under any mask
            assert "are evicted" in refused or _at_fault(case, what, given, length), f"{case.mask!r}: {refused}"
            return
        if what == "crop":
            for one in done:
                one[4][one[4] >= given[:, None]] = -1
            length = list(where)
        else:
            done.append((q, k, v, output, given.copy()))
            length = np.maximum(length, given.max(1) + 1).tolist()
    if not done:
        return
    q, k, v, found = (np.concatenate([one[i] for one in done], 2) for i in range(4))
    at = np.concatenate([one[4] for one in done], 1)
    expected = lowtri.attention(q, k, v, case.mask, q_positions=at, k_positions=at, engine="reference")
    real = np.broadcast_to((at >= 0)[:, None, :, None], found.shape)
    assert np.abs(found - expected)[real].max(initial=0) < 1e-9, f"{case.mask!r} after {steps}"


def _at_fault(case: Case, what, given, length) -> bool:
    """Whether a query would miss a key that may still come or comes now, or has seen one that goes: pair by pair.

    Old queries and keys that go count as ranges, so positions that were left out are among them.
    """
    for b in range(ROWS):
        if what == "crop":
            stay, new, later = range(given[b]), [], range(given[b], length[b])
        else:
            stay, new = range(length[b]), [int(p) for p in given[b] if p >= 0]
            later = range(max([length[b], *(p + 1 for p in new)]), 4 * MOST)
        if _shows(case, stay, later if what == "crop" else new, b) or _shows(case, new, later, b):
            return True
    return False


def _shows(case: Case, q, k, b: int) -> bool:
    try:
        return any(case.sees(i, j, b, h) for i in q for j in k for h in range(HEADS))
    except IndexError:
        return True  # beyond a table: its oracle does not know, and tiles may (`table | full`)


@settings(max_examples=150, deadline=None)
@given(
    cases,
    schedules(),
    st.sampled_from([1, 3, 64]),
)
def test_random_masks_and_appends_are_correct_or_refused(case, steps, block):
    check(case, steps, block)


@pytest.mark.sweep
@settings(max_examples=4000, deadline=None)
@given(
    cases,
    schedules(),
    st.sampled_from([1, 3, 64]),
)
def test_many_random_masks_and_appends_are_correct_or_refused(case, steps, block):
    check(case, steps, block)


@pytest.mark.parametrize("mask", ["causal | first(20)", "band(9, 1)", "causal & window(5)", "full"])
def test_without_the_check_the_outputs_are_wrong(mask):
    """Else the sweep would compare nothing: without the check the masks of the future are wrong by far."""
    steps = chunks(mask, [1] * N, allow_missing=True)
    away = np.abs(steps - lowtri.attention(Q, K, V, mask)).max()
    assert (away > 0.1) == (not lowtri.mask(mask).is_causal(N))


@pytest.mark.parametrize("mask", ["causal", lowtri.table(np.tril(np.ones((4, 4), bool)))])
def test_an_append_of_no_tokens_and_a_shift_of_an_empty_cache_change_nothing(mask):
    cache = lowtri.KVCache(mask)
    nothing, three = np.zeros((2, 0, 8)), np.zeros((2, 3, 8))
    cache.append(nothing, nothing)
    cache.shift(0)
    cache.append(three, three)
    cache.append(nothing, nothing)
    assert (cache.held, cache.evicted, cache.length) == (3, 0, 3)


def test_a_shift_that_moves_nothing_leaves_the_default_positions():
    cache = lowtri.KVCache("causal")
    token = np.zeros((2, 1, 8))
    cache.append(token, token)
    cache.shift(0)
    cache.append(token, token)
    assert cache._slots.visible_slots.k is None
