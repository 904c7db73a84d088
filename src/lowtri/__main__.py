"""``python -m lowtri``: the command ``lowtri``, for programs that start modules, such as torchrun."""

from __future__ import annotations

import sys

from lowtri.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
