"""Why the mask? The same small model, trained with it and without it on text that every Python has.

    python examples/why_mask.py                       # about two minutes on two cores
    python examples/why_mask.py --out out/why-mask --steps 800

Prints the four consequences of a model that peeks, as they are measured, and what both models write; draws them as
why-mask.png, and keeps every figure in why-mask.json.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from lowtri.training.consequences import as_text, draw
from lowtri.training.experiment import Setting, why_mask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("out/why-mask"), help="a folder for the picture and the figures"
    )
    parser.add_argument("--steps", type=int, default=Setting().recipe.steps, help="of training, for each model")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    found = why_mask(
        Setting(recipe=replace(Setting().recipe, steps=options.steps)), note=lambda line: print(line, flush=True)
    )
    print(f"\n{as_text(found)}\n\n{time.perf_counter() - started:.0f} s")
    (options.out / "why-mask.json").write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
    if not draw(found, options.out / "why-mask.png"):
        print("no picture: matplotlib is not installed (pip install 'lowtri[plot]')")


if __name__ == "__main__":
    main()
