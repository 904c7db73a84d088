"""What a module computes on the way into attention: its encodings, its maps, its q, k and v, head by head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks import Mask

__all__ = ["Inside", "look_inside", "three_arrays"]

Floats = NDArray[np.float64]


@dataclass
class Inside:
    """What was found, in the order of computing. Arrays with three dimensions have the heads in front."""

    arrays: dict[str, Floats]  # embedding, position, encoding (N, d); W_q, W_k, W_v (H, d, D); q, k, v (H, N, D)
    mask: Mask | str | None = None  # the module's own
    head: int | None = None  # the head to show when nobody chose; None: all
    tokens: list[str] | None = None
    output: Floats | None = None  # (H, N, Dv), what the module itself got, to compare with
    said: dict[str, tuple[str, str]] = field(default_factory=dict)  # formulas and sentences of its own


def three_arrays(given: Any) -> Inside:
    """(q, k, v), each (N, D) or (H, N, D), as they come."""
    if len(given) != 3:
        raise CallError(
            f"explain: {len(given)} arrays came, but (q, k, v) are three. Fix: explain((q, k, v), mask=...)."
        )
    q, k, v = (_heads_in_front(name, x) for name, x in zip("qkv", given, strict=True))
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if q.shape[2] != k.shape[2] or k.shape[:2] != v.shape[:2] or len(q) % len(k):
        raise CallError(f"explain: these do not fit together: {shapes}, as (heads, N, D).")
    if q.shape[1] > k.shape[1]:
        raise CallError(f"explain: {q.shape[1]} queries and {k.shape[1]} keys: the queries are the last of the tokens.")
    said = {
        "q": ("", "What each token asks for."),
        "k": ("", "What each token answers to."),
        "v": ("", "What each token hands on when it is looked at."),
    }
    return Inside({"q": q, "k": k, "v": v}, said=said)


def look_inside(what: Any, inputs: Any, *, position: Any, heads: int, layer: int, mask: Mask | str | None) -> Inside:
    """What a module computes from ``inputs`` on the way into attention."""
    if all(hasattr(what, name) for name in ("W_q", "W_k", "W_v")):
        return _plain_module(what, inputs, position, heads)
    if position is not None or heads != 1:
        raise CallError("explain: position and heads are for a module with W_q, W_k and W_v. Fix: leave them out.")
    if all(hasattr(what, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")):
        return _multi_head(what, inputs, mask)
    if hasattr(what, "model") and hasattr(what.model, "layers"):
        return _decoder(what, inputs, layer, mask)
    raise CallError(
        f"explain: {type(what).__name__} has no attention that explain can open.\n"
        "Fix: pass (q, k, v), a module with W_q, W_k and W_v, a lowtri.nn.MultiHeadAttention, or a lowtri.nn.Decoder."
    )


def _plain_module(module: Any, inputs: Any, position: Any, heads: int) -> Inside:
    """A module with three maps without bias: nn.MaskedSelfAttention, plain.MaskedSelfAttention, or one's own."""
    arrays: dict[str, Floats] = {}
    encoding = _two("inputs", inputs)  # (N, d)
    if position is not None:
        place = _two("position", position)
        if place.shape != encoding.shape:
            raise CallError(f"explain: position is {place.shape}, but inputs are {encoding.shape}; they are added.")
        arrays |= {"embedding": encoding, "position": place}
        encoding = encoding + place
    maps = {name: _array(getattr(module, name).weight).T for name in ("W_q", "W_k", "W_v")}  # (d, d)
    width = len(maps["W_q"])
    if encoding.shape[1] != width:
        raise CallError(f"explain: inputs are {encoding.shape}, but the module reads (N, {width}).")
    if heads < 1 or maps["W_q"].shape[1] % heads:
        raise CallError(f"explain: {heads} heads do not divide d_model {width}. Fix: a divisor of {width}.")
    arrays["encoding"] = encoding
    cut = {name: np.stack(np.split(w, heads, axis=1)) for name, w in maps.items()}  # (H, d, D)
    arrays |= cut
    arrays |= {name[-1]: encoding @ w for name, w in cut.items()}  # (H, N, D)
    return Inside(arrays, mask=getattr(module, "mask", None))


def _multi_head(module: Any, inputs: Any, mask: Mask | str | None) -> Inside:
    """A lowtri.nn.MultiHeadAttention over its own tokens."""
    import torch

    x = torch.as_tensor(_two("inputs", inputs), dtype=module.q_proj.weight.dtype, device=module.q_proj.weight.device)
    return _watch(module, lambda: module(x[None], mask=mask), mask)


def _decoder(decoder: Any, inputs: Any, layer: int, mask: Mask | str | None) -> Inside:
    """One layer of a decoder that reads ids."""
    import torch

    layers = decoder.model.layers
    if not 0 <= layer < len(layers):
        raise CallError(f"explain: layer {layer} asked, but there are {len(layers)}. Fix: 0 to {len(layers) - 1}.")
    if inputs is None:
        raise CallError("explain: ids are missing: what the decoder reads, (N,). Fix: explain(decoder, ids).")
    ids = torch.as_tensor(inputs, device=decoder.model.embed_tokens.weight.device)
    ids = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
    if ids.ndim != 1 or not len(ids) or ids.is_floating_point():
        raise CallError(f"explain: ids are {tuple(ids.shape)} {ids.dtype}, but one sequence is (N,) whole numbers.")
    found = _watch(layers[layer].self_attn, lambda: decoder(ids[None], mask=mask), mask)
    found.arrays = {"embedding": _array(decoder.model.embed_tokens.weight[ids]), **found.arrays}
    found.said["encoding"] = (
        "",
        f"What the attention of layer {layer} reads: the hidden states of that depth, normalised.",
    )
    found.tokens, found.head = [str(i) for i in ids.tolist()], 0
    return found


def _watch(module: Any, run: Callable[[], Any], mask: Mask | str | None) -> Inside:
    """Run, and note down what passes through one MultiHeadAttention."""
    import torch

    seen: dict[str, Any] = {}
    parts = {"q": module.q_proj, "k": module.k_proj, "v": module.v_proj}
    hooks = [
        part.register_forward_hook(lambda m, x, out, name=name: seen.update({name: out}))
        for name, part in parts.items()
    ]
    hooks.append(module.q_proj.register_forward_pre_hook(lambda m, x: seen.update(encoding=x[0])))
    hooks.append(module.o_proj.register_forward_pre_hook(lambda m, x: seen.update(output=x[0])))
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()

    def heads(x: Any) -> Any:
        return x[0].unflatten(1, (-1, module.head_dim)).transpose(0, 1)  # (1, N, H * D) -> (H, N, D)

    q, k, v = (heads(seen[name]) for name in "qkv")
    turned = (", normalised" if module.q_norm is not None else "") + (
        ", turned by its place" if module.rope_theta is not None else ""
    )
    q, k = module.compared(q, k, module.tables(np.arange(q.shape[1]), q.device))
    arrays = {"encoding": _array(seen["encoding"][0])}  # (N, d)
    for name, part in parts.items():
        rows = part.weight.unflatten(0, (-1, module.head_dim))  # (H, D, d)
        arrays[f"W_{name}"] = _array(rows.transpose(1, 2))  # (H, d, D)
    arrays |= {"q": _array(q), "k": _array(k), "v": _array(v)}
    plus = "" if module.q_proj.bias is None else " + bias"
    said = {
        "q": (f"encoding W_q^T{plus}{turned}", "What each token asks for."),
        "k": (f"encoding W_k^T{plus}{turned}", "What each token answers to."),
        "v": (f"encoding W_v^T{plus}", "What each token hands on when it is looked at."),
    }
    return Inside(arrays, mask=module.mask if mask is None else mask, output=_array(heads(seen["output"])), said=said)


def _array(x: Any) -> Floats:
    """A NumPy array, a tensor or nested lists as float64."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().double().numpy()
    return np.asarray(x, dtype=np.float64)


def _two(name: str, x: Any) -> Floats:
    """(N, d), from that or from a batch of one."""
    if x is None:
        raise CallError(f"explain: {name} are missing: what the module reads, (N, d_model). Fix: explain(module, x).")
    found = _array(x)
    found = found[0] if found.ndim == 3 and len(found) == 1 else found
    if found.ndim != 2 or 0 in found.shape:
        raise CallError(f"explain: {name} are {found.shape}, but one sequence is (N, d_model) with at least one token.")
    return found


def _heads_in_front(name: str, x: Any) -> Floats:
    found = _array(x)
    if found.ndim not in (2, 3) or 0 in found.shape:
        raise CallError(
            f"explain: {name} is {found.shape}, but one sequence is (N, D) or (H, N, D), with no empty side."
        )
    return found[None] if found.ndim == 2 else found
