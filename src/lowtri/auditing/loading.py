"""What the command line names: a function in a Python file, and a model to audit, made by one or read by its name."""

from __future__ import annotations

import contextlib
import inspect
import runpy
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np

from lowtri.auditing.adapter import Model, as_model
from lowtri.auditing.audit import audit
from lowtri.auditing.context import vocabulary_size
from lowtri.errors import DataError
from lowtri.pretrained import Pretrained, read_model


def function_in_file(target: str, example: str, *, traceback: bool = False) -> tuple[Any, dict[str, Any]]:
    """What `FILE.py:name` names, and all names of the file.

    Args:
        example: the name that an error suggests.
        traceback: whether an error of the file says where it was raised.

    Raises:
        DataError: if there is no such file or no function of that name in it, or the file cannot be run.
    """
    file, _, name = target.rpartition(":")
    path = Path(file)
    if not file.endswith(".py"):
        raise DataError(f"{target}: no function is named.\nFix: FILE.py:{example}, a function in a Python file.")
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    with _user_code(target, traceback):
        names = runpy.run_path(str(path))
    if not callable(names.get(name)):
        functions = [key for key, value in names.items() if callable(value) and not key.startswith("_")]
        raise DataError(f"{path}: has no function {name!r}; it has {', '.join(functions[:6]) or 'none'}.")
    return names[name], names


@contextlib.contextmanager
def _user_code(target: str, traceback: bool) -> Iterator[None]:
    """Runs code of the file of `FILE.py:name`, which may import its neighbours; whatever ends it is a DataError, sys.exit too."""
    folder = str(Path(target.rpartition(":")[0]).parent.resolve())
    if folder not in sys.path:  # stays: functions import as late as they like
        sys.path.insert(0, folder)
    try:
        yield
    except SystemExit as error:
        raise DataError(
            f"{target}: called sys.exit({error.code!r}) when it was imported or called.\n"
            'Fix: what ends the program belongs under if __name__ == "__main__":'
        ) from None
    except Exception as error:
        text = f"{target}: {type(error).__name__}: {error}"
        if traceback:
            raise DataError("\n".join([text, *user_frames(error)])) from error
        raise DataError(f"{text}\nFix: the line of the file that --traceback shows.") from error


def user_frames(error: BaseException) -> list[str]:
    """Where an error was raised, without the frames of lowtri and of Python's own library."""
    ours, library = str(Path(__file__).parents[1]), sysconfig.get_path("stdlib")

    def is_users(file: str) -> bool:
        # Packages may be installed inside of the library's folder.
        return not file.startswith((ours, "<frozen ")) and (not file.startswith(library) or "site-packages" in file)

    frames = [frame for frame in extract_tb(error.__traceback__) if is_users(frame.filename)]
    return [f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames]


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


def is_encoder(model: Any) -> bool:
    """Whether a model of transformers without a language head sees in both directions: its attention says so, or its kind."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    if model.can_generate():
        return False
    causal = {part.is_causal for part in model.modules() if hasattr(part, "is_causal")}
    return not any(causal) if causal else model.config.model_type not in KNOWN


@dataclass
class Target:
    """A model, what to run it on, and what its maker declares about it."""

    model: Any
    example: Any
    mask: Any = None
    arguments: dict[str, Any] = field(default_factory=dict)


def load_target(
    text: str,
    *,
    length: int | None = None,
    vocab_size: int | None = None,
    seed: int = 0,
    read: Callable[[str], Pretrained] | None = None,
    traceback: bool = False,
) -> Target:
    """Read `FILE.py:make_model`, or a model by its name.

    The function returns a model, or (model, example), or (model, example, arguments of `lowtri.audit`); instead of a
    function the name may be a module's. A name `MASK` in the file is the mask that the model declares. Without an example,
    token ids are drawn.

    Args:
        read: reads a model by its name; default: :func:`lowtri.pretrained.read_model`, encoders included.
        traceback: whether an error of the file says where it was raised.

    Raises:
        DataError: if there is no such file, model or function, or the model cannot be made.
    """
    if text.endswith(".py") or text.rpartition(":")[0].endswith(".py"):
        target = _from_file(text, traceback)
    else:
        loaded = read_model(text, encoders=True) if read is None else read(text)
        target = _of_model(loaded.model)
    if vocab_size is not None:
        target.model = replace(as_model(target.model), vocab_size=vocab_size)
    if target.example is None:
        target.example = _random_ids(as_model(target.model), length, seed)
    return target


def _from_file(text: str, traceback: bool) -> Target:
    make, names = function_in_file(text, "make_model", traceback=traceback)
    with _user_code(text, traceback):
        result = make if hasattr(make, "named_modules") and not isinstance(make, type) else make()
    parts = result if isinstance(result, tuple) else (result,)
    if (
        not 1 <= len(parts) <= 3
        or not (callable(parts[0]) or isinstance(parts[0], Model))
        or (len(parts) == 3 and not isinstance(parts[2], dict))
    ):
        raise DataError(f"{text}: returns neither a model, nor (model, example), nor (model, example, dict)")
    arguments = dict(parts[2]) if len(parts) == 3 else {}
    known = list(inspect.signature(audit).parameters)[2:]  # without the model and the example
    unknown = next((key for key in arguments if key not in known), None)
    if unknown is not None:
        raise DataError(
            f"{text}: returns the argument {unknown!r}, which lowtri.audit does not take.\nFix: one of {', '.join(known)}."
        )
    mask = arguments.pop("mask", names.get("MASK"))
    return Target(parts[0], parts[1] if len(parts) > 1 else None, mask, arguments)


def _of_model(model: Any) -> Target:
    if hasattr(model, "make_cache"):
        # The mask of lowtri's own models is each layer's; from end to end a layer passes on what it has seen.
        return Target(model, None, model.mask, {"layers": model.config.num_hidden_layers})
    mask, layers = ("full", None) if is_encoder(model) else declared_mask(model.config)
    return Target(model, None, mask, {} if layers is None else {"layers": layers})


def _random_ids(adapter: Model, length: int | None, seed: int) -> Any:
    """Two rows of random ids, long enough to go past the model's window where that is small."""
    model = adapter.call
    config = getattr(model, "config", None)
    if length is None:
        window = getattr(config, "sliding_window", None)
        length = 24 if not isinstance(window, int) else max(24, min(window + 8, 256))
        length = min(length, getattr(config, "max_position_embeddings", None) or length)
    size = adapter.vocab_size or vocabulary_size(model)
    if size is None:
        raise DataError("the model names no vocabulary: return (model, example) from the function, or say --vocab")
    ids = np.random.default_rng(seed).integers(0, size, (2, length))
    if not hasattr(model, "parameters"):
        return ids
    import torch

    return torch.from_numpy(ids)
