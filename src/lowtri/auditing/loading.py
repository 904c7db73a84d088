"""A model to audit from the command line: made by a function in a file, or read from a checkpoint folder."""

from __future__ import annotations

import inspect
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lowtri.auditing.audit import audit
from lowtri.auditing.context import vocabulary_size
from lowtri.auditing.inputs import first_line
from lowtri.errors import DataError

__all__ = ["Target", "declared_mask", "load_target"]


def declared_mask(config: Any) -> tuple[str, int | None]:
    """What each output may depend on by a model's config, as the text of a mask, and for how many layers it is widened.

    >>> from transformers import Gemma3TextConfig, MistralConfig
    >>> declared_mask(MistralConfig(sliding_window=16, num_hidden_layers=3))
    ('causal & window(16)', 3)
    >>> declared_mask(Gemma3TextConfig(layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2))
    ('causal', None)

    Every layer passes on what it has seen, so a window widens with the layers and chunks do not. Where layers differ, the outputs
    may depend on what any path through them reaches: one layer of full attention makes that all earlier positions.

    Args:
        config: a config of transformers; one with parts for several modalities is read for its text model.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config

    def size(*names: str) -> int:
        values = [getattr(text, name, None) for name in names]
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), 0)

    # The kind of attention of each layer, in transformers' words; GPT-Neo names the attribute differently.
    kinds = getattr(text, "layer_types", None) or getattr(text, "attention_layers", None)
    if not kinds:
        slides = size("sliding_window") and getattr(text, "use_sliding_window", True) is not False
        kinds = ["sliding_attention" if slides else "full_attention"]
    sizes = {
        **dict.fromkeys(("sliding_attention", "local"), ("window", size("sliding_window", "window_size"))),
        "chunked_attention": ("chunks", size("attention_chunk_size")),
    }
    # Layers of other kinds have full attention, or read the whole past without attention.
    declared = {sizes.get(str(kind), ("", 0)) for kind in kinds}
    name, n = declared.pop()
    if declared or not n:
        return "causal", None
    return f"causal & {name}({n})", max(1, size("num_hidden_layers"))


@dataclass
class Target:
    """A model, what to run it on, and what its maker declares about it."""

    model: Any
    example: Any
    mask: Any = None
    arguments: dict[str, Any] = field(default_factory=dict)


def load_target(text: str, *, length: int | None = None, vocab_size: int | None = None, seed: int = 0) -> Target:
    """Read `FILE.py:make_model` or a folder with a config.json.

    The function returns a model, or (model, example), or (model, example, arguments of `lowtri.audit`); instead of a
    function the name may be a module's. A name `MASK` in the file is the mask that the model declares. Without an example,
    token ids are drawn.

    Raises:
        DataError: if there is no such file, folder or function, or the model cannot be made.
    """
    path, _, name = text.rpartition(":")
    if path and path.endswith(".py"):
        target = _from_file(Path(path), name)
    elif text.endswith(".py"):
        raise DataError(f"{text}: say which function makes the model, as {text}:make_model")
    elif Path(text).is_dir():
        target = _from_folder(Path(text))
    else:
        raise DataError(f"{text}: neither a folder with a config.json nor FILE.py:make_model")
    if target.example is None:
        target.example = _random_ids(target.model, length, vocab_size, seed)
    return target


def _from_file(path: Path, name: str) -> Target:
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    # Files may import their neighbours, as they may when run.
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        module = runpy.run_path(str(path))
        make = module.get(name)
        if not callable(make):
            raise DataError(f"{path}: has no function {name!r}")
        result = make if hasattr(make, "named_modules") and not isinstance(make, type) else make()
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path}:{name}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    parts = result if isinstance(result, tuple) else (result,)
    if not 1 <= len(parts) <= 3 or not callable(parts[0]) or (len(parts) == 3 and not isinstance(parts[2], dict)):
        raise DataError(f"{path}:{name}: returns neither a model, nor (model, example), nor (model, example, dict)")
    arguments = dict(parts[2]) if len(parts) == 3 else {}
    known = list(inspect.signature(audit).parameters)[2:]  # without the model and the example
    unknown = next((key for key in arguments if key not in known), None)
    if unknown is not None:
        raise DataError(
            f"{path}:{name}: returns the argument {unknown!r}, which lowtri.audit does not take.\nFix: one of {', '.join(known)}."
        )
    mask = arguments.pop("mask", module.get("MASK"))
    return Target(parts[0], parts[1] if len(parts) > 1 else None, mask, arguments)


def _from_folder(folder: Path) -> Target:
    from lowtri.nn.files import read_json

    config = read_json(folder, "config.json")
    if config is None:
        raise DataError(f"{folder}: no readable config.json (there is none)")
    if "lowtri_mask" in config:
        from lowtri.nn.checkpoint import load

        model: Any = load(folder)[0]
        # The mask in the file is each layer's; from end to end a layer passes on what it has seen.
        return Target(model, None, model.mask, {"layers": model.config.num_hidden_layers})
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise DataError(f"{folder}: a checkpoint of transformers, which is not installed") from None
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise DataError(f"{folder}: transformers cannot load it: {first_line(error, typed=False)}") from None
    mask, layers = declared_mask(model.config)
    return Target(model, None, mask, {} if layers is None else {"layers": layers})


def _random_ids(model: Any, length: int | None, vocab_size: int | None, seed: int) -> Any:
    """Two rows of random ids, long enough to go past the model's window where that is small."""
    config = getattr(model, "config", None)
    if length is None:
        window = getattr(config, "sliding_window", None)
        length = 24 if not isinstance(window, int) else max(24, min(window + 8, 256))
        length = min(length, getattr(config, "max_position_embeddings", None) or length)
    size = vocab_size or vocabulary_size(model)
    if size is None:
        raise DataError("the model names no vocabulary: return (model, example) from the function, or say --vocab")
    ids = np.random.default_rng(seed).integers(0, size, (2, length))
    if not hasattr(model, "parameters"):
        return ids
    import torch

    return torch.from_numpy(ids)
