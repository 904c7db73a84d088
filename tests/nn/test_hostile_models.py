"""A model's files are untrusted: any content loads or gives one error, in bounded time and memory."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import lowtri
from hostile_files import bounded, flipped, works_or_refuses
from lowtri.errors import CallError, DataError, LowtriError
from lowtri.nn import Decoder, DecoderConfig, RecurrentLM
from lowtri.nn.chat import chat_text
from lowtri.nn.checkpoint import load, save
from lowtri.training.corpus import learn

HELLO = [{"role": "user", "content": "hello"}]


def small(**options: Any) -> Decoder:
    torch.manual_seed(0)
    sizes = {"vocab_size": 270, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return Decoder(DecoderConfig(**{**sizes, "intermediate_size": 24, "max_position_embeddings": 32, **options}))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return learn(["the cat sat on the mat"] * 3, 270)


@pytest.fixture
def folder(tokenizer: Any, tmp_path: Path) -> Path:
    save(small(), tmp_path / "m", tokenizer)
    return tmp_path / "m"


def change(folder: Path, name: str = "config.json", **values: Any) -> None:
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **values}))


def read_all(folder: Path) -> None:
    load(folder)
    chat_text(folder, HELLO)


def refused(folder: Path, words: str) -> None:
    with bounded(), pytest.raises(DataError, match=words) as caught:
        load(folder)
    assert len(str(caught.value)) < 1000 and str(folder) in str(caught.value)


# config.json

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_hidden_layers": 100_000}, "num_hidden_layers 100000; at most 10000 are read"),
        (
            {"num_hidden_layers": 9_999},
            "do not fit together: num_hidden_layers is 9999,\n  and the weights are 21 tensors",
        ),
        ({"vocab_size": 10**30}, "do not fit together: vocab_size is 1000000"),
        ({"intermediate_size": 10**18}, "do not fit together: intermediate_size is"),
        ({"head_dim": 2**62}, "do not fit together: head_dim is"),
        ({"eos_token_id": "x"}, "eos_token_id 'x'; expected an id, or a list of ids"),
        ({"eos_token_id": [[1]]}, r"eos_token_id \[\[1\]\]"),
        ({"eos_token_id": True}, "eos_token_id True"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; it is True or False"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'; it is a number"),
        ({"rope_theta": 10**400}, "rope_theta is 1000.*; it is a number"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 10**30}},
            "factor is 1000.*\nFix: factor and original from 1 to",
        ),
        ({"rope_parameters": 3}, "does not describe a decoder: "),
        ({"rope_scaling": {"rope_type": "llama3", "factor": {}}}, "does not describe a decoder: "),
        ({"hidden_act": ["x" * 10**6]}, r"hidden_act \['xxx.*; lowtri's Decoder has 'silu' or 'swish' only"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "does not describe a decoder: "),
        (
            {
                "model_type": "qwen2",
                "lowtri_mask": None,
                "num_hidden_layers": 10**10,
                "use_sliding_window": True,
                "sliding_window": 4,
            },
            "num_hidden_layers 10000000000; at most",
        ),
    ],
)
def test_a_config_with_impossible_values_is_refused(values: dict[str, Any], words: str, folder: Path) -> None:
    change(folder, **values)
    refused(folder, words)


@pytest.mark.parametrize("values", [{"rope_theta": 10**30}, {"rms_norm_eps": 10**30}], ids=str)
def test_a_large_whole_number_is_a_float(values: dict[str, int], folder: Path) -> None:
    change(folder, **values)
    Decoder.from_pretrained(folder)(torch.tensor([[2, 3]]))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [DEEP, "[]", "3", "\xff", "{", '{"a": ' + "9" * 10_000 + "}", " " * (2**24 + 1)])
def test_files_without_a_json_object_are_refused(name: str, content: str, folder: Path) -> None:
    (folder / name).write_text(content, encoding="latin-1")
    with bounded(), pytest.raises(DataError, match=name):
        read_all(folder)


def test_the_sizes_of_a_recurrent_model_are_checked_before_it_is_built(tmp_path: Path) -> None:
    save(RecurrentLM(20, 8), tmp_path)
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        before = (tmp_path / "config.json").read_text()
        change(tmp_path, **{name: 10**6})
        refused(tmp_path, f"do not fit together: {name} is 1000000")
        (tmp_path / "config.json").write_text(before)
    change(tmp_path, cell=["lstm"])
    refused(tmp_path, "cell is")


def test_a_recurrent_model_is_saved_and_loaded(tmp_path: Path) -> None:
    for tied in (False, True):
        torch.manual_seed(0)
        model = RecurrentLM(20, 8, tie_word_embeddings=tied).eval()
        save(model, tmp_path)
        back, ids = load(tmp_path)[0], torch.arange(12)[None]
        assert torch.equal(back(ids), model(ids)) and not back.training
        assert (back.lm_head.weight is back.embed_tokens.weight) is tied


# The mask that a file declares


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"lowtri_mask": "causal & documents(lengths=[4611686018427387904, 4611686018427387904])"},
            "lowtri_mask names documents",
        ),
        (
            {"lowtri_mask": "keys(lengths=[3])"},
            "lowtri_mask names keys, which describes one text.*\nFix: give the mask yourself",
        ),
        ({"lowtri_mask": "a" * 65_536}, "lowtri_mask: got 65536 characters; .* of at most 4096 characters"),
        ({"lowtri_mask": "~" * 4_000 + "causal"}, "does not describe a decoder: mask: "),
        ({"lowtri_mask": ["causal"]}, r"lowtri_mask: got \['causal'\]; expected a mask as text"),
        ({"lowtri_mask": 0}, "lowtri_mask: got 0"),
        ({"lowtri_mask": ""}, "does not describe a decoder: mask: "),
        (
            {"model_type": "mistral", "lowtri_mask": None, "sliding_window": "1) | full("},
            "sliding_window '1.*'; expected a whole",
        ),
        (
            {"model_type": "mistral", "lowtri_mask": None, "sliding_window": -1},
            "does not describe a decoder: window: n is -1",
        ),
    ],
)
def test_a_file_may_declare_masks_of_positions_only(values: dict[str, Any], words: str, folder: Path) -> None:
    change(folder, **values)
    refused(folder, words)


def test_keys_unknown_to_config_json_set_no_field(folder: Path) -> None:
    change(folder, mask="full", qkv_bias=True, rope_layers=[False, False], qk_norm=True, o_bias=True)
    config = load(folder)[0].config
    assert config == DecoderConfig(**{**vars(small().config), "eos_token_id": (1,)})


def test_the_user_may_set_any_mask(folder: Path) -> None:
    change(folder, lowtri_mask="causal & documents(lengths=[2, 3])")
    for mask in ("causal & documents(lengths=[2, 3])", lowtri.causal() & lowtri.window(2)):
        model, ids = Decoder.from_pretrained(folder, mask=mask), torch.arange(5)[None]
        assert model.mask == lowtri.mask(mask)
        with torch.no_grad():
            assert torch.equal(model(ids), small()(ids, mask=mask))
            assert not torch.allclose(model(ids), small()(ids))
    with pytest.raises(lowtri.MaskError, match="causl"):
        Decoder.from_pretrained(folder, mask="causl")


def test_config_and_mask_of_a_model_are_set_once(folder: Path) -> None:
    from dataclasses import replace

    model, recurrent = Decoder.from_pretrained(folder), RecurrentLM(9, 8)
    with pytest.raises(
        CallError, match=r"Decoder: config is what the model was built from.*\nFix: Decoder\(config\), or from_pre"
    ):
        model.config = replace(model.config, mask="full")
    with pytest.raises(
        CallError, match=r"Decoder: mask is what .*\nFix: from_pretrained\(path, mask=\.\.\.\), or mask= in the call"
    ):
        model.mask = lowtri.full()
    with pytest.raises(CallError, match=r"RecurrentLM: config is what .*\nFix: RecurrentLM\.from_config"):
        recurrent.config = replace(recurrent.config, hidden_size=4)


# Links


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    ],
)
def test_links_that_leave_the_folder_are_refused(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).touch()
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(DataError, match=rf"{name} is a link to .*outside, outside of its folder\.\nFix: a copy"):
        read_all(folder)


def test_linked_folders_and_dangling_links_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (folder / "model.safetensors").rename(tmp_path / "elsewhere" / "all.safetensors")
    (folder / "parts").symlink_to(tmp_path / "elsewhere")
    change(folder, "model.safetensors.index.json", weight_map={"a": "parts/all.safetensors"})
    refused(folder, "outside of its folder")
    for target in ("nothing", "model.safetensors"):
        (folder / "model.safetensors").symlink_to(target)
        refused(folder, "model.safetensors is a dangling link, or one of a circle of links")
        (folder / "model.safetensors").unlink()


def test_files_that_are_not_regular_are_refused(folder: Path) -> None:
    for make in (os.mkfifo, os.mkdir):
        (folder / "config.json").unlink()
        make(folder / "config.json")
        refused(folder, "config.json is not a regular file")
        (folder / "config.json").rmdir() if make is os.mkdir else None


def test_links_within_the_folder_and_the_hub_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").rename(folder / "real.json")
    (folder / "config.json").symlink_to("real.json")
    snapshot, blobs = tmp_path / "models--a" / "snapshots" / "1f", tmp_path / "models--a" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(folder.iterdir()):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", str(number)))
    for place in (folder, snapshot):
        assert load(place)[0].config.vocab_size == 270
    blobs.rename(tmp_path / "away")
    blobs.symlink_to(tmp_path / "away")
    refused(snapshot, "outside of its folder")


# Weights


def test_weights_of_other_dtypes_or_shapes_are_refused(folder: Path, tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.ones(2, 2, dtype=torch.int8)}, folder / "model.safetensors")
    refused(folder, "the weight lm_head.weight is torch.int8, expected floats")
    sizes = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    change(tmp_path, **sizes)
    for shape in ((), (8,), (4, 2), (2, 2, 6), (8, 24)):
        save_file(
            {"h.0.attn.c_attn.weight": torch.ones(shape), "wte.weight": torch.ones(9, 8)},
            tmp_path / "model.safetensors",
        )
        refused(tmp_path, "do not fit together")


# Tokenizers


def tokenizer_json(**parts: Any) -> str:
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    return json.dumps({"version": "1.0", "added_tokens": [], **nothing, "model": model, **parts})


def replacing(times: int, content: str = "aa") -> dict[str, Any]:
    one = {"type": "Replace", "pattern": {"String": "a"}, "content": content}
    return {"type": "Sequence", "normalizers": [one] * times}


@pytest.mark.parametrize(
    "parts",
    [
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a z"]}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "q", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"decoder": {"type": "Strip", "content": "a", "start": 10**6, "stop": 10**6}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"normalizer": replacing(30)},
        {"normalizer": replacing(2, "b" * 1000)},
        {"decoder": {"type": "Sequence", "decoders": replacing(30)["normalizers"]}},
    ],
)
def test_tokenizers_that_panic_or_expand_texts_are_refused(parts: dict[str, Any], folder: Path) -> None:
    (folder / "tokenizer.json").write_text(tokenizer_json(**parts))
    refused(folder, "tokenizer.json is not a tokenizer: ")


def test_control_characters_of_a_file_do_not_reach_the_terminal(folder: Path) -> None:
    for template in ("{{ raise_exception('\x1b[31m' ~ 'a' * 100000) }}", "\x1b[2J{% for %}"):
        (folder / "chat_template.jinja").write_text(template)
        with pytest.raises(DataError) as caught:
            chat_text(folder, HELLO)
        assert len(str(caught.value)) < 1000 and "\x1b" not in str(caught.value)
    change(folder, lowtri_mask="\x1b[31m")
    with pytest.raises(DataError) as caught:
        load(folder)
    assert "\x1b" not in str(caught.value)


def test_truncation_and_padding_of_a_tokenizer_are_disabled(folder: Path) -> None:
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5}
    pad = {
        "strategy": {"Fixed": 10**12},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    (folder / "tokenizer.json").write_text(tokenizer_json(truncation=cut, padding=pad))
    with bounded():
        found = load(folder)[1]
        assert found is not None and found.encode("abba" * 5).ids == [2, 1, 0] * 5


def test_a_tokenizer_that_cannot_encode_a_text_is_an_error(folder: Path) -> None:
    from lowtri.cli.main import main

    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "[UNK]"}
    (folder / "tokenizer.json").write_text(tokenizer_json(model=model, pre_tokenizer={"type": "Whitespace"}))
    assert main(["generate", str(folder), "a b c", "--max-new-tokens", "1"]) == 0
    assert main(["generate", str(folder), "other", "--max-new-tokens", "1"]) == 2


# Chat templates

NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (NESTED, "the chat template runs for more than 1 seconds and was stopped"),
        pytest.param(DOUBLED, "the chat template ", marks=pytest.mark.sweep),
        pytest.param("{{ 'a' * 10**12 }}", "the chat template ", marks=pytest.mark.sweep),
        ("{{ 9 ** (9 ** 9) }}", "the chat template runs for more than 1 seconds"),
        pytest.param("{{ '%1000000000000d' % 1 }}", "the chat template ", marks=pytest.mark.sweep),
        pytest.param("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "the chat template ", marks=pytest.mark.sweep),
        pytest.param("{{ " + "(" * 20_000 + ")" * 20_000 + " }}", "the chat template ", marks=pytest.mark.sweep),
        pytest.param("{{ range(10**9) | list }}", "the chat template refuses: Range too big", marks=pytest.mark.sweep),
        (
            "{{ cycler.__init__.__globals__.os.popen('id') }}",
            "the chat template refuses: access to attribute '__init__'",
        ),
    ],
)
def test_a_template_that_exceeds_its_limits_is_stopped(
    template: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtri.nn.chat.SECONDS", 1.0 if "seconds" in words else 10.0)
    (tmp_path / "chat_template.jinja").write_text(template)
    with bounded(), pytest.raises(DataError, match=words):
        chat_text(tmp_path, HELLO)


@pytest.mark.parametrize("template", [[{"name": "x"}], [{"template": "x"}], [3], [], None, ""])
def test_a_folder_without_a_template_is_refused(template: Any, tmp_path: Path) -> None:
    change(tmp_path, "tokenizer_config.json", chat_template=template)
    with pytest.raises(DataError, match="has no chat template: the model continues texts"):
        chat_text(tmp_path, HELLO)


@pytest.mark.parametrize("template", [3, {"a": 1}, [{"name": "default"}], [{"name": "default", "template": [1]}]])
def test_a_template_that_is_not_text_is_refused(template: Any, tmp_path: Path) -> None:
    change(tmp_path, "tokenizer_config.json", chat_template=template)
    with pytest.raises(
        DataError, match=r"the chat template is (int|dict|list), expected a text, or a list of named texts"
    ):
        chat_text(tmp_path, HELLO)


# Any mutation

STRANGE: list[Any] = [
    None,
    True,
    0,
    1,
    -1,
    3,
    2**31,
    2**62,
    10**30,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "1) | full(",
    "\0",
]
STRANGE += [
    "a" * 70_000,
    [],
    [[]],
    [1, 2],
    ["a"],
    {},
    {"a": 1},
    [{}],
    {"type": "x"},
    "../x",
    "llama",
    "gpt2",
    "qwen2",
    "mistral",
    "full",
]


def replaced(content: Any, data: st.DataObject) -> Any:
    """The same JSON with one value, somewhere, replaced, removed or added."""
    inside = isinstance(content, dict | list) and len(content) and data.draw(st.integers(0, 3))
    if not inside:
        return copy.deepcopy(data.draw(st.sampled_from(STRANGE)))
    keys = list(content) if isinstance(content, dict) else list(range(min(len(content), 3)))
    key = data.draw(st.sampled_from(keys))
    content[key] = replaced(content[key], data)
    return content


@pytest.mark.sweep
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_value_in_any_json_file(
    data: st.DataObject, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("m")
    save(small(), folder, tokenizer)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1]}')
    name = data.draw(st.sampled_from(sorted(path.name for path in folder.glob("*.json")) + ["config.json"] * 3))
    content = json.loads((folder / name).read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        content = replaced(content, data)
    if name == "config.json" and isinstance(content, dict) and data.draw(st.booleans()):
        content |= {
            data.draw(
                st.sampled_from(["sliding_window", "layer_types", "rope_scaling", "use_sliding_window"])
            ): data.draw(st.sampled_from(STRANGE))
        }
        content.pop("lowtri_mask", None)
    (folder / name).write_text(json.dumps(content))
    works_or_refuses(lambda: load(folder))


@pytest.mark.sweep
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_bytes_in_any_file(data: st.DataObject, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("m")
    save(small(), folder, tokenizer)
    name = data.draw(st.sampled_from(sorted(path.name for path in folder.iterdir())))
    (folder / name).write_bytes(flipped((folder / name).read_bytes(), data))
    works_or_refuses(lambda: load(folder))


@pytest.mark.sweep
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    parts=st.lists(
        st.sampled_from(
            [
                "{{ ",
                " }}",
                "{% for i in range(9) %}",
                "{% endfor %}",
                "messages",
                "[0]",
                ".content",
                " | ",
                "tojson",
                "center(99)",
                "~",
                "'a'",
            ]
        ),
        max_size=12,
    )
)
def test_any_template(parts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("m")
    (folder / "chat_template.jinja").write_text("".join(parts))
    with bounded():
        try:
            said = f"{folder}{chat_text(folder, HELLO)}"
        except LowtriError as error:
            said = str(error)
    assert str(folder) in said
