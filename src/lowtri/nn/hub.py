"""Models of the Hugging Face hub, by name: ``org/name``. The package huggingface_hub downloads them into its own cache, once.

Only configuration, tokenizer and safetensors files are downloaded; they are checked like those of any other folder.
"""

from __future__ import annotations

import re
from pathlib import Path

from lowtri.errors import DataError
from lowtri.nn.files import brief

__all__ = ["FILES", "download", "is_hub_name"]

FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
FILES += ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]


def is_hub_name(name: str) -> bool:
    """Whether a text has the form of a hub name, and is no existing path.

    >>> is_hub_name("org/name"), is_hub_name("./name"), is_hub_name("name"), is_hub_name("a/b/c")
    (True, False, False, False)
    """
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None and not Path(name).exists()


def download(name: str) -> Path:
    """The folder of a model in huggingface_hub's cache, downloaded if it is not there.

    Raises:
        DataError: if huggingface_hub is not installed, the model does not exist or needs its owner's consent, or it is not
            in the cache and the hub cannot be reached.
    """
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise DataError(
            f"{name} is not a folder, and a model of the Hugging Face hub needs huggingface_hub, which is not installed.\n"
            "Fix: pip install 'lowtri[models]', or the path of a folder"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except errors.GatedRepoError:
        reason, fix = "needs the consent of its owner", "accept its terms on its page, then hf auth login"
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        reason, fix = "is not a model of the Hugging Face hub", "its name, org/name, or the path of a folder"
    except Exception as error:  # of several HTTP libraries, by version
        reason = f"cannot be downloaded: {brief(error).splitlines()[0] if str(error) else type(error).__name__}"
        fix = "a network connection, or the path of a folder that has its files"
    raise DataError(f"{name} is not a folder, and {reason}.\nFix: {fix}")
