"""GGUF files are untrusted: any bytes load or give one error, in bounded time and memory."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostile_files import bounded, flipped, gguf_file, gguf_with, works_or_refuses
from lowtri.errors import DataError
from lowtri.nn.checkpoint import load
from lowtri.nn.gguf import converted, read_header


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTRI_CACHE", str(tmp_path / "cache"))


def header(fields: bytes, n_fields: int, tensors: bytes = b"", n_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_fields) + fields + tensors


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


BLOCKS = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (header(text("a") + struct.pack("<IIQ", 9, 0, 2**62), 1), "its arrays announce .* items, where at most"),
        (header(text("a") + struct.pack("<IIQ", 9, 0, 2**22), 1), "4194304 bytes are announced at byte 49, 0 are left"),
        (
            header(text("a") + struct.pack("<IIQ", 9, 9, 1), 1),
            "items of the type 9, which are neither numbers nor texts",
        ),
        (header(text("a") + struct.pack("<I", 99), 1), "a field has the type 99, which does not exist"),
        (header(struct.pack("<Q", 2**63), 1), "9223372036854775808 bytes are announced"),
        (header((text("a") + struct.pack("<IB", 0, 1)) * 2, 2), "a occurs twice in it"),
        (header(b"", 2**40), "announces 1099511627776 fields"),
        (header(b"", 0, b"", 2**40), "announces 1099511627776 tensors"),
        (header(b"", 0, text("a") + struct.pack("<I", 2**31), 1), "the tensor a has 2147483648 dimensions"),
        (
            header(b"", 0, entry("a", (2**32, 2**32), 0, 0), 1) + bytes(99),
            "the tensor a ends at byte 7378697629483820\\d+, the file at",
        ),
        (header(b"", 0, entry("a", (0, 2**60), 0, 0), 1), r"the tensor a is \(1152921504606846976, 0\)"),
        (
            header(b"", 0, entry("a", (33,), 2, 0), 1),
            r"the tensor a is \(33,\), which is not a whole number of blocks of 32",
        ),
        (header(b"", 0, entry("a", (8,), 99, 0), 1), "the tensor a has the type 99, which does not exist"),
        (header(b"", 0, entry("a", (8,), 0, 0) + entry("b", (8,), 0, 4), 2) + bytes(99), "the tensors a and b overlap"),
        (
            header(text("general.alignment") + struct.pack("<II", 4, 0), 1),
            "general.alignment is 0, which is not a power of two",
        ),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "its version is 50331648, where 2 and 3 are read"),
        (b"GGUF", "4 bytes are announced at byte 4, 0 are left"),
    ],
)
def test_a_header_that_announces_too_much_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with bounded(), pytest.raises(DataError, match=words):
        converted(tmp_path / "m.gguf")
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_the_header_agrees_with_the_reader_of_gguf(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", {"general.name": "naïve", "tokenizer.ggml.scores": [0.5, -1.0, 2.0, 0.0]})
    theirs = gguf.GGUFReader(path)
    content = path.read_bytes()
    ours = read_header(content, BLOCKS)
    fields = {name: one.contents() for name, one in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.fields == fields
    assert [*ours.tensors] == [one.name for one in theirs.tensors]
    for one in theirs.tensors:
        mine = ours.tensors[one.name]
        assert mine.shape == tuple(one.shape.tolist()[::-1])
        assert np.array_equal(mine.blocks(content).view(np.float32), one.data)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokenizer.ggml.merges": ["a z"]}, "its tokenizer is damaged: "),
        ({"tokenizer.ggml.merges": ["a"]}, "its tokenizer is damaged: "),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens is not a list of texts"),
        ({"tokenizer.ggml.tokens": "ab"}, "tokenizer.ggml.tokens is not a list of texts"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores has no score for each of the 4 tokens"),
        ({"tokenizer.ggml.tokens": ["a" * 2**20, "b"]}, "tokenizer.ggml.tokens has texts of up to 1048576 characters"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id 'x'"),
        ({"llama.block_count": 9_000}, "do not fit together: num_hidden_layers is 9000"),
        ({"llama.embedding_length": 2**31}, "do not fit together: hidden_size is 2147483648"),
        ({"llama.context_length": "x"}, "llama.context_length 'x'; expected a whole number"),
        ({"llama.attention.head_count": [2]}, r"llama.attention.head_count \[2\]; expected a whole number"),
        ({"llama.attention.head_count": 0}, "m.gguf does not describe a decoder: "),
        ({"llama.attention.sliding_window": "5) | full("}, "sliding_window '5.*'; expected a whole number"),
        ({"llama.rope.freq_base": "x"}, "m.gguf does not describe a decoder: .*rope_theta is 'x'"),
        ({"tokenizer.chat_template": 3}, "m.gguf is damaged or cut off: TypeError"),
    ],
)
def test_invalid_fields_are_refused(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = (
        gguf_file(tmp_path / "m.gguf", fields)
        if "tokenizer.chat_template" in fields
        else gguf_with(tmp_path / "m.gguf", fields)
    )
    with bounded(), pytest.raises(DataError, match=words):
        converted(path)


@pytest.mark.sweep
@settings(max_examples=800, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_bytes_in_a_gguf_file(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("m")
    whole = gguf_file(folder / "good.gguf").read_bytes()
    head = data.draw(st.sampled_from([900, 1500, len(whole)]))  # mostly the header: there the numbers mean something
    (folder / "m.gguf").write_bytes(flipped(whole[:head], data) + whole[head:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWTRI_CACHE", str(folder / "cache"))
        works_or_refuses(lambda: load(converted(folder / "m.gguf")))


@pytest.mark.sweep
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_field_in_a_gguf_file(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("m")
    names = [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
    ]
    names += [
        "attention.key_length",
        "attention.sliding_window",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
    ]
    own = [
        f"tokenizer.ggml.{key}"
        for key in ("model", "pre", "tokens", "merges", "scores", "token_type", "bos_token_id", "eos_token_id")
    ]
    values = [
        0,
        1,
        2,
        3,
        8,
        2**31,
        "",
        "x",
        "llama",
        "gpt2",
        "linear",
        [""],
        ["a"],
        ["a", "a", "b"],
        [0, 1],
        [1.5],
        0.5,
        ["a b"],
        "5) | full(",
    ]
    keys = st.sampled_from([f"llama.{name}" for name in names] + own + ["tokenizer.chat_template"])
    changes = data.draw(st.dictionaries(keys, st.sampled_from(values), min_size=1, max_size=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWTRI_CACHE", str(folder / "cache"))
        works_or_refuses(lambda: load(converted(gguf_with(folder / "m.gguf", changes))))
