"""The same model trained with the mask and without it: the four consequences, held to what the weights do."""

from __future__ import annotations

import json

from lowtri.cli.acts.stage import Stage, Told
from lowtri.cli.acts.tables import TIMES, as_text
from lowtri.training.consequences import as_text as consequences
from lowtri.training.consequences import draw

__all__ = ["SENTENCE", "TITLE", "play"]

TITLE = "Why the mask"
SENTENCE = "One small model, trained twice on Python's own texts: once it may see the future, once it may not."


def play(stage: Stage) -> Told:
    """Run the experiment, and hold the four consequences to its figures."""
    found = stage.experiment
    masked, unmasked = found.masked, found.unmasked
    told = Told(f"{consequences(found)}\n\n{as_text(TIMES)}")
    apart = abs(masked.stepwise - masked.validation)
    told.promise(f"masked: teacher-forced and step by step agree, {apart:.0e} apart, below 1e-5", apart < 1e-5)
    told.promise(
        f"unmasked: it cheats, {unmasked.validation:.3f} teacher-forced and {unmasked.stepwise:.3f} step by step",
        unmasked.stepwise > 2 * unmasked.validation,
    )
    gap, fall = unmasked.validation - unmasked.training, unmasked.stepwise - unmasked.validation
    told.promise(
        f"unmasked: validation does not show it ({gap:+.3f} over training), step by step does ({fall:+.3f})",
        abs(gap) < fall / 10,
    )
    for name in ("words", "pairs"):
        ours, theirs = (getattr(it.words, name) for it in (masked, unmasked))
        told.promise(f"known {name} written: {ours:.0%} with the mask, {theirs:.0%} without", ours > theirs)
    told.promise(
        f"masked: {masked.stepwise:.2f} step by step, better than letter frequencies, {found.unigram:.2f}",
        masked.stepwise < found.unigram,
    )
    # How far the other one falls depends on how long it learnt to copy; that it is far behind does not.
    told.promise(
        f"unmasked: {min(unmasked.stepwise, unmasked.anew):.2f} at best, at least a nat behind the masked one",
        min(unmasked.stepwise, unmasked.anew) > masked.stepwise + 1,
    )
    (_, one), (layers, all_of_it) = sorted(found.roads.items())
    same = max(*one, all_of_it.cache, all_of_it.prefix_with_mask)
    told.promise(f"training is inference with a cache, or with the prefix and its mask: {same:.0e} apart", same < 1e-4)
    told.promise(
        f"the prefix without a mask is so in one layer only: {all_of_it.prefix_without_mask:.2g} apart in {layers}",
        all_of_it.prefix_without_mask > 1e-2,
    )
    told.files = [stage.write("why-mask.json", json.dumps(found.as_dict(), indent=1) + "\n")]
    if draw(found, stage.out / "why-mask.png"):
        told.pictures = ["why-mask.png"]
    return told
