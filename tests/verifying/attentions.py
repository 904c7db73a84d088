"""Attention functions of lowtri and of other libraries, and how each is called: what ``test_matrix.py`` verifies.

A function ``call(attend, given)`` writes a case in a library's own arguments, so lowtri's integration and the library itself are
called by the same one.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
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


def late(module: Any, name: str) -> Callable[..., Any]:
    """A function that is looked up at each call, so that what a test puts in its place is called."""

    def call(*args: Any, **options: Any) -> Any:
        return getattr(module, name)(*args, **options)

    call.__name__ = name
    return call


def real_keys(given: Any) -> list[int]:
    """How many keys each row of the batch has, without its padding."""
    return given.visible.any(2)[:, 0].sum(-1).tolist()


def window_of(given: Any) -> tuple[int, int] | None:
    """How many keys before and after its own a query sees, where the mask is a window; None where it is another."""
    text = given.case.text
    if match := re.fullmatch(r"causal & window\((\d+)\)", text):
        return int(match[1]) - 1, 0
    return (3, 2) if text == "band(3, 2)" else None


def document_lengths(given: Any) -> list[int] | None:
    """The lengths of the documents of a mask; None where it has none."""
    found = re.search(r"documents\(lengths=\[([\d, ]+)\]\)", given.case.text)
    return None if found is None else [int(length) for length in found[1].split(",")]


# torch's function, told that it is causal: alone, or beside a mask.


def sdpa_causal(attend: Any, given: Any) -> Any:
    """is_causal=True, which is aligned to the first key; padding and biases stay in attn_mask."""
    only(given, "scale", "bias", "grouped heads", "values of another size")
    case, mask = given.case, None
    if case.text == "full" and given.bias is None:
        return attend(given.q, given.k, given.v, None, is_causal=False, scale=case.scale)
    triangular = case.text == "causal" or case.text.startswith(("causal & ", "causal - ", "padding"))
    if not (case.text == "top left" or (case.nq == case.nk and triangular)):
        raise NotImplementedError(f"mask {case.text}")
    if case.text.startswith("padding"):
        mask = given.visible.any(2, keepdim=True)[:, :1]  # (B, 1, 1, Nk)
    elif case.text not in ("causal", "top left"):
        mask = case.visible_under(case.text.removeprefix("causal & "))
    if given.bias is not None:
        mask = given.bias
    options: dict[str, Any] = {"is_causal": True, "scale": case.scale, "enable_gqa": case.hq != case.hkv}
    return attend(given.q, given.k, given.v, mask, **options)


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
    from lowtri.integrations import flash_attn

    only(given, "scale", "softcap", "log-sum-exp", "grouped heads")
    case, (q, k, v) = given.case, (x.transpose(1, 2) for x in (given.q, given.k, given.v))
    options = flash_options(given)
    if case.hq == case.hkv and case.nq == case.nk:
        result = flash_attn.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **options)
    else:
        result = attend(q, torch.stack([k, v], 2), **options)
    return (result[0].transpose(1, 2), result[1]) if case.lse else result.transpose(1, 2)


def flash_varlen(attend: Any, given: Any) -> Any:
    """Each document of each row of the batch is a sequence; a padded row is a shorter one."""
    only(given, "scale", "softcap", "grouped heads", "values of another size")
    case, documents = given.case, document_lengths(given)
    if case.b == 0:
        raise NotImplementedError("an empty batch")
    if case.text == "padding left":
        return _flash_ragged(attend, given)
    lengths = documents or [case.nk]
    options = flash_options(given, *([case.text] if documents else []))
    queries = documents or [case.nq]
    edges = [torch.tensor([0, *n * case.b]).cumsum(0).int() for n in (queries, lengths)]
    packed = (x.transpose(1, 2).flatten(0, 1) for x in (given.q, given.k, given.v))
    output = attend(*packed, *edges, max(queries), max(lengths), **options)
    return output.unflatten(0, (case.b, case.nq)).transpose(1, 2)


def _flash_ragged(attend: Any, given: Any) -> Any:
    """Padded rows without their padding, whose queries see nothing."""
    nq, lengths = given.case.nq, real_keys(given)
    queries = [min(nq, n) for n in lengths]
    q, k, v = (
        torch.cat([row[len(row) - n :] for row, n in zip(x.transpose(1, 2), sizes, strict=True)])
        for x, sizes in ((given.q, queries), (given.k, lengths), (given.v, lengths))
    )
    edges = [torch.tensor([0, *sizes]).cumsum(0).int() for sizes in (queries, lengths)]
    rows = attend(q, k, v, *edges, max(queries), max(lengths), **flash_options(given, "padding left")).split(queries)
    padded = [nn.functional.pad(row, (0, 0, 0, 0, nq - len(row), 0)) for row in rows]
    return torch.stack(padded).transpose(1, 2)


def flash_cache(form: str, attend: Any, given: Any) -> Any:
    """Keys and values lie in a cache with free slots, in one of several forms; NaN lies in the slots that are free.

    Args:
        form: "ragged", the rows of different lengths begin in the first slot; "left padding", they end in the same one;
            "pages", they are in pages of four that lie in any order; "index", among other rows; "new tokens", the last ones are
            written by the call; "rotary", these and the queries are rotated, too.
    """
    only(given, "scale", "softcap", "log-sum-exp", "grouped heads", "values of another size")
    case, options = given.case, flash_options(given, "padding left")
    options["return_softmax_lse"] = options.pop("return_attn_probs", False)
    q, k, v = (x.transpose(1, 2) for x in (given.q, given.k, given.v))
    real = real_keys(given) if case.text == "padding left" else [case.nk] * case.b
    if form == "left padding":
        options["cache_leftpad"] = torch.tensor([case.nk - n for n in real], dtype=torch.int32)
        ends = [case.nk] * case.b
    else:  # each row from the first slot on
        ends = real
        k, v = (torch.stack([row.roll(n, 0) for row, n in zip(x, real, strict=True)]) if case.b else x for x in (k, v))
    if form in ("new tokens", "rotary"):
        new = min(case.nq, *ends, case.nk)
        held = [n - new for n in ends]
        written = [
            torch.stack([row[n : n + new] for row, n in zip(x, held, strict=True)]) if case.b else x[:, :new]
            for x in (k, v)
        ]
        ends = held
        if form == "rotary":
            q, written[0] = _turned_back(q, written[0], held, options)
        options |= {"k": written[0], "v": written[1]}
    free = torch.arange(case.nk)[None, :] >= torch.tensor(ends, dtype=torch.int64)[:, None]  # (B, Nk)
    k, v = (x.masked_fill(free[:, :, None, None], torch.nan) for x in (k, v))
    k, v = (nn.functional.pad(x, (0, 0, 0, 0, 0, 3 + -(case.nk + 3) % 4), value=torch.nan) for x in (k, v))
    options["cache_seqlens"] = torch.tensor(ends, dtype=torch.int32)
    if form == "pages":
        pages_of_row = k.shape[1] // 4
        pages = case.b * pages_of_row
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
        k, v = (x.reshape(pages, 4, *x.shape[2:])[order.argsort()] for x in (k, v))
        options["block_table"] = order.reshape(case.b, pages_of_row)
    elif form == "index":
        other = torch.full_like(k[:1], torch.nan), torch.full_like(v[:1], torch.nan)
        k, v = (torch.cat([extra, x.flip(0)]) for x, extra in zip((k, v), other, strict=True))
        options["cache_batch_idx"] = torch.arange(case.b).flip(0) + 1
    if form in ("new tokens", "rotary"):
        k, v = k.contiguous(), v.contiguous()
    result = attend(q, k, v, **options)
    return (result[0].transpose(1, 2), result[1]) if case.lse else result.transpose(1, 2)


def _quarter_turns(positions: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (positions, pairs) of whole quarter turns, which rotate without rounding."""
    turns = torch.outer(torch.arange(positions), 1 + torch.arange(pairs) % 3) % 4
    return torch.tensor([1.0, 0.0, -1.0, 0.0])[turns], torch.tensor([0.0, 1.0, 0.0, -1.0])[turns]


def _rotated_back(x: Any, cos: Any, sin: Any, positions: Any, interleaved: bool) -> Any:
    """x (B, N, H, D), so that rotary embedding by these tables at ``positions`` (B, N) gives x."""
    pairs, c, s = cos.shape[1], *(t[positions][:, :, None].to(x.dtype) for t in (cos, sin))
    rest = x[..., 2 * pairs :]
    first, second = (x[..., : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]) if interleaved else x.split(pairs, -1)[:2]
    back = first * c + second * s, second * c - first * s
    joined = torch.stack(back, -1).flatten(-2) if interleaved else torch.cat(back, -1)
    return torch.cat([joined, rest], -1)


def _turned_back(q: Any, k: Any, held: list[int], options: dict[str, Any]) -> tuple[Any, Any]:
    """Queries and new keys as they are before a call on a cache rotates them; the tables go into the options."""
    pairs = q.shape[3] // 2
    if pairs == 0:
        raise NotImplementedError("heads of one number")
    cos, sin = _quarter_turns(max(held, default=0) + q.shape[1] + 1, pairs)
    starts = torch.tensor(held, dtype=torch.int64)[:, None]
    own = options.get("causal", False) or "window_size" in options
    of_q = starts + (torch.arange(q.shape[1]) if own else torch.zeros(q.shape[1], dtype=torch.int64))
    options |= {"rotary_cos": cos.to(q.dtype), "rotary_sin": sin.to(q.dtype), "rotary_interleaved": False}
    return (
        _rotated_back(q, cos, sin, of_q, False),
        _rotated_back(k, cos, sin, starts + torch.arange(k.shape[1]), False),
    )


def flash_rotary(interleaved: bool, attend: Any, given: Any) -> Any:
    """Queries and keys that ``apply_rotary_emb`` turns into those of the case."""
    from lowtri.integrations.flash_attn import layers_rotary

    only(given, "scale", "softcap", "grouped heads", "values of another size")
    case, pairs = given.case, given.case.d // 4 + given.case.d // 2 % 2
    if pairs == 0 or 2 * pairs > case.d:
        raise NotImplementedError("heads of one number")
    q, k, v = (x.transpose(1, 2) for x in (given.q, given.k, given.v))
    cos, sin = _quarter_turns(case.nq + case.nk + 9, pairs)
    rotated = []
    for x, offset in ((q, torch.arange(case.b) + 5), (k, 2)):
        positions = (offset * torch.ones(case.b, dtype=torch.int64))[:, None] + torch.arange(x.shape[1])
        back = _rotated_back(x, cos, sin, positions, interleaved)
        tables = cos.to(x.dtype), sin.to(x.dtype)
        rotated.append(layers_rotary.apply_rotary_emb(back, *tables, interleaved, seqlen_offsets=offset))
    return attend(*rotated, v, **flash_options(given)).transpose(1, 2)


def flash_options(given: Any, *others: str) -> dict[str, Any]:
    """The options of a call; ``others`` are masks that its sequences say."""
    case = given.case
    causal = case.text.startswith("causal") or case.text == "padding left"
    options: dict[str, Any] = {"softmax_scale": case.scale, "causal": causal}
    window = window_of(given)
    if window is not None:
        options["window_size"] = window
    elif case.text not in ("causal", "full", *others):
        raise NotImplementedError(f"mask {case.text}")
    if case.softcap is not None:
        options["softcap"] = case.softcap
    if given.slopes is not None:
        options["alibi_slopes"] = given.slopes
    return options | ({"return_attn_probs": True} if case.lse else {})


# torch.nn and lowtri.nn


def multihead(form: str, make: Callable[[Any], nn.MultiheadAttention], given: Any) -> Any:
    """nn.MultiheadAttention whose projections change nothing: its masks are True where a query may not see.

    Args:
        form: "bools", its masks hold bools; "floats", they hold numbers; "is_causal", its mask is promised to be causal.
    """
    only(given, "bias")
    case, size = given.case, given.case.hq * given.case.d
    module = nn.MultiheadAttention(size, case.hq, bias=False, batch_first=True, dtype=given.q.dtype)
    module.in_proj_weight.data = torch.eye(size, dtype=given.q.dtype).repeat(3, 1)
    module.out_proj.weight.data = torch.eye(size, dtype=given.q.dtype)
    options: dict[str, Any] = {"need_weights": False}
    hidden, bias = ~given.visible, given.bias
    if case.text.startswith("padding"):
        options["key_padding_mask"] = hidden.all(2)[:, 0]
        hidden = torch.ones(case.nq, case.nk, dtype=torch.bool).triu(1 + case.nk - case.nq).expand(hidden.shape)
    if form == "floats" and case.bias == "keys":
        options["key_padding_mask"], bias = given.bias[:, 0, 0], None
    if bias is not None:
        options["attn_mask"] = bias.expand(hidden.shape).masked_fill(hidden, -torch.inf).flatten(0, 1)
    elif case.text != "full":
        options["attn_mask"] = hidden.flatten(0, 1)
    if form == "floats":
        for name in ("attn_mask", "key_padding_mask"):
            mask = options.get(name)
            if mask is not None and mask.dtype == torch.bool:
                options[name] = torch.zeros(mask.shape, dtype=given.q.dtype).masked_fill(mask, -torch.inf)
    elif form == "is_causal" and (case.text != "full" or bias is not None):
        if bias is not None or not (case.text == "top left" or (case.text == "causal" and case.nq == case.nk)):
            raise NotImplementedError(f"mask {case.text}")
        options["is_causal"] = True
    q, k, v = (x.transpose(1, 2).flatten(2) for x in (given.q, given.k, given.v))
    return make(module)(q, k, v, **options)[0].unflatten(2, (case.hq, case.d)).transpose(1, 2)


# lowtri's own: jagged tensors, the module, the cache


def jagged(attend: Any, given: Any) -> Any:
    """Jagged tensors of torch: the sequences are the rows, padded ones without their padding."""
    only(given, "scale", "softcap", "sinks", "log-sum-exp", "grouped heads", "values of another size")
    case = given.case
    if case.nq > case.nk or 0 in given.visible.shape:
        raise NotImplementedError("more queries than keys")
    mask: Any = case.mask
    lengths = [case.nk] * case.b
    if case.text == "padding left":
        mask, lengths = "causal", real_keys(given)
    elif mask.batch or case.text in ("random table", "empty rows", "top left"):
        raise NotImplementedError(f"mask {case.text}")
    queries = [min(case.nq, n) for n in lengths]

    def sequences(x: Any, sizes: list[int]) -> Any:
        rows = [row[len(row) - n :] for row, n in zip(x.transpose(1, 2), sizes, strict=True)]  # (N, H, D)
        offsets = torch.tensor([0, *sizes]).cumsum(0)
        return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets).transpose(1, 2)

    def padded(x: Any) -> Any:
        rows = x.values().transpose(0, 1).split(queries)  # (N, H) or (N, H, Dv)
        return torch.stack(
            [nn.functional.pad(row, (0, 0) * (row.ndim - 1) + (case.nq - len(row), 0)) for row in rows]
        ).transpose(1, 2)

    arrays = (sequences(x, sizes) for x, sizes in ((given.q, queries), (given.k, lengths), (given.v, lengths)))
    options = {"scale": given.scale, "softcap": case.softcap, "sinks": given.sinks, "return_lse": case.lse}
    result = attend(*arrays, mask, **options)
    return tuple(padded(x) for x in result) if case.lse else padded(result)


@cache
def _model_with_a_cache() -> Any:
    import transformers

    from lowtri.integrations.transformers import switch

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return switch(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9, **sizes)).eval())


def evicting_cache(attend: Any, given: Any) -> Any:
    """The keys before the queries are appended seven at a time, then those of the queries, in a layer over an EvictingCache."""
    from lowtri.integrations.dense_mask import LazyMask
    from lowtri.integrations.transformers import EvictingCache, use
    from lowtri.integrations.transformers.lazy import LazyMaskTensor

    only(given, "scale", "softcap", "sinks", "grouped heads", "values of another size")
    case = given.case
    mask, valid = case.mask, None
    if case.text == "padding left":
        mask, valid = lowtri.causal(), given.visible.any(2)[:, 0]
    elif mask.batch[:1] not in ((), (1,)):
        raise NotImplementedError("masks by row")
    if case.nq > case.nk or 0 in given.visible.shape or not mask.is_causal(case.nk):
        raise NotImplementedError("later keys, or none")
    cache_of_keys = EvictingCache(use(_model_with_a_cache(), mask=mask), block=1)
    before = case.nk - case.nq
    edges = [*range(0, before, 7), before, case.nk] if before else [0, case.nk]
    for start, stop in pairwise(edges):
        cache_of_keys.begin(case.b, stop - start, None if valid is None else valid[:, :stop])
        keys, values = cache_of_keys.update(given.k[:, :, start:stop], given.v[:, :, start:stop], 0)
    lazy = LazyMask(mask, before, case.nq, 0, case.nk, cache=cache_of_keys)
    tensor = LazyMaskTensor(lazy, (case.b, 1, case.nq, case.nk), "cpu")
    options = {"softcap": case.softcap, "s_aux": given.sinks}
    return attend(nn.Module(), given.q, keys, values, tensor, scaling=given.scale, **options)[0].transpose(1, 2)


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
    # As lowtri.attention: the last query at the last key.
    positions = range(max(0, case.nk - case.nq), max(case.nq, case.nk))
    return module(q, torch.cat([k, v], 2), positions=positions).unflatten(2, (case.hq, case.d)).transpose(1, 2)


def transformers_call(written: str, attend: Any, given: Any) -> Any:
    """The function that transformers calls; tokens first in the output.

    Args:
        written: "bools", its mask is a table of bools; "-inf" and "least", of numbers to add; "nothing", the layer has no mask, and is
            causal from the first key on, or sees everything.
    """
    only(given, "scale", "softcap", "bias", "sinks", "grouped heads", "values of another size")
    case, module = given.case, nn.Module()
    module.num_key_value_groups = case.hq // case.hkv  # type: ignore[assignment]
    module.is_causal = False  # type: ignore[assignment]
    options = {"softcap": case.softcap, "s_aux": given.sinks}
    options = {name: value for name, value in options.items() if value is not None}
    mask = given.visible
    if written == "nothing":
        options["is_causal"] = case.text == "top left" or (case.text == "causal" and case.nq == case.nk)
        if given.bias is not None or not (options["is_causal"] or case.text == "full"):
            raise NotImplementedError(f"mask {case.text}")
    elif given.bias is not None or written != "bools":
        least = -torch.inf if written != "least" or given.bias is not None else torch.finfo(given.q.dtype).min
        bias = torch.zeros((), dtype=given.q.dtype) if given.bias is None else given.bias
        mask = bias.expand(mask.shape).masked_fill(~mask, least)
    if written == "nothing" or (case.text == "full" and given.bias is None):
        mask = None
    return attend(module, given.q, given.k, given.v, mask, scaling=given.scale, **options)[0].transpose(1, 2)


def transformers_masks(attend: Any, given: Any) -> Any:
    """The mask is made from the functions of transformers, before queries that continue a cache where there are fewer of them."""
    from transformers import masking_utils

    from lowtri.integrations.transformers.masks import make_mask

    only(given, "scale", "softcap", "sinks", "grouped heads", "values of another size")
    case, text, padding, module = given.case, given.case.text, None, nn.Module()
    causal, sliding = masking_utils.causal_mask_function, masking_utils.sliding_window_overlay
    packed, both = masking_utils.packed_sequence_mask_function, masking_utils.and_masks
    if case.nq > case.nk or 0 in given.visible.shape:
        raise NotImplementedError("more queries than keys")
    documents = torch.tensor(document_lengths(given) or [case.nk])
    ids = torch.arange(len(documents)).repeat_interleave(documents).expand(case.b, -1)
    functions: dict[str, Any] = {
        "causal": causal,
        "full": masking_utils.bidirectional_mask_function,
        "band(3, 2)": lambda b, h, q, k: (k >= q - 3) & (k <= q + 2),
        **{f"causal & window({n})": both(causal, sliding(n)) for n in (5, 8, 64)},
        "causal & chunks(8)": both(causal, masking_utils.chunked_overlay(8, torch.zeros(case.b, dtype=torch.int64))),
        "causal & strided(3)": lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0),
        "causal | first(5)": masking_utils.or_masks(causal, lambda b, h, q, k: k < 5),
        "causal & documents(lengths=[7, 1, 22, 7])": both(causal, packed(ids)),
        "documents(lengths=[20, 17])": packed(ids),
    }
    if text.startswith("padding"):
        function, padding = causal, given.visible.any(2)[:, 0]  # (B, Nk)
    elif text == "random table" and case.nq == case.nk:
        seen = given.visible
        function = lambda b, h, q, k: seen[b, 0, q, k]  # noqa: E731
    elif text in functions:
        function = functions[text]
    else:
        raise NotImplementedError(f"mask {text}")
    mask = make_mask(case.b, case.nq, case.nk, case.nk - case.nq, 0, function, padding)
    options = {"softcap": case.softcap, "s_aux": given.sinks}
    return attend(module, given.q, given.k, given.v, mask, scaling=given.scale, **options)[0].transpose(1, 2)


# FlexAttention, with functions of indices in place of tables


def flex_formulas(form: str, attend: Any, given: Any) -> Any:
    """Masks and biases by formulas of the indices, blocks by lowtri's ``create_block_mask``.

    Args:
        form: "formulas"; "conditions", the mask is a condition in the score_mod; "general", the score_mod has a step that the
            kernels do not have.
    """
    from lowtri.integrations.flex import create_block_mask

    only(given, "scale", "softcap", "bias", "log-sum-exp", "grouped heads", "values of another size")
    case, options = given.case, {"scale": given.case.scale, "enable_gqa": given.case.hq != given.case.hkv}
    if 0 in given.visible.shape:
        raise NotImplementedError("zero sizes")
    sees = _mask_mod(given)
    cap, bias, slopes, shift = given.softcap, given.bias, given.slopes, case.nk - case.nq
    steps: list[Callable[..., Any]] = []
    if cap is not None:
        steps.append(lambda score, b, h, q, k: cap * torch.tanh(score / cap))
    if slopes is not None:
        of_heads = slopes.to(given.q.dtype)
        steps.append(lambda score, b, h, q, k: score - of_heads[h] * (q + shift - k).abs())
    elif case.bias == "broadcast":
        of_keys = bias[0, :, 0]
        steps.append(lambda score, b, h, q, k: score + of_keys[h, k])
    elif bias is not None:
        wide = bias.expand(given.visible.shape)
        steps.append(lambda score, b, h, q, k: score + wide[b, h, q, k])
    if form == "general":
        grows = torch.arange(case.nq * 1.0, dtype=given.q.dtype)
        steps.append(lambda score, b, h, q, k: torch.where(grows[q] == q, score, 2 * score))
    if form == "conditions":
        steps.append(lambda score, b, h, q, k: torch.where(sees(b, h, q, k), score, -torch.inf))
    elif case.text != "full":
        sizes = case.b, case.hq, case.nq, case.nk
        options["block_mask"] = create_block_mask(sees, *sizes, device="cpu")
    if steps:

        def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            for step in steps:
                score = step(score, b, h, q, k)
            return score

        options["score_mod"] = score_mod
    return attend(given.q, given.k, given.v, **options, **({"return_lse": True} if case.lse else {}))


def _mask_mod(given: Any) -> Callable[..., Any]:
    """The mask of a case as a function of indices."""
    text, shift = given.case.text, given.case.nk - given.case.nq
    if text in ("random table", "empty rows", "heads([causal, causal & window(3)])"):
        table = given.visible
        return lambda b, h, q, k: table[b, h, q, k]
    real = given.visible.any(2)[:, 0]
    documents = document_lengths(given)
    ids = torch.arange(len(documents or [])).repeat_interleave(torch.tensor(documents or [], dtype=torch.int64))
    formulas: dict[str, Callable[..., Any]] = {
        "full": lambda b, h, q, k: q >= 0,
        "top left": lambda b, h, q, k: q >= k,
        "causal": lambda b, h, q, k: q + shift >= k,
        "causal - window(1)": lambda b, h, q, k: q + shift > k,
        "band(3, 2)": lambda b, h, q, k: (q - k <= 3) & (k - q <= 2),
        "causal | first(5)": lambda b, h, q, k: (q >= k) | (k < 5),
        "causal & (window(4) | first(2))": lambda b, h, q, k: (q >= k) & ((q - k < 4) | (k < 2)),
        "causal & strided(3)": lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0),
        "causal & chunks(8)": lambda b, h, q, k: (q >= k) & (q // 8 == k // 8),
    }
    for n in (5, 8, 64):
        formulas[f"causal & window({n})"] = lambda b, h, q, k, n=n: (q + shift >= k) & (q + shift - k < n)
    if text.startswith("padding"):
        return lambda b, h, q, k: (q + shift >= k) & real[b, k]
    if documents:
        inner = formulas["causal" if text.startswith("causal") else "full"]
        return lambda b, h, q, k: inner(b, h, q, k) & (ids[q] == ids[k])
    if text not in formulas:
        raise NotImplementedError(f"mask {text}")
    return formulas[text]


# JAX and ONNX


def jax_dense(attend: Any, given: Any) -> Any:
    """jax.nn.dot_product_attention under a mask of lowtri: its table of pairs; arrays are (B, N, H, D)."""
    only(given, "scale", "bias", "grouped heads", "log-sum-exp")
    import jax

    case = given.case
    table = case.mask.dense(case.nq, case.nk)  # (Nq, Nk), or with rows and heads in front
    table = table.reshape(*(*case.mask.batch, 1, 1)[:2], case.nq, case.nk)
    function = jax.jit(partial(attend, scale=case.scale, return_residual=case.lse))
    bias = {} if given.bias is None else {"bias": given.bias}
    result = function(*(x.swapaxes(1, 2) for x in (given.q, given.k, given.v)), mask=table, **bias)
    return (result[0].swapaxes(1, 2), result[1].swapaxes(1, 2)) if case.lse else result.swapaxes(1, 2)


def jax_call(attend: Any, given: Any) -> Any:
    """jax.nn.dot_product_attention: arrays are (B, N, H, D), causal masks are aligned to the first key."""
    only(given, "scale", "bias", "log-sum-exp", "grouped heads")
    import jax
    import jax.numpy as jnp

    case, text = given.case, given.case.text
    window = window_of(given)
    options: dict[str, Any] = {"scale": case.scale}
    arrays = {"bias": given.bias} if given.bias is not None else {}
    if case.nq == case.nk and (window is not None or text in ("causal", "padding right")):
        options["is_causal"] = not text.startswith("band")
        if window is not None:
            options["local_window_size"] = window
        if text == "padding right":
            arrays["key_value_seq_lengths"] = jnp.asarray(given.visible.any(2)[:, 0].sum(-1))
    elif text != "full":
        arrays["mask"] = given.visible
    if case.lse:
        options["return_residual"] = True
    q, k, v = (x.swapaxes(1, 2) for x in (given.q, given.k, given.v))
    result = jax.jit(partial(attend, **options))(q, k, v, **arrays)
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
