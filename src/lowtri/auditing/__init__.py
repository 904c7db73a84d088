"""Does a model peek? Measure what its outputs depend on, and hold that against the mask it declares.

audit         the whole audit in one page: noise first, then every probe, then where
asking        the caller's arguments, checked before anything runs and held against what did run
inputs        the caller's example as (B, N, ...) arrays, and back into a call
adapter       a model that can be run: inputs -> rows (B, N, F), seeded alike at every call
double        its float64 copy, where leaks stay and rounding vanishes
noise         how far outputs move when nothing that matters changes
context       what every probe is given
preparing     redrawn weights, the ids to draw from, and the line of progress
probes        one file a probe: change, gradient, prefix, poison, batch, padding, packing, cache, doors, training, longer, blindness
conditions    the same probes in training mode, behind a keyword, on a longer example
where         the first module whose output moved
finding       what a probe returns
report        the verdict: text, JSON
picture       declared, seen and leaking pairs, drawn as text
page          the report as HTML, and its drawing as SVG
loading       a model from `FILE.py:make_model` or from a folder
plugin        pytest: the `lowtri_audit` fixture, and `--lowtri-audit`, whose audits are collected as tests
"""

from __future__ import annotations
