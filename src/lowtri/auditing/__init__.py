"""Measures which inputs a model's outputs depend on, and compares this with the declared mask.

A *system* maps inputs to rows. A *condition* is a value: a mode, a keyword, an attention implementation, a length. A *trial* is a
generator of cases (inputs, the positions whose rows must agree with the example's, a sentence); one engine runs and compares them.

inputs        the example as (B, N, ...) arrays, and the call signature that turns them back into a call
system        inputs -> rows (B, N, F), with the same seed in every call
torch_hooks   the float64 copy, leaves to differentiate, the first module at which two runs part, the masks of attention
finding       the noise, the difference of two runs, and the finding and the leaks made of it
context       the checked arguments, a condition, and what trials work on: a system under it, its inputs, random inputs
trial         cases and trials, and the engine that runs them, repeats doubts in float64 and names modules
content       trials of content and length: change, gradient, prefix, poison, sensitivity
rows          trials of other rows, packed documents and pads
conditions    the conditions that are tried: other code paths, training mode, a longer example
caches        ways to decode with a cache, and what is kept between calls
audit         reads the arguments, runs the trials, reports; the list of trials
infer         which mask a model has: the simplest formula for a table of pairs, and the masks of its layers
report        the verdict: text, drawing, JSON, HTML
loading       a model from `FILE.py:make_model` or from a folder, and the mask that its config declares
plugin        pytest: the `lowtri_audit` fixture and the option `--lowtri-audit`
"""

from __future__ import annotations
