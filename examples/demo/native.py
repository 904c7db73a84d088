"""Kernels without a compiler: the first call of a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys

from demo.context import Context, Result

__all__ = ["SENTENCE", "TITLE", "run"]

TITLE = "The first call of a fresh process"
SENTENCE = (
    "The kernels were compiled when lowtri was built. A new process loads them from one file; no compiler is imported."
)

_CODE = """
import json, sys, time
start = time.process_time()
import numpy as np
import lowtri
x = np.random.default_rng(0).standard_normal((3, 1, 4, 512, 64), np.float32)
imported = time.process_time()
result = lowtri.attention(*x, "causal & window(100)", engine="cpu")
done = time.process_time()
exact = lowtri.attention(*x.astype(np.float64), "causal & window(100)", engine="reference")
plain = lowtri.attention(*x, "causal & window(100)", engine="formula")
from lowtri.kernels import library, target
print(json.dumps({
    "import": imported - start, "call": done - imported, "isa": target.ISA.name, "reason": library.index().get("reason"),
    "error": float(abs(result - exact).max()), "plain": float(abs(plain - exact).max()),
    "compilers": sorted({"numba", "llvmlite"} & set(sys.modules)), "sets": library.index().get("isas", []),
}))
"""


def run(context: Context) -> Result:
    """Attention in a new process, with the modules that it imported."""
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-500:])
    seen = json.loads(done.stdout)
    result = Result(
        f"imports {seen['import']:.2f} s of CPU time, the first call of 4 heads of 512 tokens {seen['call']:.3f} s\n"
        f"instruction set {seen['isa']}, "
        + (f"compiled when it was called: {seen['reason']}" if seen["reason"] else f"of {', '.join(seen['sets'])}")
    )
    result.check("neither numba nor llvmlite is imported", not seen["compilers"])
    result.check(
        f"the result is off by {seen['error']:.1e}, the plain formula's by {seen['plain']:.1e}",
        seen["error"] <= 2 * seen["plain"] + 1e-6,
    )
    return result
