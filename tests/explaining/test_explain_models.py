"""explain opens a layer of a transformers model: what its attention receives, and the output that it gives."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import lowtri
from lowtri.compat.transformers_private import recorded_attention
from lowtri.errors import CallError, EngineError
from lowtri.integrations.transformers import switch, use

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18]])


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, **NO_TOKENS))


def gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "scale_attn_by_inverse_layer_idx": True}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=99, **sizes, **NO_TOKENS))


def mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**GROUPED, sliding_window=3, **NO_TOKENS))


def gemma2() -> Any:
    more = {"head_dim": 8, "sliding_window": 3, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 0.5}
    config = transformers.Gemma2Config(**GROUPED, **more, **NO_TOKENS)
    return transformers.Gemma2ForCausalLM(config)


def gpt_oss() -> Any:
    more = {"head_dim": 8, "sliding_window": 3, "num_local_experts": 2, "num_experts_per_tok": 1}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**GROUPED, **more, **NO_TOKENS))


def bert() -> Any:
    return transformers.BertModel(transformers.BertConfig(**SIZES))


def falcon() -> Any:
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, alibi=True, **NO_TOKENS))


def bloom() -> Any:
    sizes = {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    return transformers.BloomForCausalLM(transformers.BloomConfig(**sizes, **NO_TOKENS))


def bart() -> Any:
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    return transformers.BartModel(transformers.BartConfig(vocab_size=99, d_model=32, **heads, **layers))


def made(kind: Callable[[], Any], attention: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    model = kind()
    with torch.no_grad():
        for x in model.parameters():
            if x.ndim == 2:
                x.mul_(4)  # sharper weights than those of small random numbers
    if attention == "lowtri":
        return switch(model.to(dtype).eval())
    model.set_attn_implementation(attention)
    return model.to(dtype).eval()


EVERY = [
    *((kind, attention) for kind in (llama, gpt2, mistral, bert) for attention in ("eager", "sdpa", "lowtri")),
    *((kind, attention) for kind in (gemma2, gpt_oss) for attention in ("eager", "lowtri")),  # they have no sdpa
    (falcon, "lowtri"),
]
EACH = pytest.mark.parametrize(("kind", "attention"), EVERY, ids=[f"{kind.__name__}-{name}" for kind, name in EVERY])


def calls_of(model: Any, **arguments: Any) -> list[Any]:
    """What each layer's attention received and returned."""
    calls: list[Any] = []
    with torch.no_grad(), recorded_attention(calls.append):
        model(**arguments)
    return calls


def agrees(explanation: Any, call: Any, row: int, head: int, tolerance: float = 2e-6) -> None:
    group = call.query.shape[1] // call.key.shape[1]
    expected = {"q": call.query[row, head], "k": call.key[row, head // group], "v": call.value[row, head // group]}
    for name, x in expected.items():
        np.testing.assert_array_equal(explanation[name].value, x.double().numpy(), err_msg=name)
    sees = explanation.visible.any(-1)
    own = call.result[0][row, :, head].double().numpy()
    np.testing.assert_allclose(explanation["output"].value[sees], own[sees], atol=tolerance, rtol=tolerance)
    assert explanation.warning == ""


@EACH
def test_the_output_is_what_the_layer_s_attention_gave(kind: Any, attention: str) -> None:
    model = made(kind, attention)
    calls = calls_of(model, input_ids=IDS[:1], use_cache=False)
    assert len(calls) == 3
    for layer, head in ((0, 0), (1, 1), (2, 3)):
        explanation = lowtri.explain(model, IDS[0], layer=layer, head=head)
        agrees(explanation, calls[layer], 0, head)
        difference = re.findall(r"layer (\d) of \w+'s own output differs by (\S+)\.$", explanation.note)
        assert difference[0][0] == str(layer) and float(difference[0][1]) < 2e-6
        assert explanation.tokens == tuple(str(i) for i in IDS[0].tolist())


@pytest.mark.parametrize(
    ("kind", "attention", "masks"),
    [
        *((llama, name, ["causal"] * 3) for name in ("eager", "sdpa", "lowtri")),
        *((gpt2, name, ["causal"] * 3) for name in ("eager", "sdpa", "lowtri")),
        *((mistral, name, ["causal & window(3)"] * 3) for name in ("eager", "sdpa", "lowtri")),
        *((gemma2, name, ["causal & window(3)", "causal", "causal & window(3)"]) for name in ("eager", "lowtri")),
        *((bert, name, ["full"] * 3) for name in ("eager", "sdpa", "lowtri")),
        (falcon, "lowtri", ["causal"] * 3),
    ],
)
def test_the_mask_is_the_layer_s_own(kind: Any, attention: str, masks: list[str]) -> None:
    model = made(kind, attention)
    explanations = [lowtri.explain(model, IDS[0].tolist(), layer=layer) for layer in range(3)]
    assert [explanation.mask for explanation in explanations] == masks
    for explanation, mask in zip(explanations, masks, strict=True):
        np.testing.assert_array_equal(explanation.visible, lowtri.mask(mask).dense(7))


@pytest.mark.parametrize("kind", [llama, mistral, bert, gemma2])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "lowtri"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_in_the_mask(kind: Any, attention: str, side: str) -> None:
    if kind is gemma2 and attention == "sdpa":
        attention = "eager"
    model = made(kind, attention)
    real = torch.ones_like(IDS)
    real[1, : 2 if side == "left" else None] = 0 if side == "left" else 1
    if side == "right":
        real[1, -2:] = 0
    inputs = {"input_ids": IDS, "attention_mask": real}
    calls = calls_of(model, **inputs)
    tokens = real[1].bool().numpy()
    for layer in (0, 1):
        for row in (0, 1):
            explanation = lowtri.explain(model, inputs, layer=layer, head=2, batch=row)
            agrees(explanation, calls[layer], row, 2)
            assert explanation.note.startswith(f"Batch row {row} of 2.")
        pattern = {llama: "causal", bert: "full"}.get(kind, "causal & window(3)")
        pattern = "causal" if kind is gemma2 and layer == 1 else pattern
        expected = lowtri.mask(pattern).dense(7) & tokens
        np.testing.assert_array_equal(explanation.visible[tokens], expected[tokens])
        assert explanation.mask.startswith("keys(" if pattern == "full" else pattern)


def test_the_steps_name_scale_softcap_bias_and_sink() -> None:
    explanation = lowtri.explain(made(gemma2, "eager"), IDS[0], layer=1, head=1)
    steps = {step.name: step for step in explanation.steps}
    assert list(steps) == ["tokens", "q", "k", "v", "scores", "scaled", "capped", "mask", "masked", "weights", "output"]
    assert steps["scaled"].formula == "scores / sqrt(24)"
    np.testing.assert_allclose(steps["scaled"].value, steps["scores"].value / 24**0.5)
    assert steps["capped"].formula == "0.5 tanh(scaled / 0.5)"
    np.testing.assert_allclose(steps["capped"].value, 0.5 * np.tanh(steps["scaled"].value / 0.5))
    assert steps["masked"].formula == "capped where visible, else -inf"
    assert "queries ↓ keys →" in explanation.to_html().split("<h2>capped")[1].split("<h2>")[0]

    scaled = lowtri.explain(made(gpt2, "sdpa"), IDS[0], layer=2)["scaled"]
    assert scaled.formula == "scores / sqrt(72)"  # of a head of 8, divided by the third layer's number

    biased = lowtri.explain(made(falcon, "lowtri"), IDS[0], layer=1, head=1)
    assert biased["masked"].formula == "scaled + bias where visible, else -inf" and biased["bias"].value.any()
    np.testing.assert_allclose(biased["masked"].unmasked, biased["scaled"].value + biased["bias"].value)

    sinking = lowtri.explain(made(gpt_oss, "eager"), IDS[0], layer=1, head=1)
    assert re.search(r"softmax\(masked and a sink of -?\d\.\d{4}, which has no value\)", sinking["weights"].formula)
    assert (sinking["weights"].value.sum(-1) < 1).all()


def test_the_sentences_say_which_heads_these_are() -> None:
    explanation = lowtri.explain(made(llama, "sdpa"), IDS[0], layer=1, head=3, tokens=list("abcdefg"))
    assert (
        explanation["q"].sentence
        == "The queries that the attention of layer 1 receives in head 3, both counted from 0, of 3 layers and 4 heads."
    )
    assert explanation["k"].sentence == "The keys that it receives: key head 1 of 2."
    assert explanation["v"].sentence == "The values that it receives: value head 1 of 2."
    assert explanation["weights"].rows == tuple("abcdefg")
    assert str(explanation) and explanation.to_html() and explanation.to_json() and explanation.to_svg()


@pytest.mark.parametrize("attention", ["eager", "sdpa", "lowtri"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype, attention: str) -> None:
    explanation = lowtri.explain(made(llama, attention, dtype), IDS[0], layer=2, head=1)
    assert explanation.warning == "" and "own output differs by" in explanation.note


@pytest.mark.parametrize("kind", [llama, bert])
def test_a_mask_of_lowtri_replaces_the_model_s(kind: Any) -> None:
    model = made(kind, "lowtri")
    explanation = lowtri.explain(model, IDS[0], layer=1, mask="causal & window(2)")
    assert explanation.mask == "causal & window(2)" and explanation.warning == ""
    use(model, mask="causal & window(2)")
    always = lowtri.explain(model, IDS[0], layer=1)
    np.testing.assert_array_equal(always["output"].value, explanation["output"].value)
    other = lowtri.explain(model, IDS[0], layer=1, mask="first(1) | causal & window(3)")
    np.testing.assert_array_equal(other.visible, lowtri.mask("first(1) | causal & window(3)").dense(7))


def test_a_model_inside_of_another_module_and_a_compiled_one() -> None:
    model = made(llama, "sdpa")
    expected = lowtri.explain(model, IDS[0], layer=1)["output"].value
    for wrapped in (torch.nn.Sequential(model), torch.compile(model, backend="eager")):
        np.testing.assert_array_equal(lowtri.explain(wrapped, IDS[0], layer=1)["output"].value, expected)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(IDS[:1])
    np.testing.assert_array_equal(lowtri.explain(compiled, IDS[0], layer=1)["output"].value, expected)
    model.model.layers[1].compile(backend="eager")
    with torch.no_grad():
        model(IDS[:1])
    np.testing.assert_array_equal(lowtri.explain(model, IDS[0], layer=1)["output"].value, expected)


def test_the_stacks_of_an_encoder_decoder_are_explained_alone() -> None:
    model = bart().eval()
    assert lowtri.explain(model.get_encoder(), IDS[0], layer=1).mask == "full"
    assert lowtri.explain(model.get_decoder(), IDS[0], layer=1).mask == "causal"


def states(model: Any) -> list[Any]:
    """What a forward could leave changed."""
    parts = [(part.training, dict(part._forward_hooks), dict(part._forward_pre_hooks)) for part in model.modules()]
    tensors = [x.clone() for x in (*model.parameters(), *model.buffers())]
    return [parts, tensors, model.config._attn_implementation, model.config.to_dict(), model.config.use_cache]


def same(one: list[Any], other: list[Any]) -> bool:
    tensors = all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
    return tensors and [one[0], *one[2:]] == [other[0], *other[2:]]


@pytest.mark.parametrize("attention", ["eager", "sdpa", "lowtri"])
def test_nothing_is_left_changed(attention: str) -> None:
    model = made(llama, attention).train()
    model.model.layers[0].eval()
    before, own = states(model), transformers.AttentionInterface.get_interface
    torch.manual_seed(1)
    draw = torch.rand(2)
    torch.manual_seed(1)
    lowtri.explain(model, IDS[0])
    assert torch.equal(torch.rand(2), draw)
    assert same(states(model), before) and transformers.AttentionInterface.get_interface is own

    def fail(*_: Any) -> None:
        raise KeyError("in the middle")

    handle = model.model.layers[1].mlp.register_forward_hook(fail)
    before = states(model)
    with pytest.raises(KeyError, match="in the middle"):
        lowtri.explain(model, IDS[0])
    assert same(states(model), before) and transformers.AttentionInterface.get_interface is own
    handle.remove()
    with pytest.raises(CallError):
        lowtri.explain(model, IDS[0], layer=3)
    assert transformers.AttentionInterface.get_interface is own


def test_other_threads_are_not_recorded() -> None:
    from threading import Thread

    model, calls, own = made(llama, "sdpa"), [], transformers.AttentionInterface.get_interface
    with recorded_attention(calls.append):
        thread = Thread(target=lambda: model(IDS))
        thread.start()
        thread.join()
        assert calls == []
        explanation = lowtri.explain(model, IDS[0], layer=1)
        assert calls == [] and explanation.warning == ""
        assert transformers.AttentionInterface.get_interface is not own
    assert transformers.AttentionInterface.get_interface is own


@pytest.fixture
def registered() -> Iterator[Callable[..., None]]:
    """Registers an attention of a user's with its masks, for one test."""
    attentions, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    names = []

    def register(name: str, attention: Any, mask: Any) -> None:
        attentions.register(name, attention)
        masks.register(name, mask)
        names.append(name)

    yield register
    for name in names:
        attentions._global_mapping.pop(name)
        masks._global_mapping.pop(name)


CHANGES: dict[str, Callable[[Any], Any]] = {"larger": lambda out: out * 1.5, "other rows": lambda out: out.flip(1)}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_an_attention_that_does_more_is_said(attention: str, change: str, registered: Any) -> None:
    functions = {
        "eager": transformers.models.llama.modeling_llama.eager_attention_forward,
        "sdpa": transformers.AttentionInterface()["sdpa"],
    }
    masks = {
        "eager": transformers.masking_utils.eager_mask,
        "sdpa": transformers.masking_utils.sdpa_mask,
    }

    def changed(*args: Any, **options: Any) -> Any:
        return CHANGES[change](functions[attention](*args, **options)[0]), None

    registered("changed", changed, masks[attention])
    explanation = lowtri.explain(made(llama, "changed"), IDS[0], layer=1, head=2)
    assert explanation.warning.startswith("layer 1 of LlamaForCausalLM's own output differs from these steps by up to ")
    assert "own output" in [step.name for step in explanation.steps]


def test_a_mask_that_is_no_table_is_refused(registered: Any) -> None:
    registered("blocks", transformers.AttentionInterface()["sdpa"], lambda *_, **__: torch.ones(1, 7, dtype=torch.bool))
    with pytest.raises(
        CallError, match=r'the mask of "blocks" attention is of the shape \(1, 7\), expected a table of pairs'
    ):
        lowtri.explain(made(llama, "blocks"), IDS[0])


PADDED = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
NO_IDS = "ids are missing: what the model reads, (N,). Fix: explain(model, ids)."
NOT_SWITCHED = (
    "LlamaForCausalLM is not switched to lowtri's attention, so that it cannot take mask=full.\n"
    "Fix: lowtri.integrations.transformers.switch(model)"
)
TWO_STACKS = (
    "BartModel is an encoder-decoder, in which a layer number names three attentions.\n"
    "Fix: explain(model.get_encoder(), ids), or explain(model.get_decoder(), ids)"
)
OWN_CODE = (
    "BloomForCausalLM has attention code of its own: no layer asked transformers' attention interface.\n"
    "Fix: explain((q, k, v), mask=...) with what its attention receives."
)


ERRORS = [
    (llama, "sdpa", IDS[0], {"layer": 3}, "there is no layer 3 among 3. Fix: 0 to 2."),
    (llama, "sdpa", IDS[0], {"layer": -1}, "there is no layer -1 among 3. Fix: 0 to 2."),
    (llama, "sdpa", IDS[0], {"head": 4}, "there is no head 4 among 4. Fix: head from 0 to 3."),
    (llama, "sdpa", IDS, {"batch": 2}, "there is no batch row 2 among 2. Fix: batch from 0 to 1."),
    (llama, "sdpa", None, {}, NO_IDS),
    (llama, "sdpa", [0.5], {}, "ids are (1, 1) torch.float32, but one sequence is (N,)"),
    (llama, "sdpa", [], {}, "ids are (1, 0) torch.float32, but one sequence is (N,)"),
    (llama, "sdpa", IDS[0], {"heads": 2}, "position and heads are for a module with W_q"),
    (llama, "sdpa", IDS[0], {"mask": "full"}, NOT_SWITCHED),
    (llama, "lowtri", PADDED, {"mask": "full"}, "got mask= and inputs with an attention_mask. Fix: use(model, mask="),
    (bart, "eager", IDS[0], {}, TWO_STACKS),
    (bloom, "eager", IDS[0], {}, OWN_CODE),
]


@pytest.mark.parametrize(
    ("kind", "attention", "inputs", "options", "words"), ERRORS, ids=[row[-1][:40] for row in ERRORS]
)
def test_errors(kind: Any, attention: str, inputs: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(CallError, match=re.escape(words)):
        lowtri.explain(made(kind, attention), inputs, **options)


def test_a_layer_with_two_attentions_is_named() -> None:
    inputs = {"input_ids": IDS[0], "encoder_hidden_states": torch.randn(1, 3, 32)}
    with pytest.raises(CallError, match=r"layer 0 of BartDecoder has 2 attentions\."):
        lowtri.explain(bart().eval().get_decoder(), inputs)


def test_a_layer_without_attention_is_named() -> None:
    sizes = SIZES | {"num_key_value_heads": 2, "num_hidden_layers": 3}
    config = transformers.Lfm2Config(**sizes, layer_types=["conv", "full_attention", "conv"], **NO_TOKENS)
    model = transformers.Lfm2ForCausalLM(config).eval()
    assert lowtri.explain(model, IDS[0], layer=1).mask == "causal"
    with pytest.raises(CallError, match=r"layer 0 of Lfm2ForCausalLM has no attention that asks.*\nFix: layer in 1"):
        lowtri.explain(model, IDS[0], layer=0)


def test_a_transformers_without_the_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(llama, "sdpa")
    monkeypatch.delattr(transformers.AttentionInterface, "get_interface")
    with pytest.raises(
        EngineError, match=r"has no AttentionInterface\.get_interface.*\nFix: pip install -U transformers"
    ):
        lowtri.explain(model, IDS[0])


def test_a_forked_child_records_while_another_thread_of_its_parent_did() -> None:
    code = """
import os, signal, threading
import torch, transformers, lowtri
from lowtri.compat import transformers_private as private

sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9, **sizes)).eval()
own, held, done = transformers.AttentionInterface.get_interface, threading.Event(), threading.Event()

def hold():
    with private.recorded_attention(print), private._recording_lock:
        held.set()
        done.wait()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    right = lowtri.explain(model, [1, 2, 3]).warning == "" and transformers.AttentionInterface.get_interface is own
    os._exit(0 if right else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
done.set()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.stdout.split() == ["0"], done.stderr[-2000:]
