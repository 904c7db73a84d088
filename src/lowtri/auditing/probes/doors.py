"""Other code paths of the same model: asked for weights, by another attention, compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lowtri.auditing.conditions import Condition, probe_under
from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding

__all__ = ["doors"]

_KEYWORDS = ("output_attentions", "output_hidden_states", "return_weights", "need_weights", "return_attention")
_PROBES = ("change", "gradient")


def doors(context: Context) -> Finding:
    """Through each door the mask must hold; another answer behind an unbroken mask is a warning."""
    outcome = probe_under(_doors(context))
    measured = {"opened": list(outcome.tried), "not_offered": outcome.refused}
    return outcome.finding("doors", f"the mask holds ({', '.join(outcome.tried)})", measured, "no other door is known")


def _doors(context: Context) -> Iterator[Condition]:
    subject = context.subject
    for name in _KEYWORDS:
        if subject.accepts(name) or (name.startswith("output_") and hasattr(subject.model, "config")):
            for value in (True, False) if name == "need_weights" else (True,):
                said = f"{name}={value}"
                yield Condition(said, f"with {said}", _PROBES, context, {name: value}, compared=True)
    if hasattr(subject.model, "set_attn_implementation"):
        current = getattr(subject.model.config, "_attn_implementation", None)
        for name in ("eager", "sdpa"):
            if name != current:
                said = f"attn_implementation={name}"
                yield Condition(said, f"with {said}", _PROBES, context, attention=name, compared=True)
    if context.options.get("compile"):
        import torch

        compiled = replace(context, subject=replace(subject, model=torch.compile(subject.model)))
        # Its backward pass would be compiled as well, which takes minutes.
        yield Condition("torch.compile", "with torch.compile", ("change",), compiled, compared=True)
