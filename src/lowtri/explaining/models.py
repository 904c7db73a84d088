"""What the attention of one layer of a transformers model receives and returns, in one forward of the whole model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.backends.reference import attend
from lowtri.compat.transformers_private import AttentionCall, recorded_attention
from lowtri.errors import CallError
from lowtri.explaining.calling import undisturbed
from lowtri.explaining.capture import Captured
from lowtri.masks import Mask, as_mask, keys, table
from lowtri.masks import mask as read_mask

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "position_ids")  # (N,) is one row of each
_FIX = "Fix: explain((q, k, v), mask=...) with what its attention receives."


def capture_model(
    model: Any, inputs: Any, *, layer: int, head: int | None, mask: Mask | str | None, batch: int | None
) -> Captured:
    """One head of one layer, as the model's attention function receives it: after projections, norms and rotary embedding."""
    import torch

    name = type(model).__name__
    arguments = _arguments(model, inputs, mask)
    call, count = _call_of_layer(model, name, arguments, layer)
    q, k, v = (_floats(x) for x in (call.query, call.key, call.value))  # (B, H, N, D)
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise CallError(f"explain: layer {layer} of {name} attends to packed tokens {q.shape}, without a batch. {_FIX}")
    rows, heads = max(len(q), len(k)), q.shape[1]
    row, head = batch or 0, head or 0
    if not 0 <= row < rows:
        raise CallError(f"explain: there is no batch row {batch} among {rows}. Fix: batch from 0 to {rows - 1}.")
    if not 0 <= head < heads:
        raise CallError(f"explain: there is no head {head} among {heads}. Fix: head from 0 to {heads - 1}.")
    group = heads // k.shape[1]
    arrays = {"q": q[row % len(q), head], "k": k[row % len(k), head // group], "v": v[row % len(v), head // group]}
    captured = Captured(
        {part: x[None] for part, x in arrays.items()},
        name=f"layer {layer} of {name}",
        dtype=torch.float32 if call.query.dtype == torch.float64 else call.query.dtype,  # in which softmax may run
        output=_own_output(call, row, head, v.shape[-1]),
        tokens=_labels(arguments, row, k.shape[2]),
        rows=rows,
        sentences={
            "q": ("explain.model.q", {"layer": layer, "head": head, "layers": count, "heads": heads}),
            "k": ("explain.model.k", {"head": head // group, "heads": k.shape[1]}),
            "v": ("explain.model.v", {"head": head // group, "heads": v.shape[1]}),
        },
    )
    _read_call(captured, call, row, head)
    return captured


def _arguments(model: Any, inputs: Any, mask: Mask | str | None) -> dict[str, Any]:
    """The arguments of the model's forward, with a batch of rows and without a cache."""
    import torch

    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False) and hasattr(model, "get_encoder") and _has_two_stacks(model):
        raise CallError(
            f"explain: {name} is an encoder-decoder, in which a layer number names three attentions.\n"
            "Fix: explain(model.get_encoder(), ids), or explain(model.get_decoder(), ids) for its self-attention alone."
        )
    setting = getattr(model, "lowtri_mask", None)
    if getattr(setting, "context", None) is not None:
        raise CallError(
            f"explain: {name} has a part of each sequence in this process. Fix: use(model) without context_parallel."
        )
    if inputs is None:
        raise CallError("explain: ids are missing: what the model reads, (N,). Fix: explain(model, ids).")
    device = next((x.device for x in model.parameters()), None)
    arguments = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    for key in [key for key in _PER_TOKEN if arguments.get(key) is not None]:
        x = torch.as_tensor(arguments[key], device=device)
        arguments[key] = x[None] if x.ndim == 1 else x
    ids = arguments.get("input_ids")
    if ids is not None and (ids.ndim != 2 or not ids.numel() or ids.is_floating_point() or ids.dtype == torch.bool):
        raise CallError(f"explain: ids are {tuple(ids.shape)} {ids.dtype}, but one sequence is (N,) whole numbers.")
    if mask is not None:
        if setting is None:
            raise CallError(
                f"explain: {name} is not switched to lowtri's attention, so that it cannot take mask={as_mask(mask)!r}.\n"
                "Fix: lowtri.integrations.transformers.switch(model), or leave out mask for the model's own."
            )
        if arguments.get("attention_mask") is not None:
            raise CallError(
                "explain: got mask= and inputs with an attention_mask. Fix: use(model, mask=...), and leave out mask= here."
            )
        arguments["attention_mask"] = mask
    if "use_cache" in inspect.signature(model.forward).parameters:
        arguments.setdefault("use_cache", False)
    return arguments


def _has_two_stacks(model: Any) -> bool:
    """Whether a model of an encoder-decoder's configuration is more than its encoder."""
    encoder = model.get_encoder()
    return encoder is not None and encoder is not model


def _call_of_layer(model: Any, name: str, arguments: dict[str, Any], layer: int) -> tuple[AttentionCall, int]:
    """The call of one layer in a forward, and how many layers called the interface.

    A layer is named by the index that its module has; where no module has one, by the order of the calls.
    """
    calls: list[AttentionCall] = []

    def record(call: AttentionCall) -> None:
        wanted = len(calls) == layer or call.layer == layer
        calls.append(call if wanted else call.without_arrays())

    with undisturbed(model), recorded_attention(record):
        model(**arguments)
    if not calls:
        raise CallError(
            f"explain: {name} has attention code of its own: no layer asked transformers' attention interface.\n{_FIX}"
        )
    indices = [call.layer for call in calls]
    if not any(index is not None for index in indices):
        indices = list(range(len(calls)))
    known = sorted({index for index in indices if index is not None})
    if layer not in indices:
        if known == list(range(len(known))):
            raise CallError(f"explain: there is no layer {layer} among {len(known)}. Fix: 0 to {len(known) - 1}.")
        raise CallError(
            f"explain: layer {layer} of {name} has no attention that asks transformers' attention interface.\n"
            f"Fix: layer in {', '.join(map(str, known))}."
        )
    if indices.count(layer) > 1:
        raise CallError(f"explain: layer {layer} of {name} has {indices.count(layer)} attentions. {_FIX}")
    return calls[indices.index(layer)], len(known)


def _own_output(call: AttentionCall, row: int, head: int, width: int) -> Floats | None:
    """What the layer's attention returned for a head, (1, Nq, Dv); None where it has another shape than (B, Nq, H, Dv)."""
    output = call.result[0] if isinstance(call.result, tuple) else call.result
    shape = (call.query.shape[2], call.query.shape[1], width)
    if not hasattr(output, "shape") or tuple(output.shape[1:]) != shape:
        return None
    return _floats(output)[row, :, head][None]


def _read_call(captured: Captured, call: AttentionCall, row: int, head: int) -> None:
    """Read the mask and the options of a call, as the implementation applies them.

    An implementation ignores options that it does not know, and where there is no mask one is causal and another is not. So each
    possible reading is computed, and the first that gives what the layer's attention gave is the right one.
    """
    q, k, v = (captured.arrays[name][None] for name in "qkv")  # (1, 1, N, D)
    scaling = call.options.get("scaling")
    captured.scale = None if scaling is None else float(scaling)
    sinks = call.options.get("s_aux")
    options: dict[str, Any] = {"softcap": call.options.get("softcap")}
    options["sinks"] = None if sinks is None else _floats(sinks).reshape(-1)[head : head + 1]
    position_bias = call.options.get("position_bias")
    options["bias"] = (
        None if position_bias is None else _of_head(_floats(position_bias), row, head, (q.shape[2], k.shape[2]))
    )
    readings = []
    for visible, bias in _masks(call, row, head):
        for reading in _subsets({name: x for name, x in options.items() if x is not None}):
            total = [x for x in (bias, reading.get("bias")) if x is not None]
            readings.append((visible, reading | ({"bias": sum(total)} if total else {})))
    scale = q.shape[-1] ** -0.5 if captured.scale is None else captured.scale
    distances = []
    for visible, reading in readings:
        given = {name: x[None, None] if name == "bias" else x for name, x in reading.items()}
        output = attend(q, k, v, visible[None, None], scale=scale, **given).output[0]
        sees: Any = visible.any(axis=-1)
        away = 0.0 if captured.output is None else abs(np.where(sees[:, None], output - captured.output, 0)).max()
        distances.append(float(np.nan_to_num(away, nan=np.inf)))
    least = min(distances)
    best = next(i for i, distance in enumerate(distances) if distance <= 4 * least + 1e-30)
    visible, reading = readings[best]
    captured.visible, captured.mask = visible[None], _simplest(visible)
    captured.softcap, captured.sinks = reading.get("softcap"), reading.get("sinks")
    captured.bias = None if "bias" not in reading else reading["bias"][None]
    ignored = [name for name in ("softcap", "sinks") if options[name] is not None and name not in reading]
    if ignored:
        captured.notes = (f"Its {call.implementation} attention leaves out {' and '.join(ignored)}.",)


def _subsets(options: dict[str, Any]) -> list[dict[str, Any]]:
    """All of the options, then with fewer and fewer of them."""
    return [dict(chosen) for n in range(len(options), -1, -1) for chosen in combinations(options.items(), n)]


def _masks(call: AttentionCall, row: int, head: int) -> list[tuple[Bools, Floats | None]]:
    """The visible pairs (Nq, Nk) of a call and the bias in its mask; two possibilities where there is no mask."""
    import torch

    nq, nk = call.query.shape[2], call.key.shape[2]
    mask = call.mask
    if mask is None:
        shown = [np.tri(nq, nk, dtype=bool), np.ones((nq, nk), bool)]
        causal = call.options.get("is_causal")
        if causal is None:
            causal = getattr(call.module, "is_causal", True)
        first = 0 if causal and nq > 1 and call.implementation != "eager" else 1
        return [(shown[first], None), (shown[1 - first], None)]
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
        kind = f"of the shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise CallError(
            f'explain: the mask of "{call.implementation}" attention is {kind}, expected a table of pairs (B, H, Nq, Nk).\n'
            'Fix: model.set_attn_implementation("sdpa").'
        )
    if mask.dtype == torch.bool:
        pairs = torch.logical_not(torch.logical_not(mask))  # a lazy mask gives its table
        return [(_of_head(pairs.cpu().numpy(), row, head, (nq, nk)), None)]
    least = max(torch.finfo(mask.dtype).min, torch.finfo(call.query.dtype).min)
    numbers = _of_head(_floats(mask), row, head, (nq, nk))
    visible = ~(numbers <= least / 2)  # the smallest number plus a bias hides, too
    bias = np.where(visible, numbers, 0)
    return [(visible, bias if bias.any() else None)]


def _of_head(x: NDArray[Any], row: int, head: int, shape: tuple[int, int]) -> NDArray[Any]:
    """(Nq, Nk) of a table (B|1, H|1, Nq|1, Nk|1)."""
    return np.broadcast_to(x[row % len(x), head % x.shape[1]], shape).copy()


def _simplest(visible: Bools) -> Mask:
    """The shortest mask that is this table (Nq, Nk): a band of distances, perhaps with keys hidden, or the table itself."""
    nq, nk = visible.shape
    if visible.all():
        return read_mask("full")
    q, k = np.indices(visible.shape)
    distance = (q + nk - nq - k)[visible]
    valid = visible.any(axis=0)
    if not len(distance):
        return table(visible)
    before, after = int(distance.max()), int(-distance.min())
    texts = ["full", "causal"] + ([f"causal & window({before + 1})"] if after <= 0 and before >= 0 else [])
    texts += [f"band({before}, {after})"] if before >= 0 and after >= 0 else []
    for text in texts:
        mask = read_mask(text)
        if np.array_equal(mask.dense(nq, nk), visible):
            return mask
        if np.array_equal(mask.dense(nq, nk) & valid, visible):
            return keys(valid) if text == "full" else mask & keys(valid)
    return table(visible)


def _labels(arguments: dict[str, Any], row: int, nk: int) -> list[str] | None:
    ids = arguments.get("input_ids")
    if ids is None or ids.shape[1] != nk:
        return None
    return [str(i) for i in ids[row % len(ids)].tolist()]


def _floats(x: Any) -> Floats:
    return np.asarray(x.detach().cpu().double().numpy())
