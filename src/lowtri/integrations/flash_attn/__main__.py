"""``python -m lowtri.integrations.flash_attn script.py [arguments]``: ``import flash_attn`` in the script finds lowtri's functions."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from lowtri.errors import LowtriError
from lowtri.integrations.flash_attn.install import install

__all__ = ["main"]


def main() -> int:
    """Run the script named by the first argument; 2 if there is no such script, or the real package is installed."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__, file=sys.stderr)
        return 0 if len(sys.argv) > 1 else 2
    if not Path(sys.argv[1]).is_file():
        print(f"{sys.argv[1]} is not a file. Fix: the path of a Python script.\n{__doc__}", file=sys.stderr)
        return 2
    try:
        print(install(), file=sys.stderr)
    except LowtriError as error:
        print(error, file=sys.stderr)
        return 2
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
