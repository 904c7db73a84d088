"""Other code paths of the same model: with weights returned, with another attention implementation, compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lowtri.auditing.conditions import Condition, probe_under
from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding
from lowtri.auditing.probe import Probe
from lowtri.auditing.probes.change import PROBE as CHANGE
from lowtri.auditing.probes.gradient import PROBE as GRADIENT
from lowtri.compat.transformers_private import attention_name

__all__ = ["PROBE"]

_KEYWORDS = ("output_attentions", "output_hidden_states", "return_weights", "need_weights", "return_attention")
_PROBES = (CHANGE, GRADIENT)


def _code_paths(context: Context) -> Finding:
    """The mask must hold on each; another output under an unbroken mask is a warning."""
    outcome = probe_under(_conditions(context))
    measured = {"opened": list(outcome.tried), "not_offered": outcome.refused}
    return outcome.finding(f"the mask holds ({', '.join(outcome.tried)})", measured, "no other code path is known")


def _conditions(context: Context) -> Iterator[Condition]:
    adapter, inputs = context.adapter, context.inputs
    for name in _KEYWORDS:
        if adapter.accepts(name) or (name.startswith("output_") and hasattr(adapter.model, "config")):
            for value in (True, False) if name == "need_weights" else (True,):
                with_keyword = replace(context, inputs=replace(inputs, options={**inputs.options, name: value}))
                yield Condition(f"{name}={value}", f"with {name}={value}", _PROBES, with_keyword, without=context)
    if hasattr(adapter.model, "set_attn_implementation"):
        current = attention_name(adapter.model)
        for name in ("eager", "sdpa"):
            if name != current:
                path = f"attn_implementation={name}"
                yield Condition(path, f"with {path}", _PROBES, context, attention=name, without=context)
    if context.options.compile:
        import torch

        compiled = replace(context, adapter=replace(adapter, model=torch.compile(adapter.model)))
        # Its backward pass would be compiled as well, which takes minutes.
        yield Condition("torch.compile", "with torch.compile", (CHANGE,), compiled, without=context)


def _not_compiled(finding: Finding, value: object) -> str | None:
    reason = finding.measured.get("not_offered", {}).get("torch.compile")
    return None if finding.status == "leak" else reason


PROBE = Probe(
    name="code_paths",
    does="runs change and gradient with weights or hidden states returned, other attention implementations, "
    "`compile=True`",
    finds="code paths that do not apply the mask",
    function=_code_paths,
    argument="compile",
    not_run=_not_compiled,
)
