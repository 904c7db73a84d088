"""Attention beside its peers, on this machine. Run: python benchmarks/attention.py --full

The same as `lowtri bench`, which see (`--help`); to expect: the main table of docs/speed.md, in ratios if not in figures.
"""

from __future__ import annotations

import sys

from lowtri.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
