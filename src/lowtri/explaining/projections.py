"""The three linear maps of an attention module, whatever its author called them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowtri.errors import CallError

NAMES = (  # of the maps to queries, keys and values
    ("W_q", "W_k", "W_v"),
    ("W_Q", "W_K", "W_V"),
    ("w_q", "w_k", "w_v"),
    ("Wq", "Wk", "Wv"),
    ("wq", "wk", "wv"),
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("queries", "keys", "values"),
    ("W_query", "W_key", "W_value"),
    ("to_q", "to_k", "to_v"),
    ("q_linear", "k_linear", "v_linear"),
    ("linear_q", "linear_k", "linear_v"),
    ("q", "k", "v"),
)
JOINED = ("in_proj", "qkv", "qkv_proj", "c_attn", "to_qkv", "Wqkv")  # one map to all three, in this order
HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "h")


@dataclass(frozen=True)
class Projections:
    """The maps of a module: weights (D, d) and biases (D,) as torch has them."""

    weights: dict[str, Any]  # "q", "k", "v" -> tensor
    biases: dict[str, Any]  # of those that have one
    parts: tuple[Any, ...]  # the linear modules that they belong to
    heads: int | None  # that the module says it has

    @property
    def dtype(self) -> Any:
        return self.weights["q"].dtype

    @property
    def device(self) -> Any:
        return self.weights["q"].device


def projections_of(module: Any) -> Projections | None:
    """The maps of a module, or None if it has none of the names that are known.

    Raises:
        CallError: if a name is there, but what it names is no linear map.
    """
    for names in NAMES:
        parts = [getattr(module, name, None) for name in names]
        if any(part is None or _is_number(part) for part in parts):
            continue
        if any(not hasattr(part, "weight") for part in parts):
            name, part = next((n, p) for n, p in zip(names, parts, strict=True) if not hasattr(p, "weight"))
            if names != NAMES[0]:  # another name may mean something else
                continue
            raise CallError(
                f"explain: {name} of {type(module).__name__} is {type(part).__name__}, expected a linear map with a weight.\n"
                "Fix: explain((q, k, v), mask=...) with what the module computes from its input."
            )
        if any(_weight(part) is None for part in parts):
            continue
        weights = {name: _weight(part) for name, part in zip("qkv", parts, strict=True)}
        biases = {name: getattr(part, "bias", None) for name, part in zip("qkv", parts, strict=True)}
        return _found(module, weights, biases, tuple(parts))
    for name in JOINED:
        part = getattr(module, name, None)
        weight = _weight(part)
        if weight is not None and weight.shape[0] == 3 * weight.shape[1]:
            return _found(module, _thirds(weight), _thirds(getattr(part, "bias", None)), (part,))
    return _of_torch(module)


def _of_torch(module: Any) -> Projections | None:
    """Of ``torch.nn.MultiheadAttention``, which holds its maps as parameters."""
    bias = _thirds(getattr(module, "in_proj_bias", None))
    joined = getattr(module, "in_proj_weight", None)
    if joined is not None and getattr(joined, "ndim", 0) == 2 and joined.shape[0] == 3 * joined.shape[1]:
        return _found(module, _thirds(joined), bias, ())
    weights = {name: getattr(module, f"{name}_proj_weight", None) for name in "qkv"}
    if any(weight is None or getattr(weight, "ndim", 0) != 2 for weight in weights.values()):
        return None
    return _found(module, weights, bias, ())


def _found(module: Any, weights: dict[str, Any], biases: dict[str, Any], parts: tuple[Any, ...]) -> Projections:
    heads = next((n for name in HEADS if _is_number(n := getattr(module, name, None))), None)
    return Projections(weights, {name: bias for name, bias in biases.items() if bias is not None}, parts, heads)


def _weight(part: Any) -> Any:
    """The weight (D, d) of a linear map; that of a Conv1D of transformers is stored transposed."""
    weight: Any = getattr(part, "weight", None)
    if getattr(weight, "ndim", 0) != 2:
        return None
    return weight.T if type(part).__name__ == "Conv1D" else weight


def _thirds(joined: Any) -> dict[str, Any]:
    if joined is None:
        return {}
    return dict(zip("qkv", joined.detach().chunk(3), strict=True))


def _is_number(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)
