"""The presets: every kind once, decoding from memory, and names by which calls are chosen; and every program's --help."""

from __future__ import annotations

import json
import math

import pytest

import attention
import presets
from lowtri.benching import OURS, SDPA, measure, sdpa
from lowtri.errors import DataError
from presets import BYTES, SHORT, TABLE, PresetCall, choose

DECODE = PresetCall("decode", "causal", 512, 64, "float32", heads=4, kv_heads=2, label="causal")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that rotate within a megabyte."""
    monkeypatch.setattr(presets, "last_cache_bytes", lambda: 2**18)


def test_the_table_has_every_kind_once() -> None:
    names = [call.name for call in TABLE]
    assert len(names) == len(set(names))
    assert {call.work for call in TABLE} == {"forward", "training", "decode"}
    assert {call.label for call in TABLE} == {"causal", "full", "window", "documents"}
    assert {call.dtype for call in TABLE} == set(BYTES)
    assert {call.d for call in TABLE} == {64, 128}
    assert {call.n for call in TABLE if call.label == "window"} >= {512, 4096, 65_536}
    assert len(SHORT) == 9 and choose() == SHORT and choose(full=True) == TABLE


def test_a_filter_takes_whole_words_and_any_of_several() -> None:
    assert {call.work for call in choose(words=["DECODE"])} == {"decode"}
    both = choose(words=["window 512 bf16", "decode float32"])
    assert [call.name for call in both] == ["forward window 512 D64 bf16", "decode causal 4096 D128 float32"]
    with pytest.raises(
        DataError, match=r"no case is named by --case 'windows'\. Did you mean 'window'\? Fix: words of"
    ):
        choose(words=["windows"])
    with pytest.raises(DataError, match=r"no case is named by --case 'decode window'\. Fix: words of f"):
        choose(words=["decode window"])
    with pytest.raises(DataError, match=r"no case is named by --case ''\. Fix: words of f"):
        choose(words=[""])


def test_decoding_is_counted_in_bytes_and_reads_another_cache_each_time() -> None:
    assert DECODE.unit == "GB/s" and DECODE.amount == 2 * 2 * 512 * 64 * 4 / 1e9
    tensors = DECODE.tensors()
    count = math.ceil(4 * 2**18 / DECODE.cache_bytes)
    places = [tensors.next_kv()[0].data_ptr() for _ in range(2 * count)]
    assert count > 1 and len(set(places)) == count and places[:count] == places[count:]
    assert tensors.q.shape == (1, 4, 1, 64)
    (row,) = measure([DECODE], {SDPA: sdpa})
    assert row.ceiling > 0
    assert row.figures[OURS].rate == DECODE.amount / row.figures[OURS].seconds and row.figures[SDPA].why_not is None


def test_the_table_as_a_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(presets, "TABLE", [DECODE])
    attention.main(["--case", "decode", "--json"])
    out, err = capsys.readouterr()
    (row,) = json.loads(out)["rows"]
    assert row["case"] == DECODE.name and set(row["figures"]) == {OURS, *attention.PEERS}
    assert f"1/1  {DECODE.name}" in err
    attention.main(["--full", "--list"])
    assert capsys.readouterr().out == f"{DECODE.name}\n"
