"""The experiment on training without the mask, once for all tests of a process."""

from __future__ import annotations

from functools import cache
from pydoc_data import topics

from lowtri.training.corpus import Document
from why_mask.experiment import SHORT, Experiment, why_mask


@cache
def experiment(size: str) -> Experiment:
    """Both models, trained: "small" takes half a minute on one text, "full" is that of examples/why_mask."""
    if size == "full":
        return why_mask()
    reference = [Document(name, text.strip() + "\n") for name, text in sorted(topics.topics.items())]
    return why_mask(SHORT, documents=reference)
