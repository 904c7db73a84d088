"""Measures which inputs a model's outputs depend on, and compares this with the declared mask.

audit         reads the arguments, measures the noise, runs the probes, reports
options       the checked arguments that probes read; the declared mask as a table of pairs
inputs        the example as (B, N, ...) arrays, and the call signature that turns them back into a call
example       reads the caller's example: which arrays are sequences, and which axes are batch and positions
adapter       the model adapter: inputs -> rows (B, N, F), with the same seed in every call
float64       the float64 copy of a model, in which leaks remain and rounding noise vanishes
noise         how far outputs move when nothing relevant changes; classifies the difference of two outputs
context       the state that every probe receives
setup         redrawn weights, the ids to draw from, and the progress line
probe         a probe as data (name, needs, function), and the tally of its comparisons
probes        the probes, one file each, and their list
pads, leaves  inputs with padding; vectors to differentiate with respect to
decoding      ways to decode step by step, with a cache
running       runs probes, and repeats doubtful ones on the float64 copy
conditions    runs probes under other conditions: training mode, a keyword, a longer example
locate        the first module whose output moved
finding       the result of a probe
report        the verdict: text, JSON, HTML
drawing       declared, seen and leaking pairs as text and as SVG
loading       a model from `FILE.py:make_model` or from a folder
plugin        pytest: the `lowtri_audit` fixture and the option `--lowtri-audit`
"""

from __future__ import annotations
