"""What a module computes before attention: encodings, projections, q, k and v, head by head."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError, LowtriError
from lowtri.explaining.calling import is_torch_s, undisturbed
from lowtri.explaining.projections import Projections, projections_of
from lowtri.masks import Mask, as_mask
from lowtri.masks import heads as heads_of
from lowtri.masks.arrays import in_numpy
from lowtri.ops.arguments import plain_array

Floats = NDArray[np.float64]


@dataclass
class Captured:
    """What was captured, in the order of computation. Arrays of three dimensions have the heads in front."""

    # embedding, position, encoding (N, d); W_q^T and its like (H, d, D), b_q (H, 1, D), q (H, N, D); scores (H, N, N)
    arrays: dict[str, Floats]
    mask: Mask | str | None = None  # the module's own
    head: int | None = None  # the head to show by default; None: all
    tokens: list[str] | None = None
    output: Floats | None = None  # (H, N, Dv), the module's own, to compare with
    module: Any = None  # or the module, to call for its own output ...
    inputs: Floats | None = None  # ... on (N, d) or (1, N, d)
    name: str = ""  # of the module's class
    dtype: Any = None  # torch's, in which the module computes
    visible: NDArray[np.bool_] | None = None  # (H, Nq, Nk), as the module's own mask has it
    scale: float | None = None  # of the scores; None: 1 / sqrt(D)
    softcap: float | None = None
    bias: Floats | None = None  # (H, Nq, Nk)
    sinks: Floats | None = None  # (H,)
    notes: tuple[str, ...] = ()
    formulas: dict[str, str] = field(default_factory=lambda: dict.fromkeys("qkv", ""))  # of its own
    sentences: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)  # of its own: key and values
    rows: int = 1  # of the batch that the arrays were one row of

    @property
    def pairs(self) -> tuple[int, int, int]:
        """(H, Nq, Nk)."""
        if "q" not in self.arrays:
            heads, queries, keys = self.arrays["scores"].shape
            return heads, queries, keys
        heads, queries, _ = self.arrays["q"].shape
        return heads, queries, self.arrays["k"].shape[1]


def capture_arrays(qkv: Any, batch: int | None = None) -> Captured:
    """(q, k, v), each (N, D), (H, N, D) or (B, H, N, D), as they come."""
    if len(qkv) != 3:
        raise CallError(f"explain: got {len(qkv)} arrays, but (q, k, v) are three. Fix: explain((q, k, v), mask=...).")
    arrays = {name: _with_heads(name, x) for name, x in zip("qkv", qkv, strict=True)}
    shapes = ", ".join(f"{name} {x.shape[x.ndim - 3 :]}" for name, x in arrays.items())
    one_row, rows = _row(arrays, 3, batch)
    q, k, v = one_row
    if q.shape[2] != k.shape[2] or k.shape[:2] != v.shape[:2] or len(q) % len(k):
        raise CallError(f"explain: these do not fit together: {shapes}, as (heads, N, D).")
    if q.shape[1] > k.shape[1]:
        raise CallError(f"explain: {q.shape[1]} queries and {k.shape[1]} keys: the queries are the last of the tokens.")
    return Captured({"q": q, "k": k, "v": v}, rows=rows)


def capture_scores(scores: Any, values: Any, batch: int | None) -> Captured:
    """Scores (Nq, Nk), (H, Nq, Nk) or (B, H, Nq, Nk), and if given values (Nk, D), (H, Nk, D) or (B, H, Nk, D)."""
    arrays = {"scores": _with_heads("scores", scores)}
    if values is not None:
        arrays["v"] = _with_heads("values", values)
    (table, *rest), rows = _row(arrays, 3, batch)
    if table.shape[1] > table.shape[2]:
        raise CallError(f"explain: scores are {table.shape}: a row for each query, a column for each key.")
    for v in rest:
        if v.shape[1] != table.shape[2] or len(table) % len(v):
            raise CallError(f"explain: values are {v.shape} for scores {table.shape}. Fix: a row for each key.")
    formulas = {"scores": "", "masked": "scores where visible, else {hidden}", "v": ""}
    sentences: dict[str, tuple[str, dict[str, Any]]] = {
        "scores": ("explain.given", {}),
        "v": ("explain.givenvalues", {}),
    }
    return Captured(dict(zip(arrays, (table, *rest), strict=True)), formulas=formulas, sentences=sentences, rows=rows)


def capture_module(
    what: Any,
    inputs: Any,
    *,
    position: Any,
    heads: int | None,
    layer: int,
    mask: Mask | str | None,
    batch: int | None = None,
) -> Captured:
    """What a module computes from ``inputs`` on the way into attention."""
    from_lowtri = _of_lowtri(what)
    if from_lowtri is None and (maps := projections_of(what)) is not None:
        mask = _own_mask(what, inputs) if mask is None else None
        return _plain_module(what, maps, inputs, position, heads, batch, mask)
    if position is not None or heads is not None:
        raise CallError("explain: position and heads are for a module with W_q, W_k and W_v. Fix: leave them out.")
    if from_lowtri == "attention":
        return _multi_head(what, inputs, mask, batch)
    if from_lowtri == "decoder":
        return _decoder(what, inputs, layer, mask, batch)
    if hasattr(what, "modules") and (inside := [m for m in what.modules() if projections_of(m) is not None]):
        return _inside(what, inside, inputs, layer, mask, batch)
    raise CallError(
        f"explain: {type(what).__name__} has no attention that explain can open.\n"
        "Fix: pass (q, k, v), a module with maps to queries, keys and values (W_q, query, q_proj, in_proj and the like), or a model "
        "that has such modules."
    )


def _of_lowtri(what: Any) -> str | None:
    """Whether it is a module of lowtri that has rotary positions, grouped heads or layers: "attention" or "decoder"."""
    if "torch" not in sys.modules:
        return None
    from lowtri.nn import Decoder, MultiHeadAttention

    if isinstance(what, MultiHeadAttention):
        return "attention"
    return "decoder" if isinstance(what, Decoder) else None


def _own_mask(module: Any, inputs: Any) -> Mask | str | None:
    """The mask of a module: its own attribute, or what ``infer_mask`` finds; None where neither gives one."""
    from lowtri.auditing.infer import infer_mask

    own = getattr(module, "mask", None)
    if isinstance(own, Mask | str):
        return own
    if inputs is None or not callable(module):
        return None
    try:
        return infer_mask(module, inputs).mask
    except LowtriError:  # its forward needs more than one input, or is not deterministic
        return None


def _inside(
    model: Any, attentions: list[Any], inputs: Any, layer: int, mask: Mask | str | None, batch: int | None
) -> Captured:
    """One attention of a model of the user's: what it reads is recorded in one forward of the model."""
    import torch

    if not 0 <= layer < len(attentions):
        raise CallError(f"explain: there is no layer {layer} among {len(attentions)}. Fix: 0 to {len(attentions) - 1}.")
    if inputs is None:
        raise CallError("explain: inputs are missing: what the model reads. Fix: explain(model, inputs).")
    attention = attentions[layer]
    read: list[Any] = []

    def record(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        read.extend(x for x in (*given, *named.values()) if isinstance(x, torch.Tensor) and x.is_floating_point())

    hook = attention.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with undisturbed(model):
            model(torch.as_tensor(inputs))
    finally:
        hook.remove()
    if not read:
        raise CallError(
            f"explain: the forward of {type(model).__name__} does not call layer {layer}. Fix: another layer."
        )
    maps = projections_of(attention)
    assert maps is not None
    own = _own_mask(model, inputs) if mask is None else None
    captured = _plain_module(attention, maps, read[0], None, None, batch, own)
    captured.sentences["encoding"] = ("explain.layer", {"layer": layer})
    return captured


def _plain_module(
    module: Any, found: Projections, inputs: Any, position: Any, heads: int | None, batch: int | None, mask: Any
) -> Captured:
    """A module with three linear maps: nn.MaskedSelfAttention, plain.MaskedSelfAttention, nn.MultiheadAttention, or one's own."""
    if getattr(module, "batch_first", True) is False and np.ndim(inputs) == 3:  # torch's own order: (N, B, d)
        inputs = inputs.swapaxes(0, 1)
    arrays: dict[str, Floats] = {}
    encoding, rows = _encodings("inputs", inputs, batch)  # (N, d)
    if position is not None:
        offsets, _ = _encodings("position", position, batch if np.ndim(position) == 3 and len(position) > 1 else None)
        if offsets.shape != encoding.shape:
            raise CallError(f"explain: position is {offsets.shape}, but inputs are {encoding.shape}; they are added.")
        arrays |= {"embedding": encoding, "position": offsets}
        encoding = encoding + offsets
    maps = {f"W_{name}": _array(weight).T for name, weight in found.weights.items()}  # (d, D)
    width = len(maps["W_q"])
    if encoding.shape[1] != width:
        raise CallError(f"explain: inputs are {encoding.shape}, but the module reads (N, {width}).")
    sizes = {w.shape[1] for w in maps.values()}
    if maps["W_q"].shape != maps["W_k"].shape:
        raise CallError(
            f"explain: {type(module).__name__} maps to queries of {maps['W_q'].shape[1]} and keys of {maps['W_k'].shape[1]} numbers.\n"
            "Fix: explain((q, k, v), mask=...) with what the module computes from its input."
        )
    if heads is None:  # what the module says, where it can be true
        heads = found.heads if found.heads and all(size % found.heads == 0 for size in sizes) else 1
    if isinstance(heads, bool) or not isinstance(heads, int | np.integer):
        raise CallError(f"explain: heads is {heads!r:.60}; expected a whole number, at least 1.")
    if heads < 1 or any(size % heads for size in sizes):
        size = min(sizes)
        raise CallError(f"explain: {heads} heads do not divide d_model {size}. Fix: a divisor of {size}.")
    arrays["encoding"] = encoding
    cut = {name: np.stack(np.split(w, heads, axis=1)) for name, w in maps.items()}  # (H, d, D)
    arrays |= {f"{name}^T": w for name, w in cut.items()}
    formulas = {}
    for name in "qkv":
        bias = found.biases.get(name)
        if bias is not None:
            arrays[f"b_{name}"] = np.stack(np.split(_array(bias)[None], heads, axis=1))  # (H, 1, D)
            formulas[name] = f"encoding W_{name}^T + b_{name}"
    for name in "qkv":
        arrays[name] = encoding @ arrays[f"W_{name}^T"] + arrays.get(f"b_{name}", 0)  # (H, N, D)
    return Captured(
        arrays,
        mask=mask,
        module=module,
        inputs=encoding[None] if np.ndim(inputs) == 3 and not is_torch_s(module) else encoding,
        name=type(module).__name__,
        dtype=found.dtype,
        formulas=formulas,
        rows=rows,
    )


def _multi_head(module: Any, inputs: Any, mask: Mask | str | None, batch: int | None) -> Captured:
    """A lowtri.nn.MultiHeadAttention over its own tokens."""
    import torch

    encoding, rows = _encodings("inputs", inputs, batch)
    mask = _of_row(module.mask if mask is None else mask, batch or 0, rows)
    x = torch.as_tensor(encoding).to(module.o_proj.weight)
    captured = _hooked(module, module, lambda: module(x[None], mask=mask), mask)
    captured.rows = rows
    return captured


def _decoder(decoder: Any, inputs: Any, layer: int, mask: Mask | str | None, batch: int | None) -> Captured:
    """One layer of a decoder that reads ids."""
    import torch

    layers = decoder.model.layers
    if not 0 <= layer < len(layers):
        raise CallError(f"explain: there is no layer {layer} among {len(layers)}. Fix: 0 to {len(layers) - 1}.")
    if inputs is None:
        raise CallError("explain: ids are missing: what the decoder reads, (N,). Fix: explain(decoder, ids).")
    ids = torch.as_tensor(inputs, device=decoder.model.embed_tokens.weight.device)
    (ids,), rows = _row({"ids": ids}, 1, batch)
    if ids.ndim != 1 or not len(ids) or ids.is_floating_point():
        raise CallError(f"explain: ids are {tuple(ids.shape)} {ids.dtype}, but one sequence is (N,) whole numbers.")
    mask = _of_row(decoder.mask if mask is None else mask, batch or 0, rows)
    captured = _hooked(layers[layer].self_attn, decoder, lambda: decoder(ids[None], mask=mask), mask)
    captured.arrays = {"embedding": _array(decoder.model.embed_tokens.weight[ids]), **captured.arrays}
    captured.sentences["encoding"] = ("explain.layer", {"layer": layer})
    captured.tokens = [str(i) for i in ids.tolist()]
    captured.head = 0
    captured.rows = rows
    return captured


def _hooked(module: Any, whole: Any, run: Callable[[], Any], mask: Mask | str | None) -> Captured:
    """Run the whole model, and record what passes through one MultiHeadAttention of it with hooks."""
    if module.qkv_proj is not None:
        raise CallError(
            f"explain: {type(module).__name__} has joined projections, so that it has no W_q, W_k and W_v.\n"
            "Fix: explain before fuse_projections()."
        )
    seen: dict[str, Any] = {}
    parts = {"q": module.q_proj, "k": module.k_proj, "v": module.v_proj}
    hooks = [
        part.register_forward_hook(lambda m, x, out, name=name: seen.update({name: out}))
        for name, part in parts.items()
    ]
    hooks.append(module.q_proj.register_forward_pre_hook(lambda m, x: seen.update(encoding=x[0])))
    hooks.append(module.o_proj.register_forward_pre_hook(lambda m, x: seen.update(output=x[0])))
    try:
        with undisturbed(whole):
            run()
    finally:
        for hook in hooks:
            hook.remove()

    missing = [name for name in (*"qkv", "output") if name not in seen]
    if missing:
        raise CallError(
            f"explain: the forward of {type(module).__name__} calls no {', '.join(missing)} projection, so its steps are not known."
            "\nFix: explain((q, k, v), mask=...)."
        )

    def heads(x: Any) -> Any:
        return x[0].unflatten(1, (-1, module.head_dim)).transpose(0, 1)  # (1, N, H * D) -> (H, N, D)

    q, k, v = (heads(seen[name]) for name in "qkv")
    q, k = module.normalize_and_rotate(q, k, module.tables(np.arange(q.shape[1]), q.device))
    arrays = {"encoding": _array(seen["encoding"][0])}  # (N, d)
    for name, part in parts.items():
        rows = part.weight.unflatten(0, (-1, module.head_dim))  # (H, D, d)
        arrays[f"W_{name}^T"] = _array(rows.transpose(1, 2))  # (H, d, D)
    for name, part in parts.items():
        if part.bias is not None:
            arrays[f"b_{name}"] = _array(part.bias.unflatten(0, (-1, 1, module.head_dim)))  # (H, 1, D)
    arrays |= {"q": _array(q), "k": _array(k), "v": _array(v)}

    def formula(name: str) -> str:
        text = f"encoding W_{name}^T"
        if f"b_{name}" in arrays:
            text += f" + b_{name}"
        if name != "v" and module.q_norm is not None:
            text = f"RMSNorm({text})"
        return f"rotary({text})" if name != "v" and module.rope_theta is not None else text

    own = module.mask if mask is None else mask
    formulas = {name: formula(name) for name in "qkv"}
    return Captured(
        arrays,
        mask=own,
        output=_array(heads(seen["output"])),
        name=type(whole).__name__,
        dtype=q.dtype,
        formulas=formulas,
    )


def _of_row(mask: Mask | str, row: int, rows: int) -> Mask:
    """The mask of one batch row, where it differs between as many rows as there are."""
    mask = as_mask(mask, "explain: mask")
    if rows == 1 or mask.batch[:1] != (rows,):
        return mask
    if mask.batch[1:] in ((), (1,)):
        return mask.for_row(row)
    return heads_of([mask.for_row(row, h) for h in range(mask.batch[1])])


def _array(x: Any) -> Floats:
    """A NumPy array, a tensor or nested lists as float64."""
    array = in_numpy("an array", plain_array("an array", x, "explain"))
    if isinstance(array, str):
        raise CallError(f"explain: {array}, but it takes numbers.")
    if array.dtype.kind not in "biuf":
        raise CallError(f"explain: an array is {array.dtype} {array.shape}, but it takes real numbers.")
    return np.asarray(array, dtype=np.float64)


def _row(arrays: dict[str, Any], dims: int, batch: int | None) -> tuple[list[Any], int]:
    """Arrays of ``dims`` dimensions, or with the batch in front: one row of each, and how many rows there are."""
    sizes = {name: len(x) if x.ndim == dims + 1 else 1 for name, x in arrays.items()}
    rows = max(sizes.values())
    if set(sizes.values()) != {rows}:
        raise CallError(f"explain: the batch sizes differ: {', '.join(f'{name} {n}' for name, n in sizes.items())}.")
    if not isinstance(batch, int | np.integer | None) or not 0 <= (batch or 0) < rows:
        raise CallError(f"explain: there is no batch row {batch!r:.60} among {rows}. Fix: batch from 0 to {rows - 1}.")
    return [x[batch or 0] if x.ndim == dims + 1 else x for x in arrays.values()], rows


def _encodings(name: str, x: Any, batch: int | None) -> tuple[Floats, int]:
    """(N, d), from that or from a row of (B, N, d), and how many rows there are."""
    if x is None:
        raise CallError(f"explain: {name} are missing: what the module reads, (N, d_model). Fix: explain(module, x).")
    array = _array(x)
    if array.ndim not in (2, 3) or 0 in array.shape:
        raise CallError(
            f"explain: {name} are {array.shape}, but encodings are (N, d_model) or (B, N, d_model), "
            "with at least one token."
        )
    (encoding,), rows = _row({name: array}, 2, batch)
    return encoding, rows


def _with_heads(name: str, x: Any) -> Floats:
    """(H, N, D) or (B, H, N, D)."""
    array = _array(x)
    if array.ndim not in (2, 3, 4) or 0 in array.shape:
        raise CallError(
            f"explain: {name} is {array.shape}, but expected (N, D), (H, N, D) or (B, H, N, D), with no empty side."
        )
    return array[None] if array.ndim == 2 else array
