"""The loop: the same tokens with a cache and without, alone and in a batch, from any model, as ids and as text."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import lowtri
from lowtri import generate
from lowtri.errors import CallError
from lowtri.generation.generate import Pieces
from lowtri.generation.models import NextLogits
from lowtri.nn import Decoder, DecoderConfig, RecurrentLM

VOCABULARY = 61


def decoder(mask="causal", **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = Decoder(DecoderConfig(**{"vocab_size": VOCABULARY, "mask": mask, **sizes, **options}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.mul_(8)
    return model.eval()


def prompts(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, n).tolist() for n in lengths]


def counts(ids):
    """Logits whose greatest is the last id plus one: NumPy in, NumPy out."""
    return np.eye(10)[(np.asarray(ids) + 1) % 10]


MASKS = ["causal", "causal & window(5)", "causal & (window(4) | first(2))", "causal & chunks(6)"]


# With a cache and without


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_k": 20, "seed": 3}])
def test_cached_and_uncached_give_the_same_tokens(mask, options):
    model, prompt = decoder(mask), prompts(7)[0]
    cached = list(generate(model, prompt, 40, **options))
    assert cached == list(generate(model, prompt, 40, cached=False, **options))
    assert len(cached) == 40 and all(type(token) is int for token in cached)
    greedy = list(generate(model, prompt, 40))
    assert (cached == greedy) == (not options), "sampling says something else"


@pytest.mark.parametrize("mask", MASKS)
def test_rows_of_a_ragged_batch_generate_what_they_generate_alone(mask):
    model, rows = decoder(mask), prompts(7, 1, 12, 7)
    alone = [list(generate(model, row, 30)) for row in rows]
    for cached in (True, False):
        steps = list(generate(model, rows, 30, cached=cached))
        assert [list(row) for row in zip(*steps, strict=True)] == alone


@pytest.mark.parametrize("mask", MASKS)
def test_logits_agree_to_rounding_in_ragged_batches(mask):
    model, rows = decoder(mask), prompts(9, 3, 6)
    ways = [NextLogits(model, 3, cached=cached, torch_ids=True) for cached in (True, False)]
    new = rows
    for step in range(30):
        with_cache, without = (way(new) for way in ways)
        assert np.abs(with_cache - without)[[bool(row) for row in new]].max() < 3e-5, step
        new = [[int(row.argmax())] for row in without]
        if step > 10:
            new[1] = []  # a row that has ended


def test_a_cache_is_small_under_a_window():
    model = decoder("causal & window(8)", max_position_embeddings=4096)
    cache, ids = model.make_cache(), torch.zeros(1, 1, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(600):
            model(ids, cache=cache)
    assert cache.capacity < 200 and cache.evicted > 400


# Sampling


def test_samples_of_a_row_do_not_depend_on_other_rows():
    model, rows = decoder(), prompts(5, 9, 5)
    hot = {"temperature": 1.2, "top_p": 0.95}
    batch = list(zip(*generate(model, rows, 20, seed=7, **hot), strict=True))
    others = list(zip(*generate(model, [rows[0], *prompts(20, 2)], 20, seed=7, **hot), strict=True))
    assert batch[0] == others[0]
    assert list(batch[0]) == list(generate(model, rows[0], 20, seed=7, **hot)), "row 0 draws what it draws alone"
    seeds = list(zip(*generate(model, rows, 20, seed=[4, 5, 6], **hot), strict=True))
    assert list(seeds[2]) == list(generate(model, rows[2], 20, seed=6, **hot))


def test_seeds_repeat_and_differ():
    model, row = decoder(), prompts(5)[0]
    one, again, other = (list(generate(model, row, 20, temperature=1.0, seed=seed)) for seed in (1, 1, 2))
    assert one == again != other
    same = list(zip(*generate(model, [row, row], 20, temperature=1.0), strict=True))
    assert same[0] != same[1], "rows of one seed draw apart"
    assert list(generate(model, row, 20, temperature=1.0, top_k=1)) == list(generate(model, row, 20))


# Ends


def test_stop_tokens_end_a_row_and_are_not_returned():
    assert list(generate(counts, [3], 9, stop=7)) == [4, 5, 6]
    assert list(generate(counts, [3], 9, stop=(6, 7))) == [4, 5]
    assert list(generate(counts, [6], 9, stop=7)) == []
    assert list(generate(counts, [[3], [5], [6]], 9, stop=7)) == [[4, 6, None], [5, None, None], [6, None, None]]


def test_a_row_that_ends_changes_nothing_for_the_others():
    model, rows = decoder("causal & window(5)"), prompts(6, 4)
    alone = [list(generate(model, row, 30)) for row in rows]
    stop = alone[0][3]
    for cached in (True, False):
        first, second = zip(*generate(model, rows, 30, stop=stop, cached=cached), strict=True)
        assert [token for token in first if token is not None] == alone[0][: alone[0].index(stop)]
        end = alone[1].index(stop) if stop in alone[1] else 30
        assert [token for token in second if token is not None] == alone[1][:end]


def test_the_models_own_end_token():
    class Model:
        class config:
            eos_token_id = (9, 7)

        def __call__(self, ids):
            return counts(ids)

    assert list(generate(Model(), [4], 20)) == [5, 6]
    assert len(list(generate(Model(), [4], 20, stop=()))) == 20


def test_the_end_of_the_context():
    model = decoder(max_position_embeddings=16)
    assert len(list(generate(model, prompts(10)[0]))) == 7, "the last token needs no place"
    assert len(list(generate(model, prompts(10)[0], 7))) == 7
    assert len(list(generate(model, prompts(16)[0]))) == 1
    with pytest.raises(
        CallError, match=r"the prompt has 17 tokens, but the model's context has 16 positions.\nFix: a shorter prompt"
    ):
        generate(model, prompts(17)[0])
    with pytest.raises(
        CallError,
        match=r"a prompt of 10 tokens and 8 new ones do not fit .* 16 positions.\nFix: max_new_tokens at most 7",
    ):
        generate(model, prompts(10)[0], 8)


# Any model


@pytest.mark.parametrize(
    "kind", ["numpy", "torch", "last only", "tuple", "module", "half"], ids=lambda kind: kind.replace(" ", "-")
)
def test_any_callable_from_ids_to_logits(kind):
    class Module(torch.nn.Module):
        def forward(self, ids):
            assert isinstance(ids, torch.Tensor) and not torch.is_grad_enabled() and not self.training
            return torch.from_numpy(counts(ids))

    model = {
        "numpy": counts,
        "torch": lambda ids: torch.from_numpy(counts(ids)),
        "last only": lambda ids: counts(ids)[:, -1],
        "tuple": lambda ids: (counts(ids), "something"),
        "module": Module(),
        "half": lambda ids: torch.from_numpy(counts(ids)).bfloat16(),
    }[kind]
    assert list(generate(model, [1, 2], 5)) == [3, 4, 5, 6, 7]
    assert list(generate(model, [[1, 2], [5]], 2)) == [[3, 6], [4, 7]]
    if kind == "module":
        assert model.training, "as it was before"


def test_a_callable_gets_ids_of_the_prompts_type():
    kinds = []

    def model(ids):
        kinds.append(type(ids))
        return counts(ids)

    assert list(generate(model, torch.tensor([3]), 2)) == [4, 5] == list(generate(model, np.array([3]), 2))
    assert list(generate(model, torch.tensor([[3], [6]]), 1)) == [[4, 7]]
    assert kinds == [torch.Tensor] * 2 + [np.ndarray] * 2 + [torch.Tensor]


def test_a_callable_gets_nothing_but_ids():
    def counts(ids, logits_to_keep=None):
        assert logits_to_keep is None
        return np.eye(10)[(ids + 1) % 10]

    assert list(generate(counts, [3], 2)) == [4, 5]


def test_dropout_is_off_for_a_step_and_on_between_steps():
    model = torch.nn.Sequential(torch.nn.Embedding(10, 10), torch.nn.Dropout(0.5), torch.nn.Identity())
    model[2].eval()
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append([part.training for part in model]))
    for _ in generate(model, [1], 3):
        assert [part.training for part in model] == [True, True, False]
        assert torch.is_grad_enabled()
    assert seen == [[False] * 3] * 3


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_a_model_without_attention(cell):
    torch.manual_seed(0)
    model, rows = RecurrentLM(VOCABULARY, 16, cell=cell), prompts(7, 2, 11)
    alone = [list(generate(model, row, 20, temperature=0.5)) for row in rows]
    assert alone == [list(generate(model, row, 20, temperature=0.5, cached=False)) for row in rows]
    batch = list(zip(*generate(model, rows, 20, temperature=0.5, seed=[0, 0, 0]), strict=True))
    assert [list(row) for row in batch] == alone


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=64, initializer_range=0.3, eos_token_id=None, **sizes
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.not_emulated
@pytest.mark.parametrize("cached", [True, False])
def test_a_model_of_transformers(cached):
    model, rows = llama(), prompts(7, 2, 11)
    theirs = []
    for row in rows:
        ids = torch.tensor([row])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
        theirs.append(out[0, len(row) :].tolist())
    assert [list(generate(model, row, 20, cached=cached)) for row in rows] == theirs
    assert [list(row) for row in zip(*generate(model, rows, 20, cached=cached), strict=True)] == theirs
    stop = theirs[0][5]
    ended = list(zip(*generate(model, rows, 20, stop=stop, cached=cached), strict=True))
    for row, alone in zip(ended, theirs, strict=True):
        expected = alone[: alone.index(stop)] if stop in alone else alone
        assert [token for token in row if token is not None] == expected


def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=2, state_size=4, eos_token_id=None)
    model = MambaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def shapes_of_forwards(model):
    """The shape of the ids of each forward from now on."""
    shapes = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


@pytest.mark.not_emulated
@pytest.mark.parametrize("make", [llama, mamba])
def test_a_cached_model_of_transformers_computes_each_token_once(make):
    model, rows = make(), prompts(7, 2, 11)
    shapes = shapes_of_forwards(model)
    alone = [list(generate(model, row, 6)) for row in rows]
    assert shapes == [(1, 7), *[(1, 1)] * 5, (1, 2), *[(1, 1)] * 5, (1, 11), *[(1, 1)] * 5]
    shapes.clear()
    together = list(generate(model, rows, 6))
    assert shapes == [(3, 11), *[(3, 1)] * 5]  # padded on the left
    assert [list(row) for row in zip(*together, strict=True)] == alone
    shapes.clear()
    assert list(generate(model, rows[0], 6, cached=False)) == alone[0]
    assert shapes == [(1, n) for n in range(7, 13)]


def test_a_model_that_returns_no_cache_is_named():
    class Forgetful(torch.nn.Module):
        def forward(self, input_ids, past_key_values=None, use_cache=False):
            return torch.zeros(*input_ids.shape, VOCABULARY)

    with pytest.raises(CallError, match=r"Forgetful takes past_key_values, but returned no cache.*\nFix: cached=False"):
        list(generate(Forgetful(), [1, 2], 3))


def test_an_encoder_decoder_is_refused_with_the_fix():
    class T5:
        class config:
            is_encoder_decoder = True

        def __call__(self, input_ids, past_key_values=None): ...

    with pytest.raises(CallError, match="T5 is an encoder-decoder, which needs an input besides the prompt"):
        generate(T5(), [1], 3)


# Text


def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(["<|end|>"])
    return found


class Reciter:
    """A model that says a text from memory, byte by byte, after any prompt; then its end token."""

    def __init__(self, text):
        self.tokenizer = tokenizer()
        self.script = [*self.tokenizer.encode(text).ids, self.tokenizer.token_to_id("<|end|>")]
        self.size = self.tokenizer.get_vocab_size()
        self.begun = None

    def __call__(self, ids):
        self.begun = ids.shape[1] if self.begun is None else self.begun
        return np.eye(self.size)[[self.script[ids.shape[1] - self.begun]] * len(ids)]


TEXT = "Zoë: ภาษาไทย 𝄞 e\u0301 黑貓 🏳️‍🌈 fin"


def test_pieces_never_split_a_character_and_add_up():
    pieces = list(generate(Reciter(TEXT), "Say: ", max_new_tokens=500))
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert "黑" in pieces and "𝄞" in pieces, "each as soon as its last byte is there"
    assert len(pieces) == len(TEXT.encode()), "a step for each token, also where nothing can be said yet"


def test_texts_in_a_batch():
    steps = list(generate(Reciter(TEXT), ["Say: ", "I am"][:1] * 2, max_new_tokens=500))
    assert ["".join(row) for row in zip(*steps, strict=True)] == [TEXT, TEXT]


def test_a_character_that_is_never_completed_is_left_out():
    broken = tokenizer().encode("é").ids[:1]
    pieces = Pieces(tokenizer(), tokenizer().encode("a").ids)
    assert [pieces.add(token) for token in tokenizer().encode("b").ids + broken] == ["b", ""]
    assert pieces.rest() == ""
    assert pieces.add(tokenizer().encode("é").ids[1]) == "é"  # completed after all
    model = Reciter("ab")
    model.script[1:] = broken + model.script[2:]
    assert "".join(generate(model, "x", max_new_tokens=5)) == "a"


def test_stop_as_text():
    assert "".join(generate(Reciter("one. two."), "x", max_new_tokens=50, stop=".")) == "one"
    assert "".join(generate(Reciter("one. two."), "x", max_new_tokens=9, stop=())) == "one. two."
    with pytest.raises(CallError, match=r"stop has the text 'ab', which is 2 tokens: \[.*\]. Fix: one token each"):
        generate(Reciter("one"), "x", 5, stop="ab")
    with pytest.raises(CallError, match="stop has the text 'a', but there is no tokenizer"):
        generate(counts, [1], 5, stop="a")


@pytest.mark.not_emulated
def test_a_tokenizer_of_transformers():
    from transformers import PreTrainedTokenizerFast

    model = Reciter(TEXT)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=model.tokenizer, eos_token="<|end|>")
    assert "".join(generate(model, "Say: ", max_new_tokens=500, tokenizer=wrapped)) == TEXT


# What does not fit


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, "the prompt is empty, but a model needs at least one token. Fix: a begin token"),
        ([[1], []], {}, "the prompt is empty"),
        ("text", {}, r"the prompt is text, but there is no tokenizer. Fix: tokenizer=..., or pass ids"),
        ([0.5], {}, r"the prompt is list of float64 \(1,\); expected ids \(N,\), several of them, or text"),
        (5, {}, "the prompt is int"),
        (np.zeros((1, 1, 1), int), {}, r"the prompt is ndarray of int64 \(1, 1\)"),
        ([1], {"max_new_tokens": None}, r"the model declares no context length. Fix: max_new_tokens="),
        ([1], {"max_new_tokens": -1}, "max_new_tokens is -1; it counts tokens, at least 0"),
        ([1], {"temperature": -1}, "temperature is -1"),
        ([1], {"seed": [1, 2]}, "2 seeds for 1 rows. Fix: one seed, or one for each row"),
        ([1], {"seed": -1}, "seed is -1; it is an integer, at least 0"),
    ],
)
def test_invalid_arguments_are_refused_before_the_first_token(prompt, options, words):
    with pytest.raises(CallError, match=words):
        generate(counts, prompt, **{"max_new_tokens": 5, **options})


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            lambda ids: np.zeros((2, 3, 4)),
            r"for ids \(1, 2\) the model gave ndarray \(2, 3, 4\); expected logits \(B, N, V\)",
        ),
        (lambda ids: 7, "the model gave int; expected logits"),
        (lambda ids: np.full((1, 4), np.nan), "the model's logits hold nan at token 0, so no token can be chosen"),
    ],
)
def test_models_without_logits_are_refused(model, words):
    with pytest.raises(CallError, match=words):
        next(generate(model, [1, 2], 5))


def test_it_is_lazy():
    calls = itertools.count()

    def model(ids):
        next(calls)
        return counts(ids)

    stream = generate(model, [1], 10**9)
    assert list(itertools.islice(stream, 3)) == [2, 3, 4]
    assert next(calls) == 3
    assert lowtri.generate is generate
