"""Starts the demo: python examples/demo"""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(EXAMPLES), str(EXAMPLES / "train")]  # the packages demo and why_mask, the modules train and corpus

from demo.stage import main  # noqa: E402
from demo.tour import ACTS  # noqa: E402

sys.exit(main(ACTS))
