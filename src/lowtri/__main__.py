"""The command ``lowtri``; ``python -m lowtri`` is for programs that start modules, such as torchrun."""

from __future__ import annotations

import sys

from lowtri.errors import ExtraError
from lowtri.extras import require

__all__ = ["main"]


def main() -> int:
    """Runs the command line; without the packages that it needs, one line says how to install them."""
    try:
        require("the command lowtri", "typer", "rich")
    except ExtraError as error:
        print(f"lowtri: {error}", file=sys.stderr)
        return error.exit_code
    from lowtri.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
