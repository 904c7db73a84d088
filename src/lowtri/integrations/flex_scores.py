"""FlexAttention's ``score_mod``: what of it the kernels compute, read off its graph; the rest is applied to the scores tile by tile.

The graph is followed from its result to the score. On the way it may hold

    where(condition, x, -inf)      a condition of the indices: a mask
    x * 2, x / 2                   a factor: the scale
    30 * tanh(x / 30)              a soft cap

If nothing else lies on the way, the kernels compute it. If anything else does (a bias, a table, a product with a parameter), the
whole function is applied in torch to one tile of scores after another, so that memory grows with the tile; torch differentiates it
with every tensor that it captures. The mask is recognised in both cases.

What is recognised is compared with the function on sample scores at each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lowtri.compat.torch_private import mapped_indexing
from lowtri.integrations.flex_functions import tensor_function
from lowtri.integrations.flex_masks import function_mask
from lowtri.integrations.flex_trace import Trace, trace
from lowtri.masks.mask import Mask

__all__ = ["Scores", "read_score_mod", "tile_function"]

_SAMPLES = (-30.0, -2.0, -0.1, 0.0, 0.3, 1.0, 50.0)


@dataclass(frozen=True, eq=False)
class Scores:
    """A score_mod, as far as it was recognised.

    Attributes:
        mask: the pairs whose score it does not set to -inf, or None for all.
        factor, softcap: of the scores at these pairs, if ``in_kernel``. A bias that is a formula of the indices belongs here too.
        in_kernel: whether mask, factor and softcap are all that it does.
    """

    mask: Mask | None
    factor: float
    softcap: float | None
    in_kernel: bool


_NOTHING = Scores(None, 1.0, None, True)
_UNKNOWN = Scores(None, 1.0, None, False)


def read_score_mod(score_mod: Callable[..., Any] | None, shape: tuple[int, int, int, int], device: Any) -> Scores:
    """What a score_mod does to the scores of a call; ``shape`` is B, Hq, Nq, Nk."""
    if score_mod is None:
        return _NOTHING
    traced = trace(score_mod, device, of_score=True)
    if traced is None:
        return _UNKNOWN
    condition, node = _condition(traced, traced.output)
    steps = _steps(traced, node)
    mask = None if condition is None else _mask(traced, condition, shape, device)
    if steps is None:
        return Scores(mask, 1.0, None, False)
    found = Scores(mask, *steps, True)
    return found if _agrees(found, score_mod, device) else _UNKNOWN


def tile_function(score_mod: Callable[..., Any]) -> Callable[[Tensor, tuple[int, int, int, int]], Tensor]:
    """A score_mod as a function of a tile of scores (B, H, n, Nk) and the tile."""
    mapped: Callable[..., Any] = tensor_function("score_mod", score_mod)
    for axis in (4, 3, 2, 1):  # k, q, h, b: the scores are mapped with each of them
        mapped = torch.vmap(mapped, in_dims=(0, *(0 if i == axis else None for i in range(1, 5))))

    def apply(scores: Tensor, tile: tuple[int, int, int, int]) -> Tensor:
        q0, q1, k0, k1 = tile
        if scores.numel() == 0:
            return scores
        ranges = ((0, scores.shape[0]), (0, scores.shape[1]), (q0, q1), (k0, k1))
        with mapped_indexing():
            return mapped(scores, *(torch.arange(*each, device=scores.device) for each in ranges))

    return apply


def _condition(traced: Trace, output: Node) -> tuple[tuple[Node, bool] | None, Node]:
    """The condition of ``where(condition, x, -inf)`` with whether it hides where it is true, and x; else None and the output."""
    if _name(output) != "where" or len(output.args) != 3:
        return None, output
    condition, x, y = output.args
    hides = _is_minus_infinity(x)
    if hides:
        x, y = y, x
    if not (isinstance(condition, Node) and isinstance(x, Node) and _is_minus_infinity(y)):
        return None, output
    return (None, output) if traced.depends_on(condition, "score") else ((condition, hides), x)


def _is_minus_infinity(x: Any) -> bool:
    if isinstance(x, Node) and _name(x) in ("scalar_tensor", "full", "full_like", "new_full"):
        x = x.args[0] if _name(x) == "scalar_tensor" else x.args[1 if _name(x) != "new_full" else 2]
    return isinstance(x, float) and x == -math.inf


def _mask(traced: Trace, condition: tuple[Node, bool], shape: tuple[int, int, int, int], device: Any) -> Mask:
    """The mask of a condition, kept while the trace lives and its captured tensors do not change."""
    node, hides = condition
    key = shape, traced.versions()
    if key not in traced.kept:
        traced.kept.clear()
        mask = function_mask(traced.mask_mod(node), shape, device, traced=(traced, node))
        traced.kept[key] = ~mask if hides else mask
    kept: Mask = traced.kept[key]
    return kept


def _steps(traced: Trace, node: Node) -> tuple[float, float | None] | None:
    """The factor and the soft cap of a chain of multiplications around at most one tanh; None for anything else."""
    outer, inner, capped = 1.0, 1.0, False  # outer * tanh(inner * score), or inner * score
    while node is not traced.inputs["score"]:
        name, numbers = _name(node), [x for x in node.args if isinstance(x, int | float) and not isinstance(x, bool)]
        if name == "tanh" and not capped:
            outer, inner, capped = inner, 1.0, True
        elif (
            name in ("mul", "div")
            and len(numbers) == 1
            and len(node.args) == 2
            and isinstance(node.args[0], Node)
            and not node.kwargs
        ):
            inner *= float(numbers[0]) if name == "mul" else 1 / numbers[0] if numbers[0] else math.nan
        elif name not in ("alias", "clone"):
            return None
        if not isinstance(node.args[0], Node):
            return None
        node = node.args[0]
    factor = outer * inner if capped else inner
    softcap = outer if capped else None
    usable = math.isfinite(factor) and (softcap is None or 0 < softcap < math.inf)
    return (factor, softcap) if usable else None


def _agrees(found: Scores, score_mod: Callable[..., Any], device: Any) -> bool:
    """Whether the score_mod, evaluated at the first query and the first key, gives what was recognised."""
    scores = torch.tensor(_SAMPLES, dtype=torch.float64, device=device)
    b, h, q, k = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(4))
    expected = found.factor * scores
    if found.softcap is not None:
        expected = found.softcap * torch.tanh(expected / found.softcap)
    if found.mask is not None and not found.mask.at(0, 0)(0, 0):
        expected = torch.full_like(scores, -math.inf)
    with torch.no_grad(), mapped_indexing():
        actual = torch.vmap(tensor_function("score_mod", score_mod), in_dims=(0, None, None, None, None))(
            scores, b, h, q, k
        )
    return torch.allclose(actual.double(), expected, rtol=1e-6, atol=0)


def _name(node: Any) -> str:
    return str(node.target).removeprefix("aten.").split(".")[0] if isinstance(node, Node) else ""
