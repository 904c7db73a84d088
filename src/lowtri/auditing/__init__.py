"""Measures which inputs a model's outputs depend on, and compares this with the declared mask.

The *model under test* maps inputs to rows. A *probe* is a generator of pairs of runs (a run, the positions whose rows must agree
with the example's, a sentence); a *condition* is what probes run under. Every probe runs under every condition that is of use to
it, and one engine runs and compares the pairs.

adapter           `Model`: what a caller says about a model; what the arguments of `audit` and `infer_mask` must be
example           the example as (B, N, ...) arrays, and the call that they turn back into
restoring         what a model keeps, and how it is put back
model_under_test  a call, and its rows (B, N, F), each from the same seed
declared          the declared mask: pairs, pads, documents
torch_hooks       the float64 copy, leaves to differentiate, the first module at which two runs differ, the masks of attention
context           the noise, the difference of two runs, and what probes work on: a model under a condition, random inputs
probe             probes, and the engine that runs their pairs, repeats doubts in float64 and names modules
probes            change, gradient, prefix, poison, sensitivity
pads              padding, and the pads of an encoder-decoder's source
reading           the example as probes see it, read off the arguments and the model; a longer one
neighbours        batch, packing, and the state that calls leave behind
caches            ways to decode with a cache
conditions        other code paths, training mode, a longer example, the compiler
infer             which mask a model has: the simplest formula for a table of pairs, and the masks of its layers
audit             reads the arguments, runs the probes under the conditions, reports; the list of probes
report            the verdict: text, drawing, JSON, HTML
loading           a model from `FILE.py:make_model` or from a folder, and the mask that its config declares
plugin            pytest: the `lowtri_audit` fixture and the option `--lowtri-audit`
"""

from __future__ import annotations
