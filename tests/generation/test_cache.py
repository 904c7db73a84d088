"""KVCache: attention over its keys is attention over all keys, and keys that no later query can see are evicted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import lowtri
from lowtri import KVCache
from lowtri.errors import CallError, MaskError

ROWS, HEADS, SIZE = 2, 2, 3


def tokens(n, seed=0):
    """Queries, keys and values of n tokens, (ROWS, HEADS, n, SIZE); one key/value head serves both query heads."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(ROWS, HEADS, n, SIZE)), *rng.normal(size=(2, ROWS, 1, n, SIZE))


def masks(n):
    """Masks of all kinds, for n positions."""
    rng = np.random.default_rng(n)
    causal, window, first = lowtri.causal(), lowtri.window(5), lowtri.first(2)
    return {
        "causal": causal,
        "window": window,
        "window of one": lowtri.window(1),
        "sinks": causal & (window | first),
        "prefix": causal | lowtri.first(4),
        "documents": causal & lowtri.documents(lengths=[n // 3 + 1, n // 4 + 1, n], open_end=True),
        "documents of rows": causal & lowtri.documents(np.sort(rng.integers(0, 4, (ROWS, n)), 1)),
        "chunks": causal & lowtri.chunks(4),
        "strided": causal & lowtri.strided(3),
        "keys of rows": causal & lowtri.keys(rng.random((ROWS, n)) < 0.6) & lowtri.window(7),
        "lengths": causal & lowtri.keys(lengths=[n // 2, n]),
        "a formula": lowtri.window(6) & lowtri.where(lambda q, k: (q * k) % 3 != 1),
        "a table": lowtri.table(np.tril(rng.random((ROWS, n, n)) < 0.5)),
        "heads": lowtri.heads([lowtri.window(3), lowtri.window(6) | lowtri.first(1) & causal]),
        "heads of rows": lowtri.heads([causal & lowtri.keys(rng.random((ROWS, n)) < 0.5), lowtri.window(2)]),
        "hidden all": causal - lowtri.full(),
    }


NAMES = sorted(masks(12))


def ragged(n, pads):
    """Places of n tokens in each row, the first pads[b] of them pads."""
    return np.maximum(np.arange(n) - np.array(pads)[:, None], -1)


def whole_prefix(name, sizes, pads=(0,)):
    """The sizes of the appends; a prefix of four, which sees itself in both directions, comes in the first of them."""
    return [4 + max(pads), *sizes] if name == "prefix" else sizes


def check(mask, sizes, block, pads=None, capacity=0):
    """Append in chunks; the queries get from the cache what they get from one call over all tokens, later ones included."""
    n = sum(sizes)
    q, k, v = tokens(n)
    cache, start = KVCache(mask, block=block, capacity=capacity), 0
    for size in sizes:
        new = slice(start, start + size)
        if pads is None:
            places, every, keys, values, held = None, np.arange(n)[None], *cache.append(k[:, :, new], v[:, :, new])
        else:
            every = ragged(n, pads)
            places = every[:, new] if start <= max(pads) else None  # once no pad comes any more it counts on alone
            keys, values, held = cache.append(k[:, :, new], v[:, :, new], places)
        found = lowtri.attention(q[:, :, new], keys, values, mask, q_positions=every[:, new], k_positions=held)
        expected = lowtri.attention(q[:, :, new], k, v, mask, q_positions=every[:, new], k_positions=every)
        assert np.abs(found - expected).max(initial=0) < 1e-12, f"{mask!r}, {sizes} at {start}"
        start += size
    assert cache.held + cache.evicted == (n if pads is None else max(0, n - min(pads)))
    return cache


@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block", [1, 3, 16])
def test_long_runs_of_single_tokens_and_long_chunks(name, block):
    mask, mixed = masks(300)[name], [100, *[1] * 50, 60, *[1] * 40, 50]
    check(mask, whole_prefix(name, [1] * 296 if name == "prefix" else [1] * 300), block)
    check(mask, mixed, block)
    if name != "a table":
        check(mask, mixed, block, (0, 37))


@pytest.mark.parametrize(
    ("mask", "alive"), [("window(100)", 100), ("causal & (window(100) | first(4))", 104), ("causal & chunks(128)", 128)]
)
def test_a_window_has_fixed_memory_over_thousands_of_tokens(mask, alive):
    cache, sizes = KVCache(mask, block=16), set()
    token = np.ones((1, 1, 4), np.float32)
    for t in range(5000):
        keys, _, places = cache.append(token, token)
        if t >= 1000:
            sizes.add((cache.capacity, cache.bytes))
            assert len(places) == keys.shape[1] <= cache.capacity
    assert len(sizes) == 1, f"memory moved: {sizes}"
    assert alive <= cache.capacity <= 1.5 * alive
    assert cache.held <= cache.capacity and cache.held + cache.evicted == 5000


def test_the_slots_of_a_window_are_few_runs():
    cache, token = KVCache("causal & (window(64) | first(4))", block=16), np.ones((1, 1, 4))
    for t in range(1000):
        _, _, places = cache.append(token, token)
        real = places[places >= 0]
        assert np.count_nonzero(np.diff(real) != 1) <= 2, f"the places at {t} are cut into too many runs: {real}"


def test_memory_after_a_long_prompt_shrinks_to_the_window():
    cache = KVCache("window(50)")
    prompt, token = torch.zeros(1, 2, 5000, 4), torch.zeros(1, 2, 1, 4)
    keys, _, _ = cache.append(prompt, prompt)
    assert keys.shape[2] == 5000, "the prompt's own queries see their own windows"
    long = cache.bytes
    cache.append(token, token)
    assert cache.held == 50 and cache.bytes < long / 20


def test_keys_of_finished_documents_are_evicted():
    cache = KVCache(lowtri.causal() & lowtri.documents(lengths=[200, 200, 200], open_end=True), block=8)
    token = np.ones((1, 1, 2))
    for _ in range(450):
        cache.append(token, token)
    assert 50 <= cache.held <= 100 and cache.evicted >= 350


def test_a_key_is_evicted_when_no_row_can_see_it():
    mask = lowtri.causal() & lowtri.keys(np.array([[False, True, False], [False, False, True]]))
    cache, token = KVCache(mask, block=1), np.ones((2, 1, 1, 2))
    for _ in range(5):
        _, _, places = cache.append(token, token)
    assert sorted(places[places >= 0]) == [1, 2, 3, 4], "key 0 is hidden from both rows, 1 and 2 from one each"


def test_causal_grows_by_doubling_and_returns_views():
    cache, token = KVCache("causal", block=8), torch.ones(1, 2, 1, 4)
    capacities = []
    for t in range(200):
        keys, values, places = cache.append(token * t, -token * t)
        capacities.append(cache.capacity)
        assert keys.shape == (1, 2, t + 1, 4) and places.tolist() == list(range(t + 1))
    assert torch.equal(keys[0, 0, :, 0], torch.arange(200.0)) and torch.equal(values, -keys)
    assert len(set(capacities)) <= 6 and all(c % 8 == 0 for c in capacities)
    again, _, _ = cache.append(token, token)
    assert again.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr(), "a view, not a copy"


def test_the_initial_capacity_is_allocated_at_once():
    cache, token = KVCache("causal", capacity=100), torch.ones(1, 2, 1, 4)
    cache.append(token, token)
    held = cache.bytes
    for _ in range(99):
        cache.append(token, token)
    assert cache.capacity == 100 and cache.bytes == held == 2 * 100 * 2 * 4 * 4
    assert repr(cache) == "KVCache(causal): 100 held, 0 evicted, 6400 bytes"


def test_one_allocator_serves_all_layers():
    mask, n = lowtri.causal() & (lowtri.window(4) | lowtri.first(1)), 40
    cache, every = KVCache(mask, block=2), [tokens(n, seed) for seed in range(3)]
    for t in range(n):
        for layer, (q, k, v) in enumerate(every):
            assert cache.next_positions(1, layer).tolist() == [t]
            keys, values, places = cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1], layer=layer)
            found = lowtri.attention(q[:, :, t : t + 1], keys, values, mask, q_positions=[t], k_positions=places)
            expected = lowtri.attention(q[:, :, : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], mask)[:, :, -1:]
            assert np.abs(found - expected).max() < 1e-12
    assert cache.evicted > 25 and cache.bytes == 3 * 2 * cache.capacity * ROWS * SIZE * 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_torch_of_any_dtype_and_without_gradients(dtype):
    cache = KVCache("window(3)", block=2)
    token = torch.ones(2, 1, 1, 4, dtype=dtype, requires_grad=True)
    for _ in range(10):
        keys, values, _ = cache.append(token, token[..., :2])
    assert keys.dtype == values.dtype == dtype and not keys.requires_grad
    assert keys.shape[3] == 4 and values.shape[3] == 2


@pytest.mark.parametrize("shape", [(1, 4), (2, 1, 4), (3, 2, 1, 4)])
def test_keys_of_every_rank(shape):
    cache = KVCache("causal")
    for t in range(3):
        keys, _, _ = cache.append(np.full(shape, t), np.full(shape, t))
    assert keys.shape == (*shape[:-2], 3, 4)


def test_an_append_of_no_tokens():
    cache, none, token = KVCache("window(3)"), np.ones((1, 0, 2)), np.ones((1, 1, 2))
    assert cache.append(none, none)[2].shape == (0,)
    cache.append(token, token)
    assert cache.append(none, none)[2].tolist() == [0] and cache.append(none, none, [])[2].tolist() == [0]
    assert cache.append(token, token)[2].tolist() == [0, 1]


def test_positions_returned_before_a_crop_are_checked_again():
    cache, token = KVCache("causal"), np.ones((1, 2, 2))
    cache.append(token, token)
    told = cache.next_positions(2)
    cache.append(token, token, told)
    with pytest.raises(CallError, match=r"positions \[2, 3\] go back"):
        cache.append(token, token, told)
    told = cache.next_positions(2)
    cache.crop(3)
    assert cache.append(token, token, told)[2].tolist() == [0, 1, 2, 4, 5]


# crop and reorder


def test_crop_refuses_positions_whose_keys_are_evicted():
    cache, token = KVCache("window(4)", block=1), np.ones((1, 1, 2))
    for _ in range(20):
        cache.append(token, token)
    cache.crop(19)
    with pytest.raises(CallError, match=r"crop: n is \[7\], but keys that queries before \[19\] may see are evicted"):
        cache.crop(7)
    with pytest.raises(CallError, match=r"crop: n is \[-1\]; it is the position of the next token, at least 0"):
        cache.crop(-1)
    with pytest.raises(CallError, match="one for all or one for each of 1 rows"):
        cache.crop([19, 19])


def test_reorder_refuses_missing_rows_and_rows_with_another_mask():
    cache, token = KVCache(lowtri.causal() & lowtri.keys([[True], [False], [True]])), np.ones((3, 1, 1, 2))
    cache.append(token, token)
    cache.reorder([2, 1, 0])  # rows 0 and 2 have the same mask
    with pytest.raises(
        CallError, match=r"index is \[1, 1, 2\], but .* differs from row to row, and masks are not reordered"
    ):
        cache.reorder([1, 1, 2])
    with pytest.raises(CallError, match=r"index is \[3\], but the cache has the rows 0 .. 2"):
        cache.reorder([3])
    flat = KVCache("causal")
    flat.append(token[0], token[0])
    with pytest.raises(CallError, match="have no batch"):
        flat.reorder([0, 0])


# What does not fit


def test_appends_that_do_not_fit_are_refused():
    cache, token = KVCache("causal"), np.ones((2, 1, 3, 4))
    with pytest.raises(CallError, match=r"keys \(2, 1, 3, 4\) float64 and values \(2, 1, 2, 4\) float64 do not fit"):
        cache.append(token, token[:, :, :2])
    cache.append(token, token)
    for k in (token.astype(np.float32), token[:1], token[..., :2], np.ones((2, 2, 3, 4))) * 2:  # no wrong one is learnt
        with pytest.raises(CallError, match="do not continue layer 0, whose keys are"):
            cache.append(k, k)
    with pytest.raises(
        CallError, match=r"positions \(2,\) do not fit 3 new tokens in 2 rows: expected \(3,\) or \(2, 3\)"
    ):
        cache.append(token, token, [3, 4])
    with pytest.raises(
        CallError,
        match=r"positions \[2, 3, 4\] go back: the next position is \[3\], and positions must increase.\nFix: crop",
    ):
        cache.append(token, token, [2, 3, 4])
    with pytest.raises(CallError, match=r"positions \[3, 5, 5\] go back"):
        cache.append(token, token, [3, 5, 5])
    with pytest.raises(CallError, match="append: positions is float64"):
        cache.append(token, token, [3.0, 4.0, 5.0])
    cache.append(token, token, [3, -1, 7])  # pads anywhere, and gaps
    assert cache.length == 8
    for arguments in ([[1.0]], token, token), (token, [[1.0]], token), (token, token, [[1.0]]):
        for one in (KVCache("causal"), cache):
            with pytest.raises(CallError, match=r"(attend|append): [qkv] is list, but it takes NumPy arrays or torch"):
                one.attend(*arguments)
    for sizes in ({"capacity": "x"}, {"block": 1.5}, {"rewind": -1}):
        with pytest.raises(CallError, match=r"KVCache: .* it counts tokens, from"):
            KVCache("causal", **sizes)


def test_layers_receive_the_same_appends():
    cache, token = KVCache("causal"), np.ones((1, 1, 2))
    cache.append(token, token, layer=0)
    cache.append(token, token, layer=1)
    cache.append(token, token, layer=0)
    with pytest.raises(CallError, match="layer 1 brings other tokens than the layer before it: 2 of them, after 1"):
        cache.append(np.ones((1, 2, 2)), np.ones((1, 2, 2)), layer=1)
    with pytest.raises(CallError, match="layer 1 has not seen the tokens that layer 0 already has"):
        cache.append(token, token, layer=0)
    with pytest.raises(CallError, match="crop: some layers have not seen the newest tokens yet"):
        cache.crop(0)
    with pytest.raises(CallError, match="same positions"):
        cache.append(token, token, [5], layer=1)
    cache.append(token, token, [1], layer=1)
    with pytest.raises(CallError, match="layer 2 comes late: the other layers have seen 2 appends"):
        cache.append(token, token, layer=2)


def test_masks_and_sizes_that_do_not_fit_are_refused():
    with pytest.raises(CallError, match="capacity is -1; it counts tokens, from 0"):
        KVCache("causal", capacity=-1)
    with pytest.raises(MaskError):
        KVCache("casual")
    with pytest.raises(CallError, match=r"keys \(3, 1, 1, 2\) float64 do not fit .*, whose batch is \(2,\)"):
        KVCache(lowtri.keys([[True], [True]])).append(np.ones((3, 1, 1, 2)), np.ones((3, 1, 1, 2)))


# Positions by content


def test_positions_changed_in_place_are_read_again():
    cache, k = KVCache("causal"), np.ones((1, 2, 2))
    told = cache.next_positions(2)
    told += 5
    assert cache.append(k, k, told)[2].tolist() == [5, 6]
    told += 1
    with pytest.raises(CallError, match="go back"):
        cache.append(k, k, told)
    layers = KVCache("causal")
    for same in (np.arange(2), torch.arange(2)):
        layers = KVCache("causal")
        layers.append(k, k, same, layer=0)
        same += 7
        with pytest.raises(CallError, match="All layers of an append have the same positions"):
            layers.append(k, k, same, layer=1)
        follows = layers.next_positions(2, layer=1)
        follows -= 1
        with pytest.raises(CallError, match="All layers of an append have the same positions"):
            layers.append(k, k, follows, layer=1)
        follows += 1
        assert layers.append(k, k, follows, layer=1)[2].tolist() == [0, 1]


def test_returned_positions_cannot_change_the_cache():
    cache, k = KVCache("causal"), np.ones((1, 2, 2))
    _, _, places = cache.append(k, k)
    with pytest.raises(ValueError, match="read-only"):
        places[0] = -1
    assert cache.append(k, k)[2].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("far", [np.array([2**63], np.uint64), [2**63 - 1], [2**62], torch.tensor([2**62])])
def test_positions_beyond_the_last_are_refused(far):
    k = np.ones((1, 1, 2))
    with pytest.raises(CallError, match=r"append: positions reaches \d+, but positions lie below 2"):
        KVCache("causal").append(k, k, far)


# Append and attend


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_attend_is_append_and_attention(kind):
    mask, n = lowtri.causal() & (lowtri.window(5) | lowtri.first(2)), 40
    q, k, v = (torch.from_numpy(x) if kind == "torch" else x for x in tokens(n))
    every = ragged(n, (3, 0))
    for options in ({}, {"scale": 0.3, "softcap": 5.0, "engine": "reference"}):
        expected = lowtri.attention(q, k, v, mask, q_positions=every, k_positions=every, **options)
        cache, start = KVCache(mask, block=2), 0
        for size in (7, *[1] * 30, 3):
            new = slice(start, start + size)
            found = cache.attend(q[:, :, new], k[:, :, new], v[:, :, new], every[:, new], **options)
            assert float(abs(found - expected[:, :, new]).max()) < 1e-12
            start += size
    with pytest.raises(
        CallError, match=r"attend: queries .* do not fit: each new token brings a query, a key and a value"
    ):
        cache.attend(q[:, :, :2], k[:, :, :1], v[:, :, :1])
    assert cache.length == n


@pytest.mark.parametrize("mask", ["causal", "causal & window(40)", "causal & (window(20) | first(4))"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_attend_has_the_bits_of_append_and_attention(mask, dtype):
    """In every layer, for tokens that lie in memory as projections leave them, with padding, and under autocast."""
    torch.manual_seed(0)
    one, two = KVCache(mask, block=8, rewind=20), KVCache(mask, block=8, rewind=20)

    def step(n, positions=None, sinks=None):
        for layer in range(2):
            q, k, v = (torch.randn(2, n, heads, 32, dtype=dtype).transpose(1, 2) for heads in (4, 2, 2))
            found = one.attend(q, k, v, positions, layer, sinks=sinks)
            now = two.next_positions(n, layer) if positions is None else positions
            keys, values, k_positions = two.append(k, v, positions, layer)
            expected = lowtri.attention(q, keys, values, mask, sinks=sinks, q_positions=now, k_positions=k_positions)
            assert torch.equal(found, expected)

    step(20)
    for _ in range(60):
        step(1)
    step(3)
    with torch.autocast("cpu", torch.bfloat16):
        step(1)
    step(1, sinks=torch.randn(4, dtype=dtype))
    with torch.inference_mode():
        step(1)
    for cache in (one, two):
        cache.crop(80)
    step(1)
    step(2, np.array([[-1, 81], [81, 82]]))
    for _ in range(3):
        step(1)


@pytest.mark.parametrize("mask", ["causal", "causal & window(4)"])
@pytest.mark.parametrize("crop", [(10, 15), (12, 17), (9, 17)])
def test_a_row_with_holes_goes_on_alone(mask, crop):
    """Rows that are cropped to other lengths leave holes, which no bound of the positions may hide."""
    cache, x = KVCache(mask, block=4, rewind=8), torch.randn(2, 2, 40, 32)
    for t in range(17):
        cache.append(x[:, :, t : t + 1], x[:, :, t : t + 1])
    cache.crop(crop)
    cache.reorder([0])
    for t in range(crop[0], 40):
        found = cache.attend(*[x[:1, :, t : t + 1]] * 3)
        expected = lowtri.attention(*[x[:1, :, : t + 1]] * 3, mask, engine="reference")[:, :, -1:]
        torch.testing.assert_close(found, expected, rtol=0, atol=16 * 2**-23 * float(x.abs().max()))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, inside forward mode
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache.")
def test_what_torch_traces_sees_the_tokens_that_are_written():
    x, y = torch.randn(1, 2, 3, 32), torch.randn(1, 2, 3, 32)

    def two_appends(x):
        cache = KVCache("causal")
        cache.attend(x, x, x)
        return cache.attend(x[:, :, :1], x[:, :, :1], x[:, :, :1])

    def at_once(x):
        joined = torch.cat([x, x[:, :, :1]], 2)
        return lowtri.attention(joined, joined, joined, "causal")[:, :, -1:]

    for found, expected in (
        (torch.func.jvp(two_appends, (x,), (y,))[1], torch.func.jvp(at_once, (x,), (y,))[1]),
        (make_fx(two_appends)(y)(x), at_once(x)),
        (torch.compile(two_appends, backend="eager", dynamic=False)(x), at_once(x)),
    ):
        torch.testing.assert_close(found, expected)


def test_a_cache_reordered_in_inference_mode_is_written_outside_of_it():
    cache, x = KVCache("causal"), torch.randn(2, 1, 4, 8)
    with torch.inference_mode():
        cache.append(x, x)
        cache.reorder([1, 0])
    keys, _, _ = cache.append(x[:, :, :1], x[:, :, :1])
    assert torch.equal(keys[:, :, :4], x[[1, 0]])


def test_keys_that_autograd_has_saved_cannot_change_in_silence():
    cache, x = KVCache("causal"), torch.randn(1, 2, 4, 8)
    q = x.clone().requires_grad_()
    output = cache.attend(q, x, x)
    cache.crop(2)
    cache.attend(x[:, :, :1], x[:, :, :1], x[:, :, :1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_slots_without_a_token_hold_numbers():
    """Users multiply what append returns by weights that are 0 in free slots, and 0 times NaN is NaN."""
    cache, x = KVCache("causal & window(4)", block=4), torch.ones(2, 1, 8)
    torch.use_deterministic_algorithms(True)  # new memory is then filled with NaN
    try:
        for _ in range(30):
            keys, values, positions = cache.append(x, x)
            assert keys.isfinite().all() and values.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)
    assert (positions < 0).any()


@pytest.mark.parametrize(
    ("mask", "prompt", "most"),
    [("causal", 4000, 4544), ("causal & window(4096)", 3500, 4992), ("causal & (window(1024) | first(4))", 900, 1344)],
)
def test_a_long_prompt_leaves_few_slots_unused(mask, prompt, most):
    cache, tokens, token = KVCache(mask), np.zeros((1, prompt, 1)), np.zeros((1, 1, 1))
    cache.append(tokens, tokens)
    capacities = []
    for _ in range(500 if mask == "causal" else 1500):
        cache.append(token, token)
        capacities.append(cache.capacity)
    assert max(capacities) <= most


def test_layers_repeat_a_call_only_where_theirs_is_equal():
    """A layer with another scale, cap, head size, dtype, strides or thread count than the one before it is computed by itself."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 30, 32), torch.randn(1, 2, 30, 32)
    wide, wide_k = torch.randn(1, 4, 30, 64), torch.randn(1, 2, 30, 64)
    strided = torch.randn(1, 30, 4, 32).transpose(1, 2)
    calls = [
        (q, k, {}),
        (q, k, {}),
        (q, k, {"scale": 0.5}),
        (q, k, {"softcap": 2.0}),
        (wide, wide_k, {}),
        (q.double(), k.double(), {}),
        (strided, k, {}),
        (-q, torch.randn(1, 2, 30, 32), {}),
        (q, k, {"sinks": torch.randn(4)}),
        (q, k, {}),
    ]
    cache, parts, repeated = KVCache("causal & window(7)", block=4), [[] for _ in calls], 0
    for start, stop in [(0, 9), *[(t, t + 1) for t in range(9, 30)]]:
        for layer, (queries, keys, options) in enumerate(calls):
            part = [x[:, :, start:stop].clone() for x in (queries, keys, keys)]  # contiguous, as in a model
            parts[layer].append(cache.attend(*part, layer=layer, **options))
            repeated += cache._repeatable is not None and cache._repeatable.appends == cache._slots.appends
    for (queries, keys, options), found in zip(calls, parts, strict=True):
        expected = lowtri.attention(queries, keys, keys, "causal & window(7)", engine="reference", **options)
        torch.testing.assert_close(torch.cat(found, 2), expected, rtol=2e-5, atol=2e-5)
    assert repeated > 20


def test_a_layer_that_repeats_a_call_is_checked_as_the_others_are():
    cache, x = KVCache("causal"), torch.randn(1, 2, 8, 32)
    token = x[:, :, :1].clone()
    for layer in range(3):
        cache.attend(x, x, x, layer=layer)
    for _ in range(3):
        for layer in range(3):
            cache.attend(token, token, token, layer=layer)
    cache.attend(token, token, token, layer=0)
    with pytest.raises(CallError, match="append: layer 1 has not seen the tokens that layer 0 already has"):
        cache.attend(token, token, token, layer=0)
    with pytest.raises(CallError, match="append: layer 1 brings other tokens than the layer before it"):
        cache.attend(token, token, token, [99], layer=1)
    with pytest.raises(CallError, match="do not continue layer 1"):
        cache.attend(token.double(), token.double(), token.double(), layer=1)
    for layer in (1, 2):
        cache.attend(token, token, token, layer=layer)
    assert cache.length == 12
