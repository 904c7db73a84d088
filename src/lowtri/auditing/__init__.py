"""Measures which inputs a model's outputs depend on, and compares this with the declared mask.

A *tested* maps inputs to rows. A *condition* is a value: a mode, a keyword, an attention implementation, a length. A *probe* is a
generator of cases (a run, the positions whose rows must agree with the example's, a sentence); one engine runs and compares them.

model_under_test the example as (B, N, ...) arrays, the call that they turn back into, and its rows (B, N, F), each from the same seed
torch_hooks   the float64 copy, leaves to differentiate, the first module at which two runs part, the masks of attention
context       the noise, the difference of two runs, and what probes work on: a model under a condition, its inputs, random inputs
probe         probes, and the engine that runs their cases, repeats doubts in float64 and names modules
probes        change, gradient, prefix, poison, sensitivity; batch, padding, packing
conditions    the conditions that are tried: other code paths, training mode, a longer example
caches        ways to decode with a cache, and what is kept between calls
audit         reads the arguments, runs the probes, reports; the list of probes
infer         which mask a model has: the simplest formula for a table of pairs, and the masks of its layers
report        the verdict: text, drawing, JSON, HTML
loading       a model from `FILE.py:make_model` or from a folder, and the mask that its config declares
plugin        pytest: the `lowtri_audit` fixture and the option `--lowtri-audit`
"""

from __future__ import annotations
