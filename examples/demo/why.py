"""The same model trained with the mask and without it: the four consequences, held to what the weights do."""

from __future__ import annotations

import json

from demo.context import Context, Result
from demo.tables import TIMES, as_text
from why_mask.consequences import as_text as consequences
from why_mask.consequences import draw

__all__ = ["SENTENCE", "TITLE", "run"]

TITLE = "Why the mask"
SENTENCE = "One small model, trained twice on Python's own texts: once it may see the future, once it may not."


def run(context: Context) -> Result:
    """Run the experiment, and hold the four consequences to its figures."""
    experiment = context.experiment
    masked, unmasked = experiment.masked, experiment.unmasked
    result = Result(f"{consequences(experiment)}\n\n{as_text(TIMES)}")
    apart = abs(masked.stepwise - masked.validation)
    result.check(f"masked: teacher-forced and step by step agree, {apart:.0e} apart, below 1e-5", apart < 1e-5)
    result.check(
        f"unmasked: it cheats, {unmasked.validation:.3f} teacher-forced and {unmasked.stepwise:.3f} step by step",
        unmasked.stepwise > 2 * unmasked.validation,
    )
    gap, fall = unmasked.validation - unmasked.training, unmasked.stepwise - unmasked.validation
    result.check(
        f"unmasked: validation does not show it ({gap:+.3f} over training), step by step does ({fall:+.3f})",
        abs(gap) < fall / 10,
    )
    for name in ("words", "pairs"):
        ours, theirs = (getattr(it.words, name) for it in (masked, unmasked))
        result.check(f"known {name} written: {ours:.0%} with the mask, {theirs:.0%} without", ours > theirs)
    result.check(
        f"masked: {masked.stepwise:.2f} step by step, better than letter frequencies, {experiment.unigram:.2f}",
        masked.stepwise < experiment.unigram,
    )
    # How far the other one falls depends on how long it learnt to copy; that it is far behind does not.
    result.check(
        f"unmasked: {min(unmasked.stepwise, unmasked.anew):.2f} at best, at least a nat behind the masked one",
        min(unmasked.stepwise, unmasked.anew) > masked.stepwise + 1,
    )
    (_, one), (layers, all_of_it) = sorted(experiment.modes.items())
    same = max(*one, all_of_it.cache, all_of_it.prefix_with_mask)
    result.check(f"training is inference with a cache, or with the prefix and its mask: {same:.0e} apart", same < 1e-4)
    result.check(
        f"the prefix without a mask is so in one layer only: {all_of_it.prefix_without_mask:.2g} apart in {layers}",
        all_of_it.prefix_without_mask > 1e-2,
    )
    result.files = [context.write("why-mask.json", json.dumps(experiment.as_dict(), indent=1) + "\n")]
    if draw(experiment, context.out / "why-mask.png"):
        result.pictures = ["why-mask.png"]
    return result
