"""Starts the demo: python examples/demo"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # examples/, which holds the packages demo and why_mask

from demo.stage import main  # noqa: E402
from demo.tour import ACTS  # noqa: E402

sys.exit(main(ACTS))
