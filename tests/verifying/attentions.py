"""Attention functions of lowtri and of other libraries, and how each is called: what ``test_matrix.py`` verifies.

A function ``call(attend, given)`` writes a case in a library's own arguments, so lowtri's integration and the library itself are
called by the same one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import lowtri
from lowtri.backends import flex
from lowtri.ops.arguments import describe
from lowtri.ops.call import CallOptions

Call = Callable[[Any, Any], Any]


def only(given: Any, *options: str) -> None:
    """Reject what is none of these options, by its name."""
    case = given.case
    needed = {
        "scale": case.scale is not None,
        "softcap": case.softcap is not None,
        "bias": given.bias is not None,
        "sinks": given.sinks is not None,
        "log-sum-exp": case.lse,
        "grouped heads": case.hq != case.hkv,
        "values of another size": case.d != case.dv,
    }
    for name, yes in needed.items():
        if yes and name not in options:
            raise NotImplementedError(name)


def of_engine(engine: str) -> Callable[..., Any]:
    def attend(q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        return lowtri.attention(q, k, v, mask, engine=engine, **options)

    return attend


def numpy_only(q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
    if not isinstance(q, np.ndarray):
        raise TypeError("NumPy arrays only")
    return lowtri.attention(q, k, v, mask, **options)


# The backend that runs on a GPU: its prepared call, compiled for the CPU.


def flex_backend(q: Any, k: Any, v: Any, mask: Any, *, return_lse: bool = False, **options: Any) -> Any:
    call, inputs = describe(q, k, v, mask, CallOptions(return_lse=return_lse, **options))
    if reason := flex.why_not(call):
        raise NotImplementedError(reason)
    result = flex.prepare(call).run(inputs)
    return (result.output, result.lse) if return_lse else result.output


# flash-attn


def flash_packed(attend: Any, given: Any) -> Any:
    """Keys and values in one tensor; with queries in one where their sizes are equal."""
    from lowtri.integrations.flash_attn import flash_attn_qkvpacked_func

    only(given, "scale", "softcap", "log-sum-exp", "grouped heads")
    case, (q, k, v) = given.case, (x.transpose(1, 2) for x in (given.q, given.k, given.v))
    options = flash_options(given)
    if case.hq == case.hkv and case.nq == case.nk:
        result = flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **options)
    else:
        result = attend(q, torch.stack([k, v], 2), **options)
    return (result[0].transpose(1, 2), result[1]) if case.lse else result.transpose(1, 2)


def flash_varlen(attend: Any, given: Any) -> Any:
    """Each document of each row of the batch is a sequence."""
    only(given, "scale", "softcap", "grouped heads", "values of another size")
    case, documents = given.case, "documents(lengths="
    if case.b == 0:
        raise NotImplementedError("an empty batch")
    lengths = [case.nk]
    if documents in case.text:
        if case.text.startswith("causal"):
            lengths = [7, 1, 22, 7]
        else:
            lengths = [20, 17]
        assert f"{documents}{lengths})" in case.text
    options = flash_options(given, case.text if documents in case.text else "")
    queries = [case.nq] if lengths == [case.nk] else lengths
    edges = [torch.tensor([0, *n * case.b]).cumsum(0).int() for n in (queries, lengths)]
    packed = (x.transpose(1, 2).flatten(0, 1) for x in (given.q, given.k, given.v))
    output = attend(*packed, *edges, max(queries), max(lengths), **options)
    return output.unflatten(0, (case.b, case.nq)).transpose(1, 2)


def flash_cache(attend: Any, given: Any) -> Any:
    """Keys and values lie in a cache with free slots; their number is given for each row."""
    only(given, "scale", "softcap", "log-sum-exp", "grouped heads", "values of another size")
    case, options = given.case, flash_options(given)
    k, v = (nn.functional.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, 3), value=torch.nan) for x in (given.k, given.v))
    lengths = torch.full((case.b,), case.nk, dtype=torch.int32)
    options["return_softmax_lse"] = options.pop("return_attn_probs", False)
    result = attend(given.q.transpose(1, 2), k, v, cache_seqlens=lengths, **options)
    return (result[0].transpose(1, 2), result[1]) if case.lse else result.transpose(1, 2)


def flash_options(given: Any, documents: str = "") -> dict[str, Any]:
    case = given.case
    options: dict[str, Any] = {"softmax_scale": case.scale, "causal": case.text.startswith("causal")}
    windows = {
        "causal & window(5)": (4, 0),
        "causal & window(8)": (7, 0),
        "causal & window(64)": (63, 0),
        "band(3, 2)": (3, 2),
    }
    if case.text in windows:
        options["window_size"] = windows[case.text]
    elif case.text not in ("causal", "full", documents):
        raise NotImplementedError(f"mask {case.text}")
    if case.softcap is not None:
        options["softcap"] = case.softcap
    if given.slopes is not None:
        options["alibi_slopes"] = given.slopes
    return options | ({"return_attn_probs": True} if case.lse else {})


# torch.nn and lowtri.nn


def multihead(make: Callable[[Any], nn.MultiheadAttention], given: Any) -> Any:
    """nn.MultiheadAttention whose projections change nothing: its masks are True where a query may not see."""
    only(given, "bias")
    case, size = given.case, given.case.hq * given.case.d
    module = nn.MultiheadAttention(size, case.hq, bias=False, batch_first=True, dtype=given.q.dtype)
    module.in_proj_weight.data = torch.eye(size, dtype=given.q.dtype).repeat(3, 1)
    module.out_proj.weight.data = torch.eye(size, dtype=given.q.dtype)
    options: dict[str, Any] = {"need_weights": False}
    hidden = ~given.visible
    if case.text.startswith("padding"):
        options["key_padding_mask"] = hidden.all(2)[:, 0]
        hidden = torch.ones(case.nq, case.nk, dtype=torch.bool).triu(1 + case.nk - case.nq).expand(hidden.shape)
    if given.bias is not None:
        options["attn_mask"] = given.bias.expand(hidden.shape).masked_fill(hidden, -torch.inf).flatten(0, 1)
    elif case.text != "full":
        options["attn_mask"] = hidden.flatten(0, 1)
    q, k, v = (x.transpose(1, 2).flatten(2) for x in (given.q, given.k, given.v))
    return make(module)(q, k, v, **options)[0].unflatten(2, (case.hq, case.d)).transpose(1, 2)


def lowtri_module(attend: Any, given: Any) -> Any:
    """``lowtri.nn.MultiHeadAttention`` whose projections change nothing, queries against a context of keys that are the values."""
    only(given, "grouped heads")
    case, width = given.case, given.case.hkv * given.case.d
    module = attend(case.hq * case.d, case.hq, case.hkv, head_dim=case.d, context_size=2 * width, mask=case.mask)
    module.to(given.q.dtype)
    module.q_proj.weight.data = module.o_proj.weight.data = torch.eye(case.hq * case.d, dtype=given.q.dtype)
    keys = torch.eye(2 * width, dtype=given.q.dtype)
    module.k_proj.weight.data, module.v_proj.weight.data = keys[:width], keys[width:]
    q, k, v = (x.transpose(1, 2).flatten(2) for x in (given.q, given.k, given.v))
    positions = range(
        max(0, case.nk - case.nq), max(case.nq, case.nk)
    )  # as lowtri.attention: the last query at the last key
    return module(q, torch.cat([k, v], 2), positions=positions).unflatten(2, (case.hq, case.d)).transpose(1, 2)


def transformers_call(written: str, attend: Any, given: Any) -> Any:
    """The function that transformers calls: its mask is a table of bools, or of numbers to add; tokens first in the output."""
    only(given, "scale", "softcap", "bias", "sinks", "grouped heads", "values of another size")
    case, module = given.case, nn.Module()
    module.num_key_value_groups = case.hq // case.hkv  # type: ignore[assignment]
    module.is_causal = False  # type: ignore[assignment]
    mask = given.visible
    if given.bias is not None or written != "bools":
        least = -torch.inf if written != "least" or given.bias is not None else torch.finfo(given.q.dtype).min
        bias = torch.zeros((), dtype=given.q.dtype) if given.bias is None else given.bias
        mask = bias.expand(mask.shape).masked_fill(~mask, least)
    options = {"softcap": case.softcap, "s_aux": given.sinks}
    options = {name: value for name, value in options.items() if value is not None}
    mask = None if case.text == "full" and given.bias is None else mask
    return attend(module, given.q, given.k, given.v, mask, scaling=given.scale, **options)[0].transpose(1, 2)


def x_transformers_call(flash: bool, switch: Callable[[Any], Any], given: Any) -> Any:
    """Attend of x-transformers: scores are clamped by the module, and a sink of each head is its parameter."""
    only(given, "scale", "bias", *(() if flash else ("softcap", "sinks")), "grouped heads", "values of another size")
    from x_transformers.attend import Attend

    case = given.case
    if case.softcap is not None and given.bias is not None:
        raise NotImplementedError("softcap with bias")
    options: dict[str, Any] = {"flash": flash, "scale": case.scale}
    if case.softcap is not None:
        options |= {"softclamp_logits": True, "logit_softclamp_value": case.softcap}
    if given.sinks is not None:
        options |= {"head_learned_sink": True, "heads": case.hq}
    module = switch(Attend(**options).to(given.q.dtype))
    if given.sinks is not None:
        del module.head_attn_sink
        module.head_attn_sink = given.sinks
    bias = None if given.bias is None else given.bias.expand(given.visible.shape)
    mask = None if case.text == "full" else given.visible
    return module(given.q, given.k, given.v, mask=mask, attn_bias=bias)[0]


# JAX and ONNX


def jit(attend: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
    """lowtri's attention of JAX arrays inside of a compiled program."""
    import jax

    arrays = {name: options.pop(name) for name in ("bias", "sinks") if name in options}
    return jax.jit(lambda q, k, v, arrays: attend(q, k, v, mask, **arrays, **options))(q, k, v, arrays)


def jax_call(compiled: bool, attend: Any, given: Any) -> Any:
    """jax.nn.dot_product_attention: arrays are (B, N, H, D), causal masks are aligned to the first key."""
    only(given, "scale", "bias", "log-sum-exp", "grouped heads")
    import jax
    import jax.numpy as jnp

    case, text = given.case, given.case.text
    windows = {"causal & window(5)": (4, 0), "causal & window(64)": (63, 0), "band(3, 2)": (3, 2)}
    options: dict[str, Any] = {"scale": case.scale}
    arrays = {"bias": given.bias} if given.bias is not None else {}
    if case.nq == case.nk and text in ("causal", "padding right", *windows):
        options["is_causal"] = not text.startswith("band")
        if text in windows:
            options["local_window_size"] = windows[text]
        if text == "padding right":
            arrays["key_value_seq_lengths"] = jnp.asarray(given.visible.any(2)[:, 0].sum(-1))
    elif text != "full":
        arrays["mask"] = given.visible
    if case.lse:
        options["return_residual"] = True
    q, k, v = (x.swapaxes(1, 2) for x in (given.q, given.k, given.v))
    function = partial(attend, **options)
    result = (jax.jit(function) if compiled else function)(q, k, v, **arrays)
    return (result[0].swapaxes(1, 2), result[1].swapaxes(1, 2)) if case.lse else result.swapaxes(1, 2)


def onnx_call(attend: Any, given: Any) -> Any:
    """The Attention operator: causal is aligned to the first key."""
    only(given, "scale", "softcap", "bias", "grouped heads", "values of another size")
    case = given.case
    if case.softcap is not None and given.bias is not None:
        raise NotImplementedError("softcap with bias")
    attributes = {"scale": given.scale, "softcap": case.softcap or 0.0}
    mask = None
    if given.bias is not None:
        mask = np.where(given.visible, given.bias, -np.inf).astype(given.q.dtype)
    elif case.text == "causal" and case.nq == case.nk:
        attributes["is_causal"] = 1
    elif case.text != "full":
        mask = given.visible
    return attend(given.q, given.k, given.v, mask, **attributes)


def onnx_evaluator(q: Any, k: Any, v: Any, mask: Any, **attributes: Any) -> Any:
    """ONNX's reference evaluator."""
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    arrays = {"Q": q, "K": k, "V": v} | ({} if mask is None else {"attn_mask": mask})
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in arrays.items()
    ]
    output = helper.make_tensor_value_info("Y", helper.np_dtype_to_tensor_dtype(q.dtype), None)
    graph = helper.make_graph(
        [helper.make_node("Attention", list(arrays), ["Y"], **attributes)], "one", infos, [output]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)])
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return ReferenceEvaluator(model).run(None, arrays)[0]
