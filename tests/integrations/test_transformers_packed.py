"""Packed rows on a switched model: whichever way a call says so, documents do not see one another, with a cache and without."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf
from cache_names import cache_in, cache_name
from torch import Tensor

import lowtri
from lowtri.compat.model_caches import crop_cache
from lowtri.errors import CallError, EngineError
from lowtri.integrations.transformers import register, switch, use
from lowtri.integrations.transformers.packing import Packing

LENGTHS = [5, 7, 4]
N = sum(LENGTHS)
BOUNDS = torch.tensor([0, 5, 12, 16], dtype=torch.int32)
PLACES = torch.cat([torch.arange(n) for n in LENGTHS])[None]
NUMBERS = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))[None]
SIZE: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZE |= {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}
TWO = ["sliding_attention", "full_attention"]
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZE)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**SIZE, sliding_window=3)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**SIZE, head_dim=8, sliding_window=3, layer_types=TWO)),
    "llama4": lambda: tf.Llama4ForCausalLM(
        tf.Llama4TextConfig(**SIZE, head_dim=8, attention_chunk_size=3, intermediate_size_mlp=64, num_local_experts=2)
    ),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4)),
}


@cache
def model_of(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * torch.randn_like(p))
    return switch(model)


def ids_of(rows: int = 1, seed: int = 1) -> Tensor:
    return torch.randint(3, 99, (rows, N), generator=torch.Generator().manual_seed(seed))


def alone(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """Logits of each document alone."""
    with torch.no_grad():
        return torch.cat([model(part, **options).logits for part in ids.split(LENGTHS, dim=1)], 1)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


FLASH: dict[str, Any] = {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 7, "max_length_k": 7}
TOLD: dict[str, dict[str, Any]] = {
    "positions": {"position_ids": PLACES},
    "positions and ones": {"position_ids": PLACES, "attention_mask": torch.ones(1, N, dtype=torch.long)},
    "positions and bounds": {"position_ids": PLACES, **FLASH},
    "bounds of queries alone": {"position_ids": PLACES, "cu_seq_lens_q": BOUNDS},
    "all of a collator": {"position_ids": PLACES, "seq_idx": NUMBERS, **FLASH},
}


@pytest.mark.parametrize("use_cache", [None, True, False])
@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("name", MODELS)
def test_documents_are_as_if_alone(name: str, told: str, use_cache: bool | None) -> None:
    if name == "gpt2" and told != "positions and ones":
        told = "positions"  # its forward takes no other words
    model, ids = model_of(name), ids_of()
    with torch.no_grad():
        found = model(ids, use_cache=use_cache, **TOLD[told]).logits
    close(found, alone(model, ids))
    assert not torch.allclose(found[:, 5:], model(ids).logits[:, 5:], atol=1e-2)


@pytest.mark.parametrize("words", [{"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS}, {"seq_idx": NUMBERS}])
@pytest.mark.parametrize("name", ["llama", "mistral", "llama4"])
def test_documents_without_positions_keep_the_places_of_the_row(name: str, words: dict[str, Any]) -> None:
    model, ids, row = model_of(name), ids_of(), torch.arange(N)[None]
    with torch.no_grad():
        parts = zip(ids.split(LENGTHS, dim=1), row.split(LENGTHS, dim=1), strict=True)
        expected = torch.cat([model(part, position_ids=places).logits for part, places in parts], 1)
        close(model(ids, **words).logits, expected)


@pytest.mark.parametrize("mask", ["causal", "causal & (window(3) | first(1))", "causal & chunks(3)"])
@pytest.mark.parametrize("told", TOLD)
def test_a_mask_of_the_user_holds_within_each_document(mask: str, told: str) -> None:
    model, ids = use(copy.deepcopy(model_of("llama")), mask=mask), ids_of()
    with torch.no_grad():
        close(model(ids, **TOLD[told]).logits, alone(model, ids))
        use(model)
        inputs = {name: x for name, x in TOLD[told].items() if name != "attention_mask"}
        close(model(ids, attention_mask=mask, **inputs).logits, alone(model, ids, attention_mask=mask))


def test_gradients_with_the_cache_on_are_those_of_the_documents() -> None:
    model, ids = copy.deepcopy(model_of("llama")).train(), ids_of()
    rows = [{"input_ids": part[0].tolist()} for part in ids.split(LENGTHS, dim=1)]
    batch = tf.DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)(rows)
    loss = model(**batch).loss  # the cache is on
    found = torch.autograd.grad(loss, list(model.parameters()))
    total = torch.zeros(())
    for part in ids.split(LENGTHS, dim=1):
        logits = model(part, use_cache=False).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, part[0, 1:], reduction="sum")
    expected = torch.autograd.grad(total / (N - len(LENGTHS)), list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        close(one, other)


def test_checkpointed_layers_compute_again_within_the_documents() -> None:
    found = []
    for checkpointed in (False, True):
        model = copy.deepcopy(model_of("mistral")).train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer versions call it by another name
            if checkpointed:
                model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(ids_of(), labels=ids_of(), position_ids=PLACES, **FLASH).loss
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    for one, other in zip(*found, strict=True):
        close(one, other)


def test_each_row_of_a_batch_has_its_own_documents() -> None:
    model, ids = model_of("llama"), ids_of(2)
    other = torch.cat([torch.arange(9), torch.arange(7)])[None]
    both = torch.cat([PLACES, other])
    with torch.no_grad():
        second = torch.cat([model(ids[1:, :9]).logits, model(ids[1:, 9:]).logits], 1)
        expected = torch.cat([alone(model, ids[:1]), second])
        found = model(ids, position_ids=both)
        close(found.logits, expected)
        bounds = torch.tensor([0, 5, 12, 16, 25, 32])
        close(model(ids, position_ids=both, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds).logits, expected)
        numbers = (both == 0).cumsum(1)
        close(model(ids, position_ids=both, seq_idx=numbers).logits, expected)
        close(model(ids, position_ids=PLACES).logits, torch.cat([expected[:1], alone(model, ids[1:])]))
        again = {cache_name(model): cache_in(found)}
        with pytest.raises(CallError, match=r"rows that are packed differently.*\nFix: rows packed alike, one row"):
            model(ids[:, :1], **again)


def test_padding_inside_of_a_packed_row_is_hidden() -> None:
    model, ids = model_of("llama"), ids_of()
    rows = torch.zeros(1, N + 3, dtype=torch.long)
    real = torch.ones_like(rows)
    real[:, :2] = real[:, -1:] = 0
    rows[:, 2:-1] = ids
    places = torch.zeros_like(rows)
    places[:, 2:-1] = PLACES
    with torch.no_grad():
        close(model(rows, attention_mask=real, position_ids=places).logits[:, 2:-1], alone(model, ids))


@pytest.mark.parametrize("static", [False, True])
def test_left_padding_is_no_document(static: bool) -> None:
    """Positions of padding are 0, as transformers' generate makes them."""
    model, ids = model_of("llama"), ids_of(2)
    real = (torch.arange(N) >= torch.tensor([[4], [0]])).long()
    places = (real.cumsum(1) - 1).masked_fill(real == 0, 0)
    with torch.no_grad():
        found = model(ids, attention_mask=real, position_ids=places)
        close(found.logits[:1, 4:], model(ids[:1, 4:]).logits)
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        options |= {"cache_implementation": "static"} if static else {}
        batch = model.generate(ids, attention_mask=real, **options)[0, N:]
        row = model.generate(ids[:1, 4:], attention_mask=real[:1, 4:], **options)[0, N - 4 :]
    assert torch.equal(batch, row)


# Caches.


def last_alone(model: Any, ids: Tensor, more: Tensor) -> Tensor:
    """Logits of the tokens that continue the last document, with it alone."""
    with torch.no_grad():
        return model(torch.cat([ids[:, 12:], more], 1), use_cache=False).logits[:, 4:]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_later_tokens_continue_the_last_document(name: str, static: bool) -> None:
    model, ids, more = model_of(name), ids_of(), ids_of(seed=2)[:, :5]
    kept = tf.StaticCache(config=model.config, max_cache_len=40) if static else tf.DynamicCache(config=model.config)
    argument = cache_name(model)
    with torch.no_grad():
        model(ids, position_ids=PLACES, **{argument: kept})
        kept = copy.deepcopy(kept)  # as a prompt's cache is used again
        one = [model(more[:, t : t + 1], position_ids=torch.tensor([[4 + t]]), **{argument: kept}) for t in range(3)]
        two = model(more[:, 3:], position_ids=torch.tensor([[7, 8]]), **{argument: kept})
    found = torch.cat([*(x.logits for x in one), two.logits], 1)
    close(found, last_alone(model, ids, more))


def test_a_cache_that_the_model_makes_remembers_too_and_after_a_crop() -> None:
    model, ids, more = model_of("llama"), ids_of(), ids_of(seed=2)[:, :3]
    argument = cache_name(model)
    with torch.no_grad():
        kept = cache_in(model(ids, position_ids=PLACES))
        model(more, position_ids=torch.arange(4, 7)[None], **{argument: kept})
        crop_cache(kept, N, N + 3)
        close(
            model(more, position_ids=torch.arange(4, 7)[None], **{argument: kept}).logits, last_alone(model, ids, more)
        )
        crop_cache(kept, 7, N + 3)  # two tokens of the second document are left
        found = model(more, position_ids=torch.arange(2, 5)[None], **{argument: kept}).logits
        close(found, model(torch.cat([ids[:, 5:7], more], 1), use_cache=False).logits[:, 2:])
        kept.reset()
        close(model(ids, **{argument: kept}).logits, model(ids).logits)  # nothing is left of the documents


@pytest.mark.parametrize("more", [{}, {"cache_implementation": "static"}, {"use_cache": False}, {"num_beams": 2}])
def test_generate_after_a_packed_prompt_continues_the_last_document(more: dict[str, Any]) -> None:
    model, ids = model_of("llama"), ids_of()
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, **more}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), position_ids=PLACES, **options)[0, N:]
    last = ids[:, 12:]
    expected = model.generate(last, attention_mask=torch.ones_like(last), **options)[0, 4:]
    assert torch.equal(found, expected)


def test_positions_at_0_after_cached_keys_say_nothing() -> None:
    model, ids = model_of("llama"), ids_of()
    argument = cache_name(model)
    with torch.no_grad():
        whole = model(ids, position_ids=torch.cat([torch.arange(12), torch.zeros(4, dtype=torch.long)])[None] * 0 + 3)
        first = model(ids[:, :12], position_ids=torch.full((1, 12), 3))
        places = torch.full((1, 4), 3)
        second = model(ids[:, 12:], position_ids=places, **{argument: cache_in(first)})
        close(torch.cat([first.logits, second.logits], 1), whole.logits)
        kept = cache_in(model(ids[:, :12]))
        theirs = copy.deepcopy(model)
        theirs.set_attn_implementation("sdpa")
        other = copy.deepcopy(kept)
        zero = torch.zeros(1, 1, dtype=torch.long)
        found = model(ids[:, :1], position_ids=zero, **{argument: kept}).logits
        close(found, theirs(ids[:, :1], position_ids=zero, **{argument: other}).logits)


# Positions that do not begin anew.

DRAFT = torch.cat([torch.arange(10), torch.tensor([9, 9, 10, 10, 11, 20])])[None]


@pytest.mark.parametrize("places", [DRAFT, torch.full((1, N), 3), torch.arange(N)[None] % 8 + 5])
def test_positions_that_repeat_or_jump_are_no_documents_and_a_warning_names_them(places: Tensor) -> None:
    model, ids = model_of("llama"), ids_of()
    table = torch.ones(N, N, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        expected = model(ids, position_ids=places, attention_mask=table).logits
        close(model(ids, position_ids=places).logits, expected)  # transformers does not look for documents either
        close(model(ids, position_ids=places, attention_mask="causal", use_cache=False).logits, expected)
        with pytest.warns(
            UserWarning, match=r"position_ids go from \d+ to \d+ at token .* row 0\. This is read as one"
        ):
            found = model(ids, position_ids=places, use_cache=False).logits
        close(found, expected)


def test_encoders_whose_positions_begin_after_that_of_padding() -> None:
    torch.manual_seed(0)
    config = tf.RobertaConfig(**{**SIZE, "pad_token_id": 1, "num_key_value_heads": None})
    model, ids = switch(tf.RobertaForMaskedLM(config).eval()), ids_of()
    places = torch.cat([torch.arange(2, 2 + n) for n in LENGTHS])[None]
    with torch.no_grad():
        close(model(ids, position_ids=places).logits, alone(model, ids))


def test_cross_attention_sees_all_keys() -> None:
    torch.manual_seed(0)
    config = tf.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True)
    model, ids, states = switch(tf.GPT2LMHeadModel(config).eval()), ids_of(), torch.randn(1, 9, 32)
    with torch.no_grad():
        found = model(ids, position_ids=PLACES, encoder_hidden_states=states).logits
        close(found, alone(model, ids, encoder_hidden_states=states))


# Refused, with the fix.

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two that differ": (
        {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": torch.tensor([0, 4, 16])},
        r"cu_seq_lens_q and cu_seq_lens_k say other documents\.\nFix: one of them",
    ),
    "positions that begin elsewhere": (
        {"position_ids": PLACES, "cu_seq_lens_q": torch.tensor([0, 5, 16])},
        r"position_ids begin anew at token 12 of row 0, where cu_seq_lens_q has no document begin\.\nFix: one of the two",
    ),
    "too few tokens": (
        {"cu_seq_lens_q": torch.tensor([0, 5, 12])},
        r"ends at 12, but the call has 1 x 16 tokens\.\nFix: cu_seq",
    ),
    "falling": (
        {"cu_seq_lens_q": torch.tensor([0, 9, 5, 16])},
        r"expected integers \(documents \+ 1,\).*\nFix: the start of",
    ),
    "the shape of seq_idx": (
        {"seq_idx": torch.zeros(1, 9)},
        r"seq_idx is \(1, 9\), but the call has 1 x 16 tokens\.\nFix: the number",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_itself_is_refused(name: str) -> None:
    words, message = REFUSED[name]
    with pytest.raises(CallError, match=f"(?s){message}"):
        model_of("llama")(ids_of(), **words)


def test_documents_over_rows_and_later_bounds_are_refused() -> None:
    model, ids = model_of("llama"), ids_of(2)
    with pytest.raises(CallError, match=r"runs from row 0 into row 1, which it cannot see\.\nFix: one row, or"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 20, 32]))
    kept = cache_in(model(ids))
    with pytest.raises(CallError, match=r"got cu_seq_lens_q with a cache of 16 tokens.*\nFix: no cu_seq_lens_q after"):
        model(ids[:, :2], cu_seq_lens_q=torch.tensor([0, 1, 2, 4]), **{cache_name(model): kept})


def test_encoder_decoders_are_refused() -> None:
    config = tf.BartConfig(
        vocab_size=99, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32
    )
    model = switch(tf.BartForConditionalGeneration(config).eval())
    with pytest.raises(
        CallError, match=r"got seq_idx of packed rows, but Bart.* is an encoder-decoder.*\nFix: one document"
    ):
        model(ids_of(), seq_idx=NUMBERS)


# Without the hooks of switch, and in programs.


def test_a_layer_reads_bounds_by_itself_where_the_model_is_registered_only() -> None:
    register()
    torch.manual_seed(0)
    model, ids = tf.LlamaForCausalLM(tf.LlamaConfig(**SIZE, attn_implementation="lowtri")).eval(), ids_of()
    with torch.no_grad():
        close(model(ids, position_ids=PLACES, **FLASH).logits, alone(model, ids))
        kept = cache_in(model(ids[:, :5]))
        with pytest.raises(
            CallError, match=r"got cu_seq_lens_q in a layer of 2 queries and 7 keys.*\nFix: use_cache=False"
        ):
            model(ids[:, 5:7], cu_seq_lens_q=torch.tensor([0, 1, 2]), **{cache_name(model): kept})


def test_a_table_by_hand_is_cut_at_the_bounds() -> None:
    model, ids = model_of("llama"), ids_of()
    table = torch.ones(N, N, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        found = model(ids, position_ids=PLACES, attention_mask=table, **FLASH).logits
        close(found, alone(model, ids))
        whole = model(ids, position_ids=PLACES, attention_mask=table).logits  # the table says all pairs
    assert not torch.allclose(whole, found, atol=1e-2)


def test_a_compiled_forward_reads_bounds() -> None:
    torch._dynamo.reset()
    model, ids = copy.deepcopy(model_of("mistral")), ids_of()
    words = {name: x for name, x in FLASH.items() if isinstance(x, Tensor)}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        close(compiled(ids, position_ids=PLACES, use_cache=False, **words).logits, alone(model, ids))


def test_a_compiled_forward_stops_where_positions_begin_anew_with_a_cache() -> None:
    torch._dynamo.reset()
    model, ids = copy.deepcopy(model_of("llama")), ids_of()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    row = torch.arange(N)[None]
    with torch.no_grad():
        close(compiled(ids, position_ids=row, use_cache=True).logits, model(ids).logits)
        with pytest.raises(RuntimeError, match=r"position_ids begin anew in a compiled program.*Fix: use_cache=False"):
            compiled(ids, position_ids=PLACES, use_cache=True)
        close(compiled(ids, position_ids=PLACES, use_cache=False).logits, alone(model, ids))


def test_a_compiled_forward_below_the_hooks_is_refused() -> None:
    torch._dynamo.reset()
    model, ids = copy.deepcopy(model_of("llama")), ids_of()
    model.forward = torch.compile(model.forward, backend="eager")
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="position_ids begin anew in a compiled program"):
            model(ids, position_ids=PLACES)
        with pytest.raises(EngineError, match=r"so documents\(lengths=\[5, 7, 4\].* was not applied"):
            model(ids, cu_seq_lens_q=BOUNDS)


def test_what_is_measured_of_packed_rows_with_the_cache_on() -> None:
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SIZE)).eval()
    inputs = {"input_ids": ids_of()[:, :12], "position_ids": PLACES[:, :12]}
    # transformers does not look for documents beside a cache
    assert lowtri.infer_mask(model, inputs).text == "causal"
    assert lowtri.infer_mask(switch(model), inputs).text == "causal & documents(lengths=[5, 7])"


def test_the_mask_of_packed_rows() -> None:
    starts = PLACES.numpy() == 0
    packing = Packing(starts, "position_ids")
    assert packing.mask == lowtri.documents(lengths=LENGTHS, open_end=True)
    sinks = lowtri.mask("causal & (window(3) | first(1))")
    assert packing.within_each(sinks) == lowtri.documents(lengths=LENGTHS, open_end=True, inner=sinks)
    assert packing.within_each(lowtri.window(3)) == lowtri.window(3) & packing.mask  # of distances alone


def test_nothing_asks_transformers_for_a_name_that_it_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(tf.utils.generic.logger, "warning_once", said.append)
    ids = ids_of()
    lowtri.infer_mask(model_of("llama"), {"input_ids": ids, "position_ids": PLACES})
    model_of("llama").generate(ids, max_new_tokens=2, do_sample=False)
    lowtri.generate(model_of("llama"), ids, 2)
    assert [words for words in said if "deprecated" in words] == []
