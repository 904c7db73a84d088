"""What a tensor holds, as a digest: what is kept of a user's tensors is kept by it.

torch counts the changes in place that it makes itself. It does not see those through NumPy, ``.data`` or shared memory, so neither the
counter nor the identity of a tensor says that its numbers are those of an earlier call.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from lowtri.masks.arrays import is_traced


def content_of(x: Tensor | None) -> str | None:
    """A digest of dtype, shape and numbers; None for no tensor, and for one whose numbers cannot be read now.

    >>> x = torch.zeros(2)
    >>> before = content_of(x)
    >>> x.numpy()[0] = 1
    >>> content_of(x) == before, content_of(torch.tensor([1.0, 0.0])) == content_of(x)
    (False, True)
    """
    if x is None or is_traced(x):
        return None
    try:
        flat = x.detach().cpu().contiguous().reshape(-1)
        numbers = np.packbits(flat.numpy()) if x.dtype == torch.bool else flat.view(torch.uint8).numpy()
    except (RuntimeError, TypeError):  # inside a transform of torch
        return None
    return hashlib.sha256(f"{x.dtype}{tuple(x.shape)}".encode() + numbers.tobytes()).hexdigest()
