"""What a user writes against lowtri's public names, read by type checkers (``tests/typing/test_typing.py``) and never run."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import assert_type

import lowtri
from lowtri import KVCache, Mask, attention, causal

q, k, v = torch.randn(2, 4, 8), torch.randn(2, 4, 8), torch.randn(2, 4, 8)
a, b, c = np.zeros((2, 4, 8)), np.zeros((2, 4, 8)), np.zeros((2, 4, 8))

# Attention: tensors give tensors, arrays give arrays, and the flags say how many.
assert_type(lowtri.attention(q, k, v, "causal"), Tensor)
assert_type(attention(q, k, v, causal(), return_weights=True), tuple[Tensor, Tensor])
assert_type(lowtri.attention(q, k, v, "causal", return_lse=True), tuple[Tensor, Tensor])
assert_type(lowtri.attention(q, k, v, "causal", return_weights=True, return_lse=True), tuple[Tensor, Tensor, Tensor])
assert_type(lowtri.attention(a, b, c, "causal"), NDArray[Any])
assert_type(lowtri.attention(a, b, c, "causal", return_weights=True), tuple[NDArray[Any], NDArray[Any]])
assert_type(lowtri.attention(torch.nn.Parameter(q), k, v, "causal", scale=0.5, bias=torch.zeros(4, 4)), Tensor)
assert_type(lowtri.attention(q, k, v, "causal", q_positions=[0, 1, 2, 3], engine="formula"), Tensor)


def flags(weights: bool) -> Tensor | tuple[Tensor, ...]:
    return lowtri.attention(q, k, v, "causal", return_weights=weights)


assert_type(lowtri.scaled_dot_product_attention(q, k, v, is_causal=True), Tensor)
assert_type(lowtri.scaled_dot_product_attention(a, b, c, is_causal=True), NDArray[Any])
assert_type(lowtri.attention_backward(v, None, v, v[..., 0], q, k, v, "causal").k, Tensor)
assert_type(lowtri.merge([q, k], [q[..., 0], k[..., 0]]), tuple[Tensor, Tensor])
assert_type(lowtri.which_engine(q, k, v, "causal", return_weights=True, dropout=0.1).engine, str)

# Masks.
mask = causal() & (lowtri.window(4) | lowtri.first(1)) - lowtri.chunks(2)
assert_type(mask, Mask)
assert_type(mask.dense(4), NDArray[np.bool_])
assert_type(lowtri.documents(lengths=[2, 3]), Mask)
assert_type(lowtri.mask("causal & window(4)").is_causal(8), bool)

# Checks and explanations.
model = torch.nn.Linear(4, 4)
assert_type(lowtri.audit(model, torch.zeros(2, 8), mask=mask), lowtri.AuditReport)
assert_type(lowtri.audit(model, torch.zeros(2, 8)).ok, bool)
assert_type(lowtri.explain((a, b, c), mask="causal").to_json(), str)

# Generation: text for text, ids for ids, a list for each step of a batch.
assert_type(lowtri.generate(model, "Once upon a time", 8), Iterator[str])
assert_type(lowtri.generate(model, ["Once", "Twice"], 8, temperature=0.8), Iterator[list[str]])
assert_type(lowtri.generate(model, [3, 4], max_new_tokens=4), Iterator[int])
assert_type(lowtri.generate(model, [[3, 4], [8]], max_new_tokens=4, stop=7), Iterator[list[int | None]])
assert_type(lowtri.generate(model, torch.tensor([3, 4])), Iterator[int] | Iterator[list[int | None]])

assert_type(KVCache(mask).bytes, int)
assert_type(lowtri.nn.sinusoidal(4, 8), Tensor)
assert_type(lowtri.plain.make_causal_mask(4), NDArray[np.float64])
assert_type(lowtri.__version__, str)

try:
    lowtri.attention(q, k, v, "causal")
except (lowtri.CallError, lowtri.MaskError, lowtri.EngineError) as error:
    assert_type(error.exit_code, int)
