"""Mistakes that a type checker finds before anything runs. Under ``mypy --strict`` an ignore that is not needed is an error."""

import numpy as np
import torch

import lowtri

q = torch.randn(2, 4, 8)
a = np.zeros((2, 4, 8))

lowtri.attention(q, q, q)  # type: ignore[call-overload]
lowtri.attention(q, a, q, "causal")  # type: ignore[type-var]
lowtri.attention(q, q, q, torch.ones(4, 4))  # type: ignore[call-overload]
lowtri.attention(q, q, q, "causal", scales=0.5)  # type: ignore[call-overload]
lowtri.atention(q, q, q, "causal")  # type: ignore[attr-defined]
weights, lse, output, more = lowtri.attention(q, q, q, "causal", return_weights=True, return_lse=True)  # type: ignore[misc]
lowtri.window("four")  # type: ignore[arg-type]
