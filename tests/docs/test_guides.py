"""The README and the pages of the site: every block of Python runs, from top to bottom, and prints what the page shows."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from model_files import gguf_file

import lowtri

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```\n((?:\n(?: {4}[^\n]*\n)+)?)", re.S | re.M)
ELSEWHERE = {"from-a-notebook.md"}  # its own tests run its blocks
README = "../README.md"
ALONE = {README, "start.md"}  # a block needs nothing of the blocks above it


def blocks(page: str) -> list[tuple[str, str]]:
    """Each block of code, and what the indented lines below it show."""
    return BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))


PAGES = [README] + [
    page
    for path in sorted(DOCS.rglob("*.md"))
    if blocks(page := path.relative_to(DOCS).as_posix()) and page not in ELSEWHERE
]
LONG = {"audit.md", "api/integrations.md"}  # whole audits; kernels that nothing else compiles


@pytest.fixture
def given(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What a page takes for granted: the reader's own model and ids; the address that torchrun sets."""
    page = request.node.callspec.params["page"]
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    if page == "api/index.md":
        names = {"lowtri": lowtri, **dict(zip("qkv", torch.randn(3, 2, 4, 8), strict=True))}
    if page == "models.md":  # a tiny file in the place of weights of 93 MB
        file = gguf_file(tmp_path / "smollm2.gguf")
        monkeypatch.setattr("lowtri.pretrained._packaged", lambda: file)
    if page == "audit.md":
        import transformers

        t5 = transformers.T5Config(vocab_size=1000, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        names = {"transformers": transformers, "source": torch.randint(2, 99, (2, 9))}
        names |= {"t5": transformers.T5ForConditionalGeneration(t5).eval(), "call": lambda ids: ids}
        names |= {"step": lambda state, x: (x, state), "prefill": lambda x: (x, None)}
    if page in ("audit.md", "parallel.md"):
        mask = "causal & window(16)" if page == "audit.md" else "causal & window(4096)"
        config = lowtri.nn.DecoderConfig(
            vocab_size=1000, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mask=mask
        )
        names |= {"model": lowtri.nn.Decoder(config).eval(), "ids": torch.randint(2, 99, (2, 32)), "n": 32}
    if page == "api/integrations.md":
        for name in ("flash_attn", "flash_attn.bert_padding"):  # what the page installs
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
            monkeypatch.delitem(sys.modules, name)
    if page == "parallel.md":
        import transformers

        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        mistral = transformers.MistralConfig(vocab_size=1000, sliding_window=4096, **sizes, **heads)
        names |= {"mistral": transformers.MistralForCausalLM(mistral), "targets": torch.randint(2, 99, (2, 32))}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}.items():
            monkeypatch.setenv(name, str(value))
    yield names
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.sweep] * (page in LONG)) for page in PAGES])
def test_every_block_runs(
    page: str,
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for code, shown in blocks(page):
        capsys.readouterr()
        exec(compile(code, f"docs/{page}", "exec"), {} if page in ALONE else given)
        printed = capsys.readouterr().out
        if shown and not re.match(r"\s*(lowtri|pytest) ", shown):  # else commands, or what the block printed
            assert printed.split() == shown.split(), code
        assert printed or page != "start.md"


def test_the_guides_are_there() -> None:
    assert {"masks.md", "cache.md", "audit.md", "libraries.md", "fast.md", "parallel.md"} <= set(PAGES)
    assert len(blocks("start.md")) == 4 == (DOCS / "start.md").read_text(encoding="utf-8").count("\n## ")


def test_the_plan_that_the_page_shows() -> None:
    shown = re.search(r"```text\n(causal & window\(200\).*?)```", (DOCS / "parallel.md").read_text("utf-8"), re.S)
    assert shown is not None
    assert shown[1].strip() == str(lowtri.parallel.plan_shards("causal & window(200)", 1024, 4)).strip()
