"""Small models of GPT-2, Whisper, T5 and BART with random weights: who uses masked self-attention, and how.

Decoder self-attention is masked; the encoder's and cross-attention are not. Building one needs transformers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import lowtri
from lowtri.auditing.report import AuditReport

__all__ = ["BOTH_SIDES", "NAMES", "SOURCE", "TARGET", "VOCABULARY", "Named", "made", "on_lowtri"]

NAMES = ("GPT-2", "Whisper", "T5", "BART")
BOTH_SIDES = NAMES[1:]
VOCABULARY, SOURCE, TARGET = 40, 12, 12  # the audit must not take lengths that are equal for the same positions


@dataclass(frozen=True)
class Named:
    """A small model and one call of it."""

    model: Any
    given: dict[str, Tensor]

    @property
    def sequence(self) -> str:
        """The name of what the decoder reads."""
        return "decoder_input_ids" if self.model.config.is_encoder_decoder else "input_ids"

    @property
    def source(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.given.items() if name != self.sequence}

    def on(self, attention: str, dtype: torch.dtype = torch.float32) -> Named:
        """A copy of its own with another attention, or in another precision."""
        model = copy.deepcopy(self.model).to(dtype)
        model.set_attn_implementation(attention)
        return Named(model, {name: x.to(dtype) if x.is_floating_point() else x for name, x in self.given.items()})

    def logits(self, **changed: Tensor) -> Tensor:
        logits: Tensor = self.model(**self.given | changed).logits
        return logits

    def audit(self, **options: Any) -> AuditReport:
        """Does the decoder see later tokens?"""
        model = lowtri.Model(self.model, inputs=self.sequence, vocab_size=VOCABULARY)
        report: AuditReport = lowtri.audit(model, self.given, **options)
        return report


def made(name: str) -> Named:
    """The model of this name, with weights large enough that attention is not nearly even, and inputs for it."""
    import transformers as hf

    ends: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    both: dict[str, Any] = ends | {"decoder_start_token_id": 1, "d_model": 32, "vocab_size": VOCABULARY}
    sides: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sides |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
    torch.manual_seed(0)
    model: Any
    if name == "GPT-2":
        size: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, **size, **ends))
    elif name == "Whisper":
        sound: dict[str, Any] = {"num_mel_bins": 4, "max_source_positions": SOURCE, "max_target_positions": 64}
        model = hf.WhisperForConditionalGeneration(hf.WhisperConfig(**both, **sides, **sound))
    elif name == "T5":
        depth: dict[str, Any] = {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
        model = hf.T5ForConditionalGeneration(hf.T5Config(**depth, **both))
    else:
        model = hf.BartForConditionalGeneration(hf.BartConfig(**both, **sides, max_position_embeddings=64))
    with torch.no_grad():
        for part in model.modules():
            if name != "T5" and isinstance(getattr(part, "weight", None), Tensor) and part.weight.ndim > 1:
                part.weight.mul_(2 if isinstance(part, torch.nn.Embedding) else 8)
    ids = torch.randint(3, VOCABULARY, (2, TARGET))
    if name == "GPT-2":
        return Named(model.eval(), {"input_ids": ids})
    source = 3 * torch.randn(2, 4, 2 * SOURCE) if name == "Whisper" else torch.randint(3, VOCABULARY, (2, SOURCE))
    return Named(model.eval(), {model.main_input_name: source, "decoder_input_ids": ids})


@torch.no_grad()
def on_lowtri(name: str) -> tuple[Named, float]:
    """The model switched to lowtri's attention, and the greatest difference of its logits from those of eager attention."""
    from lowtri.integrations.transformers import switch

    eager = made(name).on("eager")
    switched = Named(switch(copy.deepcopy(eager.model)), eager.given)
    return switched, float((switched.logits() - eager.logits()).abs().max())
