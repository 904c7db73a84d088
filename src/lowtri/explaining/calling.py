"""Calls of a user's module that leave it as it was, and its own output under a mask whose convention it does not tell."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.explaining.projections import projections_of
from lowtri.masks import full, table

Floats = NDArray[np.float64]


@contextmanager
def undisturbed(module: Any) -> Iterator[None]:
    """Run a module in eval mode, without gradients and without a compiled program; then its modes are what they were.

    In train mode dropout would draw, and a normalisation over the batch would change its statistics.
    """
    import torch

    from lowtri.compat.torch_private import without_compiled_programs

    modes = {part: part.training for part in module.modules()} if isinstance(module, torch.nn.Module) else {}
    for part in modes:
        part.training = False
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), without_compiled_programs():
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def is_torch_s(module: Any) -> bool:
    """Whether it is ``torch.nn.MultiheadAttention``, of no class of the user's."""
    return type(module).__module__ == "torch.nn.modules.activation" and hasattr(module, "in_proj_bias")


class OwnOutput(NamedTuple):
    """What may be a module's own output."""

    table: Floats  # (N, H Dv), what it returned or another linear layer of it read; or (H, N, Dv)
    how: str  # how the mask was passed
    is_meant: bool = True  # else it counts only where it agrees with the steps


def own_outputs(module: Any, x: Any, visible: NDArray[np.bool_]) -> tuple[list[OwnOutput], str]:
    """The module's output for each way to pass the mask that its forward may mean.

    Notebooks write True = hidden, torch's attention True = may see, others add numbers. A mask that hides nothing tells them apart:
    in the module's own convention it gives what no mask gives.

    Args:
        x: (N, d) or (1, N, d), as the module reads it; every required argument but the mask receives it.
        visible: (N, N) or (H, N, N), True = may see.

    Returns:
        for each way the output, then what other linear layers of the module read; the likeliest convention first. And why a call
        failed, where it did.
    """
    required, mask_name = _arguments(module)
    run = _Runner(module, x, required)
    left_out = run({})
    if mask_name is None:
        if isinstance(left_out, str):
            return [], left_out
        return [OwnOutput(each, "its forward takes no mask") for each in left_out], ""
    ways, why_not = _masked_ways(run, mask_name, visible)
    if isinstance(left_out, list):
        ways += [OwnOutput(each, "called without a mask", is_meant=False) for each in left_out]
    return ways, why_not


def _masked_ways(run: _Runner, name: str, visible: NDArray[np.bool_]) -> tuple[list[OwnOutput], str]:
    """The outputs under the mask in each convention that is possible, the likeliest first; and why there are none."""
    import torch

    shown = torch.from_numpy(visible.copy()).to(run.x.device)
    everything = torch.ones_like(shown)

    def added(pairs: Any) -> Any:
        return torch.zeros_like(pairs, dtype=run.x.dtype).masked_fill(~pairs, -torch.inf)

    conventions: dict[str, Callable[[Any], Any]] = {
        "a lowtri mask": lambda pairs: full() if pairs is everything else table(visible),
        "a table, True = hidden": torch.logical_not,
        "a table, True = may see": lambda pairs: pairs,
        "numbers that are added": added,
    }
    without = run({name: None})
    neutral = {how: run({name: convert(everything)}) for how, convert in conventions.items()}
    possible = [how for how, output in neutral.items() if isinstance(output, list)]
    proven = [how for how in possible if _alike(neutral[how], without, run.eps)]
    for how in ("a lowtri mask", "numbers that are added"):  # a module that adds numbers takes a bool for 0 or 1
        if how in proven:
            proven = [how]
    results = {how: run({name: conventions[how](shown)}) for how in sorted(possible, key=proven.count, reverse=True)}
    ways = [
        OwnOutput(each, f"called with {how}", is_meant=how in proven or not proven)
        for how, output in results.items()
        if isinstance(output, list)
        for each in output
    ]
    failures = [*results.values(), neutral["a table, True = hidden"]]
    return ways, next((output for output in failures if isinstance(output, str)), "")


def _alike(one: list[Floats] | str, other: list[Floats] | str, eps: float) -> bool:
    """Whether two outputs are the same to the rounding of a few operations in another order."""
    if isinstance(one, str) or isinstance(other, str):
        return False
    a, b = one[0], other[0]
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=0, atol=16 * eps * abs(b).max(initial=0), equal_nan=True))


def _arguments(module: Any) -> tuple[int, str | None]:
    """How many arguments of a forward are required besides the mask, and the name of the argument for a mask."""
    try:
        parameters = inspect.signature(getattr(module, "forward", module)).parameters.values()
    except (TypeError, ValueError):
        return 1, None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.POSITIONAL_ONLY)]
    masks = [p.name for p in named if "mask" in p.name.lower() and p.kind is not p.POSITIONAL_ONLY]
    masks.sort(key=lambda name: "pad" in name)  # attn_mask before key_padding_mask
    required = [p for p in named if p.default is p.empty and p.name not in masks and p.kind is not p.KEYWORD_ONLY]
    return max(1, len(required)), masks[0] if masks else None


class _Runner:
    """Calls a module, and reads its output and what its linear layers read."""

    def __init__(self, module: Any, x: Any, required: int) -> None:
        import torch

        maps = projections_of(module)
        assert maps is not None
        self.module = module
        self.required = required
        self.eps = float(torch.finfo(maps.dtype).eps)
        self.projections = maps.parts
        self.x = torch.as_tensor(x).to(maps.device, maps.dtype)

    def __call__(self, options: dict[str, Any]) -> list[Floats] | str:
        """The output and what other linear layers read, or why the call failed."""
        try:
            return self._run(options)
        except Exception as error:  # of a user's code: any
            return f"{type(error).__name__}: {error}"

    def _run(self, options: dict[str, Any]) -> list[Floats]:
        import torch

        read: list[Any] = []
        hooks = [
            part.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].detach().clone()))
            for part in (self.module.modules() if isinstance(self.module, torch.nn.Module) else ())
            if isinstance(part, torch.nn.Linear) and all(part is not own for own in self.projections)
        ]
        try:
            with undisturbed(self.module):
                inputs = tuple(self.x.clone() for _ in range(self.required))
                if is_torch_s(self.module):  # its last map hides what the heads give, so it is the identity here
                    width = self.module.embed_dim
                    identity = {"out_proj.weight": torch.eye(width).to(self.x)}
                    if self.module.out_proj.bias is not None:
                        identity["out_proj.bias"] = torch.zeros(width).to(self.x)
                    result = torch.func.functional_call(self.module, identity, inputs, options)
                else:
                    result = self.module(*inputs, **options)
        finally:
            for hook in hooks:
                hook.remove()
        first = result[0] if isinstance(result, tuple | list) else result
        if not isinstance(first, torch.Tensor):
            raise TypeError(f"forward returned {type(first).__name__}, expected a tensor")
        return [_rows(each) for each in (first, *read)]


def _rows(output: Any) -> Floats:
    """(N, width), of that or of (1, N, width)."""
    array = output.detach().cpu().double().numpy()
    return np.asarray(array[0] if array.ndim == 3 and len(array) == 1 else array)
