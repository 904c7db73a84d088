"""The experiment on training without the mask, once for all tests of a process."""

from __future__ import annotations

from functools import cache
from pydoc_data import topics

from why_mask.experiment import SHORT, Experiment, why_mask


@cache
def experiment(size: str) -> Experiment:
    """Both models, trained: "small" takes half a minute on one text, "full" is that of examples/why_mask."""
    if size == "full":
        return why_mask()
    reference = [text.strip() + "\n" for _, text in sorted(topics.topics.items())]
    return why_mask(SHORT, texts=reference)
