"""Measures what a model's outputs depend on, and compares that with the mask that it declares.

audit         reads the arguments, measures the noise, runs the probes, reports
options       what probes read of the arguments, checked; the declared mask as a table of pairs
inputs        the example as (B, N, ...) arrays, and the call signature that turns them back into a call
example       reads the caller's example: which arrays are sequences, and which axes are batch and positions
adapter       the model adapter: inputs -> rows (B, N, F), with the same seed at every call
float64       the float64 copy of a model, in which leaks stay and rounding vanishes
noise         how far outputs move when nothing relevant changes, and what a difference between two answers means
context       what every probe is given
setup         redrawn weights, the ids to draw from, and the progress line
probe         a probe as data (name, needs, function), and the tally of its comparisons
probes        the probes, one file each, and their list
pads, leaves  inputs with padding; vectors to differentiate by
decoding      ways to decode step by step, with a cache
running       runs probes, and repeats doubtful ones on the float64 copy
conditions    runs probes under other conditions: training mode, a keyword, a longer example
locate        the first module whose output moved
finding       what a probe returns
report        the verdict: text, JSON, HTML
drawing       declared, seen and leaking pairs as text and as SVG
loading       a model from `FILE.py:make_model` or from a folder
plugin        pytest: the `lowtri_audit` fixture and the option `--lowtri-audit`
"""

from __future__ import annotations
