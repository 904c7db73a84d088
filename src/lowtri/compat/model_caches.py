"""The cache of a model of transformers: what its argument is called, what kind it is, how long it is, how it is cropped.

transformers 5.24 renamed ``past_key_values`` and ``cache_params`` to ``cache`` in arguments and outputs. What a cache holds is
asked of the object, since one name serves caches of keys, of recurrent states and of both. Nothing here imports transformers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

__all__ = [
    "CACHE_NAMES",
    "cache_argument",
    "cache_of",
    "cached_length",
    "crop_cache",
    "is_ordinary",
    "needs_whole_mask",
]

# In the order in which they are looked for. The last two are lists of tensors: of RWKV, and of XLNet.
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state", "mems")
_OF_CLASSES = CACHE_NAMES[:3]  # whose values are caches of transformers


def cache_argument(names: Collection[str], model: Any = None) -> str | None:
    """The parameter in which a model takes its cache as transformers has it: in and out of every forward.

    >>> cache_argument(["input_ids", "past_key_values"])
    'past_key_values'
    >>> cache_argument(["ids", "positions", "cache"]) is None  # lowtri's own models, which have make_cache
    True
    >>> cache_argument(["input_ids", "cache", "use_cache"])
    'cache'

    Args:
        names: the parameters of its forward.
        model: decides whether ``cache`` alone is meant as transformers has it.

    Returns:
        the name; None if the model takes no such cache.
    """
    if hasattr(model, "make_cache"):
        return None
    as_transformers = "use_cache" in names or (hasattr(model, "config") and hasattr(model, "generate"))
    for name in _OF_CLASSES:
        if name in names and (name != "cache" or as_transformers):
            return name
    return None


def cache_of(output: Any) -> tuple[str, Any] | None:
    """The name and the cache in an output of a model: a dictionary, an object with attributes, or a tuple with the cache second.

    The name is the one to pass it on with. Of a tuple it is unknown, and "".
    """
    for name in CACHE_NAMES:
        value = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if value is not None:
            return name, value
    if isinstance(output, (tuple, list)) and len(output) > 1 and output[1] is not None:
        return "", output[1]
    return None


def needs_whole_mask(cache: Any, name: str = "") -> bool:
    """Whether a call with this cache takes the padding mask of all tokens so far: a cache with keys. Recurrent states take that of
    the new tokens.

    Args:
        cache: the object.
        name: the argument, which decides for tuples and lists of tensors only.
    """
    layers = getattr(cache, "layers", None)
    if layers:
        return any(hasattr(layer, "get_mask_sizes") for layer in layers)
    if hasattr(cache, "get_mask_sizes") or hasattr(cache, "key_cache"):
        return True
    if any(hasattr(cache, kind) for kind in ("conv_states", "ssm_states", "recurrent_states")):
        return False
    return name not in ("state", "mems")


def cached_length(cache: Any) -> int | None:
    """How many tokens a cache of keys holds, dropped ones included; None where the object does not say."""
    length = getattr(cache, "get_seq_length", None)
    try:
        return None if length is None else int(length())
    except (ValueError, NotImplementedError):  # a cache of recurrent states alone
        return None


def crop_cache(cache: Any, start: int, end: int) -> None:
    """Drop the positions from ``start`` to ``end``, the last of a cache.

    ``crop`` of transformers takes how many are to go, below zero; others' takes how many stay.
    """
    cache.crop(start - end if hasattr(cache, "get_seq_length") else start)


def is_ordinary(cache: Any) -> bool:
    """Whether it is a cache of consecutive keys. Those of continuous batching lie in blocks, and their cache has no sizes of masks."""
    return hasattr(cache, "get_mask_sizes")
