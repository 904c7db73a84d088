"""The command ``lowtri``; ``python -m lowtri`` is for programs that start modules, such as torchrun."""

from __future__ import annotations

import sys

from lowtri.errors import ExtraError, is_interrupt


def main() -> int:
    """Runs the command line; without the packages that it needs, one line says how to install them."""
    try:
        from lowtri.cli.verbs import COMMAND_LINE, packages_for
        from lowtri.extras import is_installed, require

        if not all(map(is_installed, COMMAND_LINE)):  # else each verb says what it lacks, once its options are read
            what, packages = packages_for(sys.argv[1:])
            require(what, *packages)
        from lowtri.cli.main import main
    except ExtraError as error:
        print(f"lowtri: {error}", file=sys.stderr)
        return error.exit_code
    except BaseException as error:  # Ctrl-C while modules load
        if not is_interrupt(error):
            raise
        print("lowtri: interrupted", file=sys.stderr)
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(main())
