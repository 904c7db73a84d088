"""Trains the two small models that run in the lesson's page of each language: with the causal mask, and without it.

    python examples/lesson_model                                   # all eight; each takes minutes on one core
    python examples/lesson_model --languages en --masks causal --steps 500 --out out/models

Both models of a language begin with the same weights and read the same rows. Writes LANGUAGE-MASK.json, and prints the losses
of the weights as stored, in nats a character.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(EXAMPLES)]  # the package lesson_model

from lesson_model.training import Recipe, trained  # noqa: E402
from lowtri.files import write_text  # noqa: E402
from lowtri.lesson.languages import LANGUAGES, assets  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--languages", nargs="+", default=list(LANGUAGES), choices=list(LANGUAGES))
    parser.add_argument("--masks", nargs="+", default=["causal", "full"], choices=["causal", "full"])
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--out", type=Path, default=assets() / "models", help="a folder for the weights")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the order of additions, and so the weights, depend on the number of threads
    options.out.mkdir(parents=True, exist_ok=True)
    for language in options.languages:
        for mask in options.masks:
            stored = trained(Recipe(language, mask, options.steps), note=lambda line: print(line, flush=True))
            text = json.dumps(stored, ensure_ascii=False, separators=(",", ":"))
            write_text(options.out / f"{language}-{mask}.json", text + "\n")
            print(f"{language} {mask}: {json.dumps(stored['measured'])}; {len(text.encode()):,} bytes", flush=True)


if __name__ == "__main__":
    main()
