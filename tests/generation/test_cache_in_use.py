"""Caches in real loops: long windows, streams past the context, beams and rejected drafts, in batches with ragged prompts.

Every loop is held against the same loop without a cache that forgets: the full forward, or a cache that keeps everything.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import lowtri
from lowtri import KVCache, generate
from lowtri.errors import CallError
from lowtri.generation.generate import Sampling, next_token
from lowtri.nn import Decoder, DecoderConfig
from lowtri.nn.positions import apply_rotary, rotary_tables

VOCABULARY = 61
RAGGED = (9, 2, 14)


def decoder(mask, *, seed=0, dtype=torch.float64, **options):
    """A small model in Mistral's shape whose attention matters: random weights, far larger than trained ones begin.

    In float64, so that two ways to the same logits never choose different tokens.
    """
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Decoder(
        DecoderConfig(**{"vocab_size": VOCABULARY, "mask": mask, "max_position_embeddings": 4500, **sizes, **options})
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.mul_(8)
    return model.eval().to(dtype)


def prompts(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, n).tolist() for n in lengths]


def keeps_all(mask):
    """A cache under the same mask that drops nothing."""
    cache = KVCache("causal")
    cache.mask = lowtri.mask(mask)
    return cache


def turner(model):
    """How this model's keys move to other places."""
    size, theta = model.config.head_dim, model.config.rope_theta
    return lambda keys, moved, layer: apply_rotary(keys, *rotary_tables(moved, size, theta))


def padded(rows):
    """Ids (B, N) with pads on the left, and their places, -1 at pads; no places where there is no pad."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    places = np.array([[*[-1] * (longest - len(row)), *range(len(row))] for row in rows])
    return ids, places if places.min() < 0 else None


@torch.no_grad()
def drawn(model, cache, prompt, n):
    """n tokens drawn after a prompt, the logits they were drawn from, and after each step the bytes of the cache.

    Drawn as ``generate`` does with seed 0; greedy tokens of an untrained model soon go in a circle that any cache can follow.
    """
    new, tokens, logits, held, rng = torch.tensor([prompt]), [], [], [], np.random.default_rng((0, 0))
    for _ in range(n):
        logits.append(model(new, cache=cache, logits_to_keep=1)[0, -1])
        tokens.append(next_token(logits[-1].numpy(), Sampling(temperature=1.0), rng))
        held.append(cache.bytes)
        new = torch.tensor([tokens[-1:]])
    return tokens, torch.stack(logits), held


# Windows


LONG = pytest.param(256, 4096, marks=pytest.mark.sweep)


@pytest.mark.sweep
@pytest.mark.not_emulated
@pytest.mark.parametrize(("window", "n"), [(32, 400), LONG])
@pytest.mark.parametrize("sinks", [0, 4])
def test_a_window_with_eviction_generates_the_tokens_of_a_cache_with_all_keys(window, n, sinks):
    mask = f"causal & (window({window}) | first({sinks}))" if sinks else f"causal & window({window})"
    model, prompt = decoder(mask), prompts(7)[0]
    ring, every = model.make_cache(), keeps_all(mask)
    tokens, logits, held = drawn(model, ring, prompt, n)
    expected, exact, grown = drawn(model, every, prompt, n)
    assert tokens == expected and len(set(tokens[-100:])) > 10
    assert tokens[:400] == list(generate(model, prompt, 400, temperature=1.0))
    assert float((logits - exact).abs().max()) < 1e-6 * float(exact.abs().max())
    # What is held, in bytes and in tokens.
    settled = held[2 * window :]
    assert len(set(settled)) == 1, f"memory moved after {2 * window} tokens: {sorted(set(settled))}"
    assert ring.capacity <= window + sinks + 2 * 64  # what is visible, and the block between two looks, in whole blocks
    assert (
        settled[0] == ring.bytes == 2 * 2 * ring.capacity * 2 * 8 * 8
    )  # keys and values, layers, slots, heads, D, bytes
    assert grown[-1] > held[-1] * n / window / 4
    assert ring.held + ring.evicted == every.held == len(prompt) + n - 1 and every.evicted == 0
    assert ring.held < window + sinks + 64 and ring.evicted > n - window - 64


def test_without_the_window_the_tokens_differ():
    """Else the test above would compare nothing."""
    model, prompt = decoder("causal & window(32)"), prompts(7)[0]
    assert drawn(model, model.make_cache(), prompt, 200)[0] != drawn(model, KVCache("causal"), prompt, 200)[0]


@pytest.mark.not_emulated
@pytest.mark.parametrize(("window", "n"), [(32, 400), LONG])
def test_float32_logits_of_a_window_are_as_exact_as_with_all_keys(window, n):
    """Both err by their own rounding; the exact ones are those of the whole row at once, in float64."""
    mask, prompt = f"causal & window({window})", prompts(7)[0]
    model, exact_model = (decoder(mask, dtype=dtype) for dtype in (torch.float32, torch.float64))
    ids = list(generate(model, prompt, n, temperature=1.0))
    row = torch.tensor([prompt + ids[:-1]])
    with torch.no_grad():
        exact = exact_model(row)[0, len(prompt) - 1 :]
        off = {}
        for name, cache in {"ring": model.make_cache(), "all": keeps_all(mask)}.items():
            first = model(row[:, : len(prompt)], cache=cache, logits_to_keep=1)[0]
            rest = [model(row[:, t : t + 1], cache=cache)[0] for t in range(len(prompt), row.shape[1])]
            off[name] = (torch.cat([first, *rest]).double() - exact).abs()
    ulp = torch.finfo(torch.float32).eps * float(exact.abs().max())
    assert float(off["ring"].max()) <= 2 * float(off["all"].max()) + 2 * ulp
    rms = {name: float(x.square().mean().sqrt()) for name, x in off.items()}
    assert rms["ring"] <= 1.5 * rms["all"]


@pytest.mark.not_emulated
@pytest.mark.parametrize("window", [16, 48])
def test_a_window_is_the_sliding_window_of_mistral(window):
    """The same weights in transformers' own model, with its own sliding cache."""
    from transformers import MistralConfig, MistralForCausalLM

    model = decoder(f"causal & window({window})")
    c = model.config
    sizes = {name: getattr(c, name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")}
    heads = {name: getattr(c, name) for name in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps")}
    theirs = MistralForCausalLM(
        MistralConfig(
            vocab_size=VOCABULARY, max_position_embeddings=c.max_position_embeddings, sliding_window=window,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, eos_token_id=None, **sizes, **heads,
        )
    )  # fmt: skip
    theirs.load_state_dict(model.state_dict())
    theirs = theirs.eval().double()
    row = torch.tensor(prompts(20))
    out = theirs.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=150, do_sample=False, pad_token_id=0)
    assert out[0, 20:].tolist() == list(generate(model, row[0], 150))


# Streams past the context


class Unturned:
    """What a stream means, as slowly as can be: one row, all keys as they were before rotary embedding, turned at each step.

    A shift closes the gap: the tokens that the next query sees are told by the mask, those behind the first ``keep`` places
    stand from ``keep`` on, and everybody else is gone.
    """

    def __init__(self, model):
        self.mask, self.turn = model.mask, turner(model)
        self.places = np.zeros(0, np.int64)  # of all tokens so far, -1 where gone
        self.length = 0
        self.keys, self.values = {}, {}

    def shift(self, keep, turn):
        seen = np.array([p >= 0 and self.mask(self.length, int(p)) for p in self.places])
        behind = seen & (self.places >= keep)
        self.length = keep + np.count_nonzero(behind)
        self.places = np.where(seen, self.places, -1)
        self.places[behind] = np.arange(keep, self.length)

    def next_positions(self, n, layer=0):
        return self.length + np.arange(n)

    def append(self, k, v, positions=None, layer=0):
        if layer == 0:
            self.places = np.concatenate([self.places, positions])
            self.length = int(positions[-1]) + 1
        for held, new in ((self.keys, self.turn(k, -np.asarray(positions), layer)), (self.values, v)):
            held[layer] = torch.cat([held[layer], new], 2) if layer in held else new
        return self.turn(self.keys[layer], self.places, layer), self.values[layer], self.places


STREAM, SINKS = "causal & (window(16) | first(4))", 4


@torch.no_grad()
def stream(model, cache, rows, n, *, limit=None, at=()):
    """Greedy tokens (N, B) after the prompts, their logits, and at which of the steps places were shifted.

    That is before a token would stand at ``limit``, or where ``at`` says.
    """
    new, positions = padded(rows)
    tokens, logits, shifts = [], [], []
    for step in range(n):
        if step in at if limit is None else cache.length >= limit:
            cache.shift(SINKS, turner(model))
            shifts.append(step)
        logits.append(model(new, cache=cache, positions=positions, logits_to_keep=1)[:, -1])
        new, positions = logits[-1].argmax(-1, keepdim=True), None
        tokens.append(new[:, 0].tolist())
    return np.array(tokens), torch.stack(logits), shifts


def same_stream(found, exact):
    """Equal but for rounding: the tables of cosines are float32, and a key is turned at most once for each step it is seen."""
    room = 16 * torch.finfo(torch.float32).eps * float(exact.abs().max())
    return float((found - exact).abs().max()) < 16 * room


@pytest.mark.sweep
@pytest.mark.parametrize(
    "limit", [20, 21, 48]
)  # at 20 the sinks and the window fill all places: a shift for every token
def test_a_stream_continues_past_the_context(limit):
    """Rotary embedding sees places below the limit, for ever: those in the cache, as in StreamingLLM."""
    model, rows = decoder(STREAM, max_position_embeddings=limit), prompts(10)
    cache, n = model.make_cache(), 10 * limit
    tokens, logits, shifts = stream(model, cache, rows, n, limit=limit)
    expected, exact, same = stream(model, Unturned(model), rows, n, limit=limit)
    assert np.array_equal(tokens, expected) and len(np.unique(tokens)) > 20
    assert same_stream(logits, exact)
    assert shifts == same == list(range(limit - 9, n, limit - 19)), "each makes room for all places that nobody needs"
    assert cache.length <= limit and cache.held + cache.evicted == 10 + n - 1
    assert cache.capacity <= 20 + 2 * 64


@pytest.mark.not_emulated
def test_rows_of_a_stream_shift_by_their_own_distances():
    """When the longest row needs it; a row that has nothing to give yet stays where it is."""
    model, rows = decoder(STREAM, max_position_embeddings=40), prompts(30, 2, 14)
    tokens, logits, shifts = stream(model, model.make_cache(), rows, 200, limit=40)
    assert len(shifts) > 5
    for b, row in enumerate(rows):
        expected, exact, _ = stream(model, Unturned(model), [row], 200, at=shifts)
        assert np.array_equal(tokens[:, b], expected[:, 0])
        assert same_stream(logits[:, b], exact[:, 0])


@pytest.mark.not_emulated
def test_without_a_shift_rotary_uses_positions_in_the_sequence():
    """So cached steps are the full forward, sinks grow ever more distant, and the context ends where it ends."""
    model, row = decoder(STREAM, max_position_embeddings=300), torch.tensor(prompts(300))
    with torch.no_grad():
        cache = model.make_cache()
        steps = torch.cat([model(row[:, t : t + 1], cache=cache) for t in range(300)], 1)
        exact = model(row)
    assert float((steps - exact).abs().max()) < 1e-9 * float(exact.abs().max())
    with pytest.raises(CallError, match="the last position is 300, but the context has 300 positions"):
        model(row[:, :1], cache=cache)
    cache.shift(4, turner(model))
    assert cache.length == 4 + 15 and cache.held == 19
    model(row[:, :1], cache=cache)


def test_a_shift_is_refused_under_masks_of_absolute_positions():
    token = np.ones((1, 1, 2))
    documents = lowtri.causal() & lowtri.documents(lengths=[12, 50], open_end=True)
    for mask, keep in [("causal & chunks(8)", 1), ("window(8) | causal & first(2) & strided(5)", 2), (documents, 0)]:
        cache = KVCache(mask, block=1)
        for _ in range(30):
            cache.append(token, token)
        with pytest.raises(CallError, match=r"shift: .* shows other pairs at positions lower by \d+") as caught:
            cache.shift(keep)
        assert "Fix: keep=" in str(caught.value)
        assert cache.length == 30, "and nothing has moved"
    with pytest.raises(CallError, match="shift: keep is -1; it counts positions, from 0"):
        cache.shift(-1)


def test_a_crop_after_a_shift_counts_the_new_positions():
    cache, token = KVCache("causal & (window(8) | first(2))", block=1, rewind=3), np.ones((1, 1, 2))
    for _ in range(30):
        cache.append(token, token)
    cache.shift(2)
    assert cache.length == 2 + 7 + 3 and cache.held == 12, "what a query three places back would see is held"
    with pytest.raises(CallError, match=r"crop: n is \[8\], but keys that queries before \[9\] may see are evicted"):
        cache.crop(8)
    cache.crop(9)
    places = cache.append(token, token)[2]
    assert sorted(places[places >= 0]) == list(range(10))
    short = KVCache("window(8)", block=1)
    for _ in range(3):
        short.append(token, token)
    short.shift(5)  # nobody is dead yet, so any crop is as good as before
    short.crop(1)
    assert short.length == 1


def test_a_shift_without_evicted_keys_changes_nothing():
    cache, token = KVCache("causal"), np.ones((1, 1, 2))
    for _ in range(5):
        cache.append(token, token)
    cache.shift(0, lambda keys, moved, layer: pytest.fail("nothing moves"))
    assert cache.length == 5 and cache.append(token, token)[2].tolist() == [0, 1, 2, 3, 4, 5]


# Beams


def beams_uncached(model, row, width, n):
    """Beam search as it is defined: all continuations of all beams, the best kept, everything computed anew."""
    found = [(0.0, [])]
    for _ in range(n):
        ids = torch.tensor([row + tokens for _, tokens in found])
        with torch.no_grad():
            scores = model(ids)[:, -1].log_softmax(-1)
        every = [
            (total + float(scores[b, token]), [*tokens, token])
            for b, (total, tokens) in enumerate(found)
            for token in range(VOCABULARY)
        ]
        found = sorted(every, key=lambda one: -one[0])[:width]
    return found


@torch.no_grad()
def beams_cached(model, rows, width, n):
    """The same for a batch of ragged prompts in one cache: the beams of a prompt stand beside one another."""
    ids, places = padded(rows)
    cache = KVCache(model.mask, block=8)
    scores = model(ids, cache=cache, positions=places, logits_to_keep=1)[:, -1].log_softmax(-1)  # (B, V)
    total, first = scores.topk(width, -1)  # (B, W)
    tokens = first[..., None]  # (B, W, steps)
    cache.reorder(np.repeat(np.arange(len(rows)), width))  # a prompt is read once, and its beams share what was read
    base = np.arange(len(rows))[:, None] * width
    for _ in range(n - 1):
        scores = model(tokens[:, :, -1].reshape(-1, 1), cache=cache)[:, -1].log_softmax(-1)
        every = (total.reshape(-1, 1) + scores).reshape(len(rows), -1)  # (B, W * V)
        total, at = every.topk(width, -1)
        beam, token = at // VOCABULARY, at % VOCABULARY
        cache.reorder((base + beam.numpy()).reshape(-1))
        tokens = torch.cat([tokens.gather(1, beam[..., None].expand(-1, -1, tokens.shape[2])), token[..., None]], -1)
    return total, tokens, cache


@pytest.mark.parametrize("mask", ["causal", "causal & window(6)", "causal & (window(5) | first(2))"])
def test_beam_search_over_ragged_prompts(mask):
    model, rows, width, n = decoder(mask), prompts(*RAGGED), 3, 40
    with torch.no_grad():
        model.lm_head.weight.div_(16)  # a flatter distribution, so that beams cross
    total, tokens, cache = beams_cached(model, rows, width, n)
    crossed = 0
    for b, row in enumerate(rows):
        for w, (score, expected) in enumerate(beams_uncached(model, row, width, n)):
            assert tokens[b, w].tolist() == expected
            assert abs(float(total[b, w]) - score) < 1e-9 * abs(score)
        crossed += tokens[b, 0].tolist() != list(generate(model, row, n))
    assert crossed, "beam search found something that greedy search does not"
    dropped = 14 + n - 1 - cache.held
    assert cache.evicted == dropped and (dropped > 0 or mask == "causal")


@pytest.mark.not_emulated
def test_beams_are_those_of_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    model, (row,) = decoder("causal"), prompts(8)
    with torch.no_grad():
        model.lm_head.weight.div_(16)
    c = model.config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {name: getattr(c, name) for name in (*names, "rms_norm_eps", "max_position_embeddings")}
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, eos_token_id=None, **sizes))
    theirs.load_state_dict(model.state_dict())
    ids = torch.tensor([row])
    options = {"max_new_tokens": 25, "num_beams": 4, "do_sample": False, "pad_token_id": 0, "num_return_sequences": 4}
    out = theirs.eval().double().generate(ids, attention_mask=torch.ones_like(ids), **options)
    _, tokens, _ = beams_cached(model, [row], 4, 25)
    assert out[:, len(row) :].tolist() == tokens[0].tolist()


# Rejected drafts


@torch.no_grad()
def speculative(model, draft, rows, n, ahead=4):
    """A small model proposes, the large one reads all proposals at once and keeps those it would have said itself.

    Rows accept different numbers, so both caches are cropped row by row. The draft writes its proposals one by one, so it
    must be able to go back over several appends: ``rewind``.
    """
    ids, places = padded(rows)
    cache, guess = KVCache(model.mask, block=8), KVCache(draft.mask, block=8, rewind=ahead)
    last = model(ids, cache=cache, positions=places, logits_to_keep=1)[:, -1].argmax(-1)  # (B,)
    draft(ids, cache=guess, positions=places)
    said = [[int(token)] for token in last]
    accepted = []
    length = np.array([len(row) for row in rows])
    while min(map(len, said)) < n:
        proposed, new = [last], last
        for _ in range(ahead):
            new = draft(new[:, None], cache=guess)[:, -1].argmax(-1)
            proposed.append(new)
        tried = torch.stack(proposed, 1)  # (B, 1 + ahead): the last token said, and the proposals after it
        found = model(tried, cache=cache).argmax(-1)  # (B, 1 + ahead): what the model says after each of them
        right = (tried[:, 1:] == found[:, :-1]).long().cumprod(1).sum(1).numpy()  # (B,) how many proposals stand
        for b, count in enumerate(right):
            said[b] += found[b, : count + 1].tolist()
        last = torch.tensor([row[-1] for row in said])
        length += 1 + right
        cache.crop(length)
        draft(proposed[-1][:, None], cache=guess)  # the last proposal, in case it stands
        guess.crop(length)
        accepted += right.tolist()
    return [row[:n] for row in said], accepted, cache, guess


@pytest.mark.parametrize("mask", ["causal", "causal & window(6)", "causal & (window(5) | first(2))"])
def test_rejected_drafts_do_not_change_later_outputs(mask):
    """Speculative decoding says what greedy decoding says, whatever the draft proposes."""
    model, rows, n = decoder(mask), prompts(*RAGGED), 60
    draft = decoder(mask)  # the same model with some noise: right at times
    with torch.no_grad():
        torch.manual_seed(1)
        for weight in draft.parameters():
            weight.add_(torch.randn_like(weight) * 0.03 * weight.std())
    said, accepted, cache, guess = speculative(model, draft, rows, n)
    assert said == [list(generate(model, row, n)) for row in rows]
    assert set(accepted) >= {0, 4} and len(set(accepted)) > 3, f"drafts are rejected at every place: {set(accepted)}"
    for used in (cache, guess):
        if mask != "causal":
            assert used.evicted > 0
        assert used.bytes == 2 * 2 * 3 * used.capacity * 2 * 8 * 8


def test_without_rewind_a_crop_over_several_appends_can_be_too_late():
    token = np.ones((1, 1, 2))

    def crops(rewind):
        cache = KVCache("window(4)", block=1, rewind=rewind)
        for t in range(40):
            cache.append(token, token)
            if t % 5 == 4:
                cache.crop(cache.length - 3)
        return cache

    with pytest.raises(CallError, match=r"crop: n is \[2\], but keys that queries before \[\d\] may see are evicted"):
        crops(0)
    cache = crops(3)
    assert cache.length == 16 and cache.evicted > 0
    with pytest.raises(CallError, match="KVCache: rewind is -1; it counts tokens, from 0"):
        KVCache("causal", rewind=-1)


@pytest.mark.parametrize("rewind", [0, 1, 5])
def test_the_memory_of_rewind(rewind):
    """So many tokens more than the window, and after any crop within it the newest queries see what they always saw."""
    rng, cache, n, latest = np.random.default_rng(0), KVCache("window(4)", block=1, rewind=rewind), 0, 0
    rows = np.arange(1000.0)[None, :, None]
    for back in itertools.chain([0] * 20, rng.integers(0, rewind + 2, 200)):
        n = max(n - int(back), latest - rewind, 0)
        cache.crop(n)
        latest = max(latest, n)
        keys, _, places = cache.append(rows[:, n : n + 1], rows[:, n : n + 1])
        seen = {int(p): float(keys[0, slot, 0]) for slot, p in enumerate(places) if p > n - 4}
        assert seen == {p: float(p) for p in range(max(0, n - 3), n + 1)}
        n += 1
        assert cache.held <= 4 + rewind
