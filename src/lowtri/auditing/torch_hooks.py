"""What needs torch: the float64 copy, leaves to differentiate or to poison, the module where a leak enters, the masks of attention.

Casting weights to float64 is not enough: many models cast to float32 internally (norms, softmax, rotary tables), which brings
the noise back. So the copy runs under a torch function mode that reads every request for a narrower float as one for float64.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from lowtri.ops.arguments import describe

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


@contextlib.contextmanager
def computing_in_float64() -> Iterator[None]:
    """Read every request for float32, float16 or bfloat16 as one for float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widen():
            yield
    finally:
        torch.set_default_dtype(before)


class _Widen(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _wide(value) for name, value in (kwargs or {}).items()}
        if func in _CASTS:
            func, kwargs = torch.Tensor.double, {}
        args = tuple(_wide(value) for value in args)
        if getattr(func, "__name__", "").endswith("grouped_mm") and _by_rows(*args, **kwargs):
            return _grouped(*args, **kwargs)
        result = func(*args, **kwargs)
        created = isinstance(result, torch.Tensor) and not types and result.dtype in _NARROW
        return result.double() if created else result


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


def _by_rows(rows: Any, weights: Any, *, offs: Any = None, **others: Any) -> bool:
    by_offset = offs is not None and not any(value is not None for value in others.values())
    return by_offset and rows.dtype == torch.float64 and rows.dim() == 2 and weights.dim() == 3


def _grouped(rows: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor, **others: Any) -> torch.Tensor:
    """A product with another matrix for each group of rows; torch's own has no float64."""
    ends = [0, *offs.tolist()]
    parts = [rows[a:b] @ weight for a, b, weight in zip(ends, ends[1:], weights, strict=False)]
    return torch.cat([*parts, rows.new_zeros(len(rows) - ends[-1], weights.shape[-1])])


Make = Callable[[torch.Tensor], torch.Tensor]


def run_with_leaves(tested: Any, inputs: Any, make: Make) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run the model with its vectors passed through `make`, which gets them in the caller's own layout.

    Returns:
        The rows, (B, N, F), and what `make` returned, one for each sequence or look-up; none when ids are looked up in a way
        that is not known.
    """
    leaves: list[torch.Tensor] = []

    def replaced(vectors: torch.Tensor) -> torch.Tensor:
        leaves.append(make(vectors))
        return leaves[-1].clone()  # a leaf itself may not be written in place, and some models do

    if not inputs.discrete:
        signature = replace(tested.signature, transform=replaced)
        return torch.as_tensor(replace(tested, signature=signature).raw_rows(inputs)), leaves
    ids = tested.signature.sequence(inputs.sequences[0])
    if not isinstance(ids, torch.Tensor):
        return torch.as_tensor(tested.raw_rows(inputs)), []
    with _Lookup(ids, replaced):
        return torch.as_tensor(tested.raw_rows(inputs)), leaves


class _Lookup(TorchFunctionMode):
    """Replaces the result of every look-up of exactly the example's ids, by embedding or by indexing."""

    def __init__(self, ids: torch.Tensor, replaced: Make, sizes: list[int] | None = None) -> None:
        super().__init__()
        self.ids = ids
        self.replaced = replaced
        self.sizes = sizes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.embedding:
            index, table = args[0], args[1] if len(args) > 1 else (kwargs or {}).get("weight")
        elif func in (torch.embedding, torch.Tensor.__getitem__):
            table, index = args[0], args[1]
        else:
            return result
        if not (isinstance(index, torch.Tensor) and index.shape == self.ids.shape and result.is_floating_point()):
            return result
        if result.dim() <= index.dim() or not torch.equal(index, self.ids):
            return result
        if self.sizes is not None and isinstance(table, torch.Tensor):
            self.sizes.append(len(table))
        return self.replaced(result)


def looked_up(tested: Any, inputs: Any) -> int | None:
    """The length of the shortest table in which the ids themselves are looked up; None where no look-up was recognised."""
    ids, sizes = tested.signature.sequence(inputs.sequences[0]), list[int]()
    if isinstance(ids, torch.Tensor):
        with torch.no_grad(), _Lookup(ids, lambda vectors: vectors, sizes):
            tested.raw_rows(inputs)
    return min(sizes, default=None)


class _Place(NamedTuple):
    """A row and a position in one call of the module."""

    row: int
    position: int
    shape: tuple[int, int]  # rows and positions of the call
    call: int  # which of the module's calls


class _Event(NamedTuple):
    """One call of a part: its inputs and outputs at the position."""

    name: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


def locate(one: Any, other: Any, spot: tuple[int, int]) -> str | None:
    """Where two runs part: the first module whose output differs at a row and a position where none of its inputs does.

    Where the difference begins between modules, in plain code, that is their parent. None when no output differs.
    """
    first, second = _events(one, spot), _events(other, spot)
    outputs = (tensor for event in first for tensor in event.outputs if tensor.numel())
    greatest = max((float(t.nan_to_num(0.0, 0.0, 0.0).abs().max()) for t in outputs), default=1.0)
    inputs_still: dict[str, bool] = {}
    culprit: tuple[str, bool] | None = None
    for before, after in zip(first, second, strict=False):
        if before.name != after.name:
            break  # the two runs took different code paths
        moved = _moved(before.inputs, after.inputs, greatest)
        inputs_still.setdefault(before.name, not moved)
        if culprit is None and _moved(before.outputs, after.outputs, greatest):
            culprit = before.name, moved
    if culprit is None:
        return None
    name, inputs_moved = culprit
    if inputs_moved:  # the leak entered in the code around it
        parents = [name.rpartition(".")[0]]
        while parents[-1]:
            parents.append(parents[-1].rpartition(".")[0])
        # A parent that only contains its parts (a ModuleList, say) is never called, and no code of its own can leak.
        name = next((parent for parent in parents if inputs_still.get(parent, False)), "")
    return name or type(one.tested.module).__name__


def _events(run: Any, spot: tuple[int, int]) -> list[_Event]:
    """Every part's calls in the call of the module that computes a place of a run, in the order in which they finish."""
    row, position = np.add(spot, run.start).tolist()
    place = _Place(row, position, (run.inputs.batch, run.inputs.n), -1)
    if run.calls:
        starts = np.cumsum([0, *run.calls])
        call = int(np.searchsorted(starts, position, side="right")) - 1
        place = _Place(row, position - int(starts[call]), (run.inputs.batch, run.calls[call]), call)
    axis = run.tested.signature.position_axes[0]
    calls: list[list[_Event]] = []

    def at_place(values: Iterable[Any], part: Any) -> list[torch.Tensor]:
        along = 2 if hasattr(part, "kernel_size") else axis  # convolutions and pools have the channels first
        return [cut for value in values if (cut := _cut(value, place, along)) is not None]

    def record(name: str, part: Any, args: Any, kwargs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            output = [output]
        elif not isinstance(output, (tuple, list)):
            values = getattr(output, "values", None)
            output = values() if callable(values) else []
        if calls:
            calls[-1].append(_Event(name, at_place([*args, *kwargs.values()], part), at_place(output, part)))

    module = run.tested.module
    with contextlib.ExitStack() as hooks:
        for name, part in module.named_modules():
            hook = part.register_forward_hook(functools.partial(record, name), with_kwargs=True)
            hooks.callback(hook.remove)
        hooks.callback(module.register_forward_pre_hook(lambda *_: calls.append([])).remove)
        run.compute()
    return calls[place.call] if calls else []


def _cut(value: Any, place: _Place, axis: int) -> torch.Tensor | None:
    """A tensor's values at the place; None where its axis of positions is not known."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() < 2:
        return None
    value = value.detach()
    batch, n = place.shape
    position = place.position
    axes = [axis, *(i for i in range(value.dim()) if i != axis)]
    fitting = next((i for i in axes if i < value.dim() and value.shape[i] == n), None)
    if fitting is None and value.shape[0] == batch * n:  # batch and positions flattened into one, as experts have it
        return value[place.row * n + position].clone()
    if fitting is None and value.dim() > max(2, axis) and 1 < value.shape[axis] < n and value.shape[0] in (1, batch):
        fitting, position = axis, position * value.shape[axis] // n  # a strided part
    if fitting is None:
        return None
    value = value.select(fitting, position)
    return (value[place.row] if value.dim() > 1 and value.shape[0] == batch else value).clone()


def _moved(before: list[torch.Tensor], after: list[torch.Tensor], greatest: float) -> bool:
    for one, other in zip(before, after, strict=False):
        if one.shape != other.shape or not one.numel():
            continue
        still = (one == other) | (one.isnan() & other.isnan())
        distance = torch.nan_to_num((one.double() - other.double()).abs(), nan=torch.inf).masked_fill(still, 0.0)
        if float(distance.max()) > 64 * torch.finfo(one.dtype).eps * greatest:
            return True
    return False


def attention_tables(run: Callable[[], Any]) -> list[Any]:
    """The pairs that each attention of a run shows, (1 or B, Nq, Nk), from torch's functions or from returned weights."""
    attend: Any = importlib.import_module("lowtri.dispatch.attend")
    recorder = _Attentions(attend.run_eagerly)
    with contextlib.ExitStack() as undo:
        undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        # A call that was made before would be found, and run past the recorder.
        for name, replaced in (("run_eagerly", recorder.run_eagerly), ("find", lambda *arguments: (None, None))):
            undo.callback(setattr, attend, name, getattr(attend, name))
            setattr(attend, name, replaced)
        with recorder:
            answer = run()
    weights = getattr(answer, "attentions", None)
    return recorder.tables or [(w > 0).any(dim=1).cpu().numpy() for w in weights or () if w is not None]


class _Attentions(TorchFunctionMode):
    """Records the calls of torch's attention and of lowtri's own, and not what lowtri's engines call in turn."""

    def __init__(self, run_eagerly: Callable[..., Any]) -> None:
        super().__init__()
        self.tables: list[Any] = []
        self.own = run_eagerly
        self.inside = False  # an engine of lowtri's attention

    def run_eagerly(self, q: Any, k: Any, v: Any, mask: Any, options: Any) -> Any:
        self.tables.append(describe(q, k, v, mask, options)[0].visible().any(axis=1))
        self.inside = True
        try:
            return self.own(q, k, v, mask, options)
        finally:
            self.inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            is_causal = kwargs.get("is_causal", args[5] if len(args) > 5 else False)
            self.add(args[0].shape[-2], args[1].shape[-2], mask, is_causal)
        elif func is torch.nn.functional.multi_head_attention_forward:
            mask, pads = kwargs.get("attn_mask"), kwargs.get("key_padding_mask")
            if mask is not None and mask.dtype == torch.bool:
                mask = ~mask
            self.add(args[0].shape[0], args[1].shape[0], mask if mask is None or mask.dim() == 2 else None, False)
            if pads is not None:
                hidden = pads if pads.dtype == torch.bool else pads < -1e3
                self.tables[-1] = self.tables[-1] & ~hidden.cpu().numpy().reshape(-1, 1, pads.shape[-1])
        return func(*args, **kwargs)

    def add(self, nq: int, nk: int, mask: Any, is_causal: bool) -> None:
        pairs = torch.ones(1, nq, nk, dtype=torch.bool)
        if is_causal:
            pairs = pairs.tril()
        if mask is not None:
            shown = mask if mask.dtype == torch.bool else mask > -1e3
            shown = shown.expand(*shown.shape[:-2], nq, nk).cpu()
            pairs = pairs & (shown.any(dim=1) if shown.dim() == 4 else shown.reshape(-1, nq, nk))
        self.tables.append(pairs.numpy())
