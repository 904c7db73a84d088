"""Attention beside torch's and the plain formula: the tables of docs/speed.md, which have more rows than `lowtri bench`.

python benchmarks/attention.py                      # the main table; to expect: ratios like those of docs/speed.md
python benchmarks/attention.py --full               # every row
python benchmarks/attention.py --case "decode" --case "window bf16" --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial

from lowtri.benching import ROUNDS, SDPA, as_json, as_text, facts, headline, measure, ours, sdpa
from presets import choose

FORMULA = "plain formula"
PEERS = {SDPA: sdpa, FORMULA: partial(ours, engine="formula")}


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def options(description: str) -> argparse.ArgumentParser:
    """The options of programs that print such a table."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the whole table")
    parser.add_argument("--case", action="append", default=[], help="only cases with these words in their names")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--list", action="store_true", help="only list the cases")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = options(__doc__).parse_args(arguments)
    calls = choose(chosen.full, chosen.case)
    if chosen.list:
        print("\n".join(call.name for call in calls))
        return
    machine = facts(chosen.threads)
    note(headline(machine))
    rows = list(measure(calls, PEERS, chosen.threads, chosen.rounds, progress=note))
    print(json.dumps(as_json(rows, machine), indent=2) if chosen.json else as_text(rows, machine))


if __name__ == "__main__":
    main()
