"""Why the mask? The same small model, trained with and without it on text that every Python installation has.

    python examples/why_mask                          # about two minutes on two cores
    python examples/why_mask --out out/why-mask --steps 800

Prints four measured consequences of training without the mask and a sample from both models; draws why-mask.png, and writes
all figures to why-mask.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(EXAMPLES), str(EXAMPLES / "train")]  # the package why_mask, and the modules train and corpus

from lowtri.files import write_text  # noqa: E402
from why_mask.consequences import as_text, draw  # noqa: E402
from why_mask.experiment import Setting, why_mask  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("out/why-mask"), help="a folder for the picture and the figures"
    )
    parser.add_argument("--steps", type=int, default=Setting().recipe.steps, help="of training, for each model")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    experiment = why_mask(
        Setting(recipe=replace(Setting().recipe, steps=options.steps)), note=lambda line: print(line, flush=True)
    )
    print(f"\n{as_text(experiment)}\n\n{time.perf_counter() - started:.0f} s")
    write_text(options.out / "why-mask.json", json.dumps(experiment.as_dict(), indent=1) + "\n")
    if not draw(experiment, options.out / "why-mask.png"):
        print("no picture: matplotlib is not installed (pip install matplotlib)")


main()
