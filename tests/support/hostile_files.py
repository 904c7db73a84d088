"""Files that somebody else wrote, made here: a GGUF file with any fields, any bytes changed, and limits of time and memory."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from hypothesis import strategies as st

import lowtri
from lowtri.errors import LowtriError

SECONDS, BYTES = (
    20.0,
    2**30,
)  # far above what any of these takes when all is well, on a machine that does other work, too


@contextmanager
def bounded() -> Iterator[None]:
    """What runs within may take so long and so much memory; where a process can be limited, it is."""
    started, before = time.perf_counter(), None
    try:
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, before[1]))
    except (ImportError, OSError):
        pass
    try:
        yield
    finally:
        if before is not None:
            resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.perf_counter() - started < SECONDS


def works_or_refuses(load_it: Callable[[], tuple[Any, Any]]) -> None:
    with bounded():
        try:
            model, tokenizer = load_it()
            list(lowtri.generate(model, [1, 2], 2, stop=()))
            if tokenizer is not None:
                tokenizer.encode("a")
        except LowtriError as error:
            said = str(error)
        else:
            said = ""
    assert (len(said) < 1000 and said.replace("\n", " ").isprintable()) or not said, said[:200]


def flipped(content: bytes, data: st.DataObject) -> bytes:
    """The same bytes with some of them changed, cut off, or written twice."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        kind = data.draw(st.sampled_from(["byte", "length", "cut", "twice"]))
        if kind == "byte":
            changed[at] = data.draw(st.integers(0, 255))
        elif kind == "length":
            changed[at : at + 8] = struct.pack("<Q", data.draw(st.sampled_from([0, 1, 2**31, 2**32, 2**62, 2**64 - 1])))
        elif kind == "cut" and at > 8:
            del changed[at:]
        else:
            changed[at:at] = changed[at : at + data.draw(st.integers(1, 64))]
    return bytes(changed)


def gguf_file(path: Path, fields: dict[str, Any] | None = None) -> Path:
    """A model of one layer as a GGUF file, with a byte-level tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    own: dict[str, Any] = {
        "model": "gpt2",
        "tokens": ["a", "b", "ab", "<e>"],
        "merges": ["a b"],
        "token_type": [1, 1, 1, 3],
        "eos_token_id": 3,
    }
    for name, value in {**{f"tokenizer.ggml.{key}": one for key, one in own.items()}, **(fields or {})}.items():
        kinds = {list: writer.add_array, str: writer.add_string, int: writer.add_uint32}
        kinds[type(value)](name, value)
    shapes = {"token_embd": (4, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,)}
    shapes |= {"blk.0.attn_q": (8, 8), "blk.0.attn_k": (4, 8), "blk.0.attn_v": (4, 8), "blk.0.attn_output": (8, 8)}
    shapes |= {"blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8), "blk.0.ffn_down": (8, 16)}
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_with(path: Path, fields: dict[str, Any]) -> Path:
    """The same file with some of its fields replaced, which the package's own writer does not do."""
    theirs = gguf.GGUFReader(gguf_file(path.with_suffix(".good")))
    writer = gguf.GGUFWriter(path, "llama")
    old = {name: one.contents() for name, one in theirs.fields.items() if not name.startswith("GGUF.")}
    old.pop("general.architecture")
    for name, value in {**old, **fields}.items():
        kinds = {list: writer.add_array, str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        kinds[type(value)](name, value)
    for tensor in theirs.tensors:
        writer.add_tensor(tensor.name, np.asarray(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
