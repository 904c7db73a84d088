"""Private functions of torch, Numba and transformers: all that lowtri uses of them, under plain names, one file per library.

torch_private         torch 2.6 and 2.13
torch_marks           marks that torch reads from our functions; does not load torch
numba_private         Numba 0.62 and 0.68
transformers_private  transformers 5.4 and 5.23

The versions are those that the tests run with. Private functions change without notice, so each has a comment: what it does, and why
no public function will do. ``tests/compat`` finds private names in other packages. Where a version lacks a function, what needs it
gives way to something slower, or raises an EngineError that names the function.
"""

from __future__ import annotations

__all__: list[str] = []
