"""What the experiment shows, as statements with the figures that were measured: the tour prints them, the tests hold them."""

from __future__ import annotations

from typing import NamedTuple

from why_mask.experiment import Experiment

__all__ = ["Statement", "statements"]


class Statement(NamedTuple):
    """A consequence of training without the mask, or a property of the model that has it."""

    topic: str  # cheating, overfitting, order, generation, or modes
    text: str  # with its figure
    holds: bool


def statements(found: Experiment) -> list[Statement]:
    """The consequences in their order, then training against inference."""
    return [*_cheating(found), *_overfitting(found), *_order(found), *_generation(found), *_modes(found)]


def _cheating(found: Experiment) -> list[Statement]:
    masked, unmasked = found.masked, found.unmasked
    apart = abs(masked.stepwise - masked.validation)
    forced, fewest = unmasked.validation, min(unmasked.stepwise, unmasked.anew)
    return [
        Statement(
            "cheating",
            f"masked: teacher-forced and step by step agree, {apart:.0e} apart, below 1e-5",
            apart < 1e-5 and masked.greatest < 1e-4,  # of a single position
        ),
        Statement(
            "cheating",
            f"unmasked: it cheats, {forced:.3f} teacher-forced where the masked model has {masked.validation:.3f}",
            forced < masked.validation / 2,
        ),
        Statement(
            "cheating",
            f"unmasked: {unmasked.stepwise:.3f} step by step, {unmasked.anew:.3f} with the prefix computed anew",
            fewest > forced + 2,  # whichever way the steps are computed
        ),
    ]


def _overfitting(found: Experiment) -> list[Statement]:
    unmasked = found.unmasked
    gap, fall = unmasked.validation - unmasked.training, unmasked.stepwise - unmasked.validation
    text = f"unmasked: validation does not show it ({gap:+.3f} over training), step by step does ({fall:+.3f})"
    return [Statement("overfitting", text, abs(gap) < min(fall / 10, 0.3))]


def _order(found: Experiment) -> list[Statement]:
    masked, unmasked, letters, real = found.masked.words, found.unmasked.words, found.letters, found.real
    return [
        Statement(
            "order",
            f"known words written: {masked.words:.0%} with the mask, {unmasked.words:.0%} without",
            masked.words > max(unmasked.words, letters.words) + 0.1,
        ),
        Statement(
            "order",
            f"known pairs of words: {masked.pairs:.0%} with the mask, {unmasked.pairs:.0%} without",
            masked.pairs > unmasked.pairs,
        ),
        Statement(
            "order",
            f"real text can be told from both: {real.words:.0%} known words, {real.pairs:.0%} known pairs",
            real.words > 0.9 and real.pairs > 0.5,
        ),
    ]


def _generation(found: Experiment) -> list[Statement]:
    masked, best = found.masked.stepwise, min(found.unmasked.stepwise, found.unmasked.anew)
    return [
        Statement(
            "generation",
            f"masked: {masked:.2f} step by step, better than letter frequencies, {found.unigram:.2f}, "
            f"and than knowing nothing, {found.uniform:.2f}",
            masked < found.unigram < found.uniform,
        ),
        # How much worse the other one is depends on how long it learnt to copy; that it is much worse does not.
        Statement(
            "generation", f"unmasked: {best:.2f} at best, at least a nat behind the masked one", best > masked + 1
        ),
    ]


def _modes(found: Experiment) -> list[Statement]:
    (_, one), (layers, whole) = sorted(found.modes.items())
    same = max(*one, whole.cache, whole.prefix_with_mask)
    without = whole.prefix_without_mask
    return [
        Statement(
            "modes",
            f"training is inference with a cache, or with the prefix and its mask: {same:.0e} apart",
            same < 1e-4,
        ),
        Statement(
            "modes",
            f"the prefix without a mask is so in one layer only: {without:.2g} apart in {layers}",
            without > 0.1,
        ),
    ]
