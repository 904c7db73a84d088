"""The benchmark over the model types of transformers, run on some of each kind; the table beside it has them all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "transformers_models.py"
KINDS = {
    "pictures": ("beit", "clip_vision_model", "dinov2", "vit"),
    "sounds": ("wav2vec2", "whisper", "nemotron_asr_streaming"),
    "text beside pictures": ("paligemma", "qwen3_vl", "gemma3"),
    "encoders": ("bert", "esm", "modernbert"),
    "encoder and decoder": ("bart", "mbart", "t5", "umt5", "t5gemma2"),
    "windows, chunks, sinks, capped scores": ("cohere2", "gemma2", "gpt_oss", "llama4_text", "mistral"),
    "keys chosen by an indexer": ("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text"),
    "numbers beside the mask": ("deepseek_v4",),
    "attention among other layers": ("bamba", "jamba", "qwen3_next"),
}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_model_types(kind: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        "--limit",
        "300",
        "--out",
        str(tmp_path / "table.md"),
        "--only",
        *KINDS[kind],
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {one["type"]: one for one in json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))}
    assert sorted(found) == sorted(KINDS[kind]), ended.stdout
    assert {name: one["verdict"] for name, one in found.items()} == dict.fromkeys(found, "equal"), found
    assert all(one["calls"] for one in found.values())
    assert f"equal {len(found)}; {len(found)} types" in (tmp_path / "table.md").read_text(encoding="utf-8")
