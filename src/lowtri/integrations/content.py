"""What a tensor holds, to compare it with what another one held: what is kept of a user's tensors is kept by it.

torch counts the changes in place that it makes itself. It does not see those through NumPy, ``.data`` or shared memory, so neither the
counter nor the identity of a tensor says that its numbers are those of an earlier call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

from lowtri.masks.arrays import is_traced

_FEW_BYTES = 1024  # they are compared in less time than a digest takes


def content_of(x: Tensor | None) -> Hashable | None:
    """What a tensor holds: dtype, shape, and its bytes or a digest of them. None for no tensor, and where no numbers can be read now.

    >>> x = torch.zeros(2)
    >>> before = content_of(x)
    >>> x.numpy()[0] = 1
    >>> content_of(x) == before, content_of(torch.tensor([1.0, 0.0])) == content_of(x)
    (False, True)
    """
    if x is None or is_traced(x):
        return None
    try:
        plain = x.detach().cpu() if x.requires_grad or not x.is_cpu else x
        if plain.dtype == torch.bool:
            content = np.packbits(plain.numpy()).tobytes()
        elif plain.dtype == torch.bfloat16:  # which NumPy lacks
            content = plain.contiguous().view(torch.int16).numpy().tobytes()
        else:
            content = plain.numpy().tobytes()
    except (RuntimeError, TypeError):  # inside a transform of torch, or of a dtype that NumPy lacks
        return None
    return x.dtype, tuple(x.shape), content if len(content) <= _FEW_BYTES else hashlib.sha256(content).digest()
