"""Packages that only some parts of lowtri need. Each belongs to an extra of lowtri; errors name the packages themselves.

lowtri itself needs NumPy alone: masks, attention and caches of NumPy arrays, audits of functions of arrays, plans of shards.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from lowtri.errors import ExtraError

EXTRAS = {  # package -> the extra that installs it
    "torch": "torch",
    "safetensors": "torch",
    "typer": "cli",
    "rich": "cli",
    "transformers": "transformers",
    "gguf": "transformers",
    "jinja2": "transformers",
    "matplotlib": "plot",
}


def is_installed(package: str) -> bool:
    """Whether the package can be imported; it is not imported."""
    return sys.modules.get(package) is not None or find_spec(package) is not None


def require(what: str, *packages: str) -> None:
    """Raises unless every package can be imported.

    >>> require("an example", "numpy", "torch")

    Raises:
        ExtraError: with the packages that are missing, and the line that installs them.
    """
    absent = [name for name in packages if name in EXTRAS and not is_installed(name)]
    if absent:
        raise ExtraError(missing(what, *absent))


def missing(what: str, *packages: str) -> str:
    """The message about packages that are not installed.

    >>> print(missing("an example", "torch", "rich"))
    an example needs torch and rich, which are not installed.
    Fix: pip install torch rich
    """
    verb = "is" if len(packages) == 1 else "are"
    listed = " and ".join(filter(None, (", ".join(packages[:-1]), packages[-1])))
    return f"{what} needs {listed}, which {verb} not installed.\nFix: pip install {' '.join(packages)}"
