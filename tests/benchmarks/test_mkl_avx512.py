"""The other process, in which torch's MKL uses AVX-512."""

from __future__ import annotations

import json
from dataclasses import asdict
from io import StringIO

import torch

import mkl_avx512
from presets import PresetCall

SMALL = PresetCall("forward", "causal", 40, 32, "float32", heads=2, kv_heads=2, label="causal")


def test_the_other_process_answers_line_by_line() -> None:
    fields = asdict(SMALL)
    long = {**fields, "mask": "window(256)", "label": "window", "n": 65_536}
    questions = [{"case": fields}, {"run": True}, {"case": long}]
    answers = StringIO()
    before = torch.get_num_threads()
    try:
        mkl_avx512.serve(1, StringIO("\n".join(json.dumps(one) for one in questions)), answers)
    finally:
        torch.set_num_threads(before)
    ready, timed, refused = (json.loads(line) for line in answers.getvalue().splitlines())
    assert ready == {"ready": True} and timed["seconds"] > 0 and "million pairs" in refused["why_not"]
