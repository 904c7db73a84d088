"""Models of the transformers library, switched over: the same answers, the same text, and clean."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import lowtri
from demo.context import Context, Result
from lowtri.nn.checkpoint import save

__all__ = ["SENTENCE", "TITLE", "run"]

TITLE = "A model of transformers, switched over"
SENTENCE = 'attn_implementation="lowtri": the trained model of this page as transformers loads it, and five shapes of other attention.'

_MISSING = "transformers is not installed, so there is no model of its to switch over. Fix: pip install transformers"
_PROMPT = "This function returns the "
_MOST = 1e-4  # float32, against logits of up to some tens
_SIZE = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def run(context: Context) -> Result:
    """Compare eager and lowtri on one trained and five random models, and audit the trained one."""
    if find_spec("transformers") is None:
        return Result(_MISSING)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    from lowtri.integrations.transformers import switch, use

    logging.getLogger("transformers").setLevel(logging.ERROR)
    result, experiment = Result(""), context.experiment
    folder = context.out / "switched"
    save(experiment.models["causal"], folder, experiment.tokenizer)
    result.files = [f"switched/{name}" for name in ("config.json", "model.safetensors")]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.tensor([experiment.tokenizer.encode(_PROMPT).ids])
    before, text = _logits(model, ids), _written(model, ids)
    switch(model)
    away, again = float((_logits(model, ids) - before).abs().max()), _written(model, ids)
    said = experiment.tokenizer.decode(again[0].tolist())
    lines = [f"the trained model, {type(model).__name__}, goes on from {_PROMPT!r}:", f"  {said!r}", ""]
    result.check(f"the trained model's logits by lowtri are eager's to {away:.1e}", away < _MOST)
    result.check(f"it writes the same {again.shape[1] - ids.shape[1]} tokens", torch.equal(again, text))
    other = switch(type(model)(model.config).eval())  # random weights, the same config object
    own = _logits(other, ids)
    shown, narrow = _logits(model, ids), _logits(use(model, mask="causal & window(2)"), ids)
    alone = torch.equal(_logits(other, ids), own) and not torch.equal(narrow, shown)
    use(model)
    result.check("a mask set for the model changes it, and no other model of its config", alone)
    report = lowtri.audit(model, torch.randint(2, model.config.vocab_size, (2, 24)), mask="causal", progress=False)
    result.files.append(report.save(context.out / "audit-switched.html").name)
    result.check(f"audited with lowtri's attention: {report.verdict}", report.ok)

    lines.append(f"{'random weights, three rows, one padded on the left':<52}{'greatest difference':>20}")
    for name, other in _others(transformers).items():
        away = _difference(other, switch)
        lines.append(f"  {name:<50}{away:>20.1e}")
        result.check(f"{name}: {away:.1e} from eager, below {_MOST:.0e}", away < _MOST)
    result.text = "\n".join(lines)
    return result


def _others(tf: Any) -> dict[str, Any]:
    """Attention of other shapes: windows, capped scores, sinks, a position bias, an encoder beside a decoder."""
    torch.manual_seed(0)
    two = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    experts = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    sides = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    bart = {
        "vocab_size": 99,
        "d_model": 64,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "max_position_embeddings": 64,
        **sides,
    }
    t5 = {"vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    return {
        "GPT-2": tf.GPT2LMHeadModel(
            tf.GPT2Config(vocab_size=99, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
        ),
        "Gemma 2: scores capped, every other layer a window": tf.Gemma2ForCausalLM(tf.Gemma2Config(**_SIZE, **two)),
        "gpt-oss: sinks, every other layer a window": tf.GptOssForCausalLM(tf.GptOssConfig(**_SIZE, **two, **experts)),
        "T5: a learned position bias, cross-attention": tf.T5ForConditionalGeneration(tf.T5Config(**t5)),
        "BART: encoder, decoder, cross-attention": tf.BartForConditionalGeneration(tf.BartConfig(**bart)),
    }


def _difference(model: Any, switch: Any) -> float:
    """The greatest difference between eager and lowtri, at places that hold a token."""
    model.eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    ids = torch.randint(3, 99, (3, 24))
    pads = torch.ones_like(ids)
    pads[0, :7] = 0
    inputs = {"input_ids": ids, "attention_mask": pads}
    keep = pads.bool()
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"], keep = ids[:, :12], torch.ones(3, 12, dtype=torch.bool)
    answers = []
    for change in (lambda: model.set_attn_implementation("eager"), lambda: switch(model)):
        change()
        with torch.no_grad():
            answers.append(model(**inputs).logits[keep])
    return float((answers[1] - answers[0]).abs().max())


def _logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def _written(model: Any, ids: Tensor) -> Tensor:
    written: Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0
    )
    return written
