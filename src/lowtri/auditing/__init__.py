"""Measures which inputs a model's outputs depend on, and compares this with the declared mask.

A *system* maps inputs to rows. A *condition* is a value: a mode, a keyword, an attention implementation, a length. A *trial* is a
generator of cases (inputs, the positions whose rows must agree with the example's, a sentence); one engine runs and compares them.

audit         reads the arguments, runs the trials, reports; the list of trials
options       the checked arguments; the declared mask as a table of pairs; the ids to draw from
inputs        the example as (B, N, ...) arrays, and the call signature that turns them back into a call
example       reads the caller's example: which arrays are sequences, and which axes are batch and positions
system        inputs -> rows (B, N, F), with the same seed in every call
torch_hooks   the float64 copy, leaves to differentiate, and the first module at which two runs part
finding       the noise, the difference of two runs, and the finding and the leaks made of it
context       a condition, and what trials work on: a system under it, its inputs, its noise, random inputs
trial         cases and trials, and the engine that runs them
running       repeats doubts in float64, names modules, runs trials under other conditions
content       trials of content and length: change, prefix, poison, sensitivity
gradient      the trial that differentiates
rows, pads    trials of other rows, packed documents and pads
decoding      ways to decode, with a cache; `caches` is their trial, `state` that of what is kept between calls
conditions    the conditions that are tried: other code paths, training mode; `longer`, a longer example
infer         which mask a model has; `fitting`, the simplest formula for a table; `attentions`, the masks of its layers
report        the verdict: text, JSON, HTML; `drawing`, the pairs as text and as SVG
loading       a model from `FILE.py:make_model` or from a folder
plugin        pytest: the `lowtri_audit` fixture and the option `--lowtri-audit`
"""

from __future__ import annotations
