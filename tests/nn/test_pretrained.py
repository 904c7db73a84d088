"""Folders that transformers wrote, of every family that the Decoder reads: the same logits, the same tokens; and refusals.

What is right is transformers' own model in float64, with the RMSNorm that it computes in float32 replaced by torch's. Ours
in float64 must agree with it to rounding, and in float32 be as near to it as transformers' float32 is.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtri
from lowtri.errors import DataError
from lowtri.nn import Decoder
from lowtri.nn.chat import chat_text, template_of
from lowtri.nn.checkpoint import load, save
from lowtri.nn.config import GPT2Config
from rounding import with_rounding

VOCABULARY = 97
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "llama with biases": ("Llama", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "llama 3": ("Llama", {**SIZES, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, linear": ("Llama", {**SIZES, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 5}),
    "mistral without a window": ("Mistral", {**SIZES, "sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2 with a window": (
        "Qwen2",
        {**SIZES, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0},
    ),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 16}),
    "qwen3 with biases": ("Qwen3", {**SIZES, "head_dim": 16, "attention_bias": True}),
    "smollm3": ("SmolLM3", {**SIZES, **ENDS}),
    "gpt2": (
        "GPT2",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, **ENDS},
    ),
}


def model_of(family: str) -> Any:
    """A tiny model of transformers whose logits say something; fresh norms and biases would hide a mistake."""
    import transformers

    name, options = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.15 * torch.randn_like(weight)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """For a family its model and its folder, made once."""
    made: dict[str, tuple[Any, Path]] = {}

    def of(family: str) -> tuple[Any, Path]:
        if family not in made:
            folder = tmp_path_factory.mktemp("family")
            model = model_of(family)
            model.save_pretrained(folder)
            made[family] = model, folder
        return made[family]

    return of


def in_float64(model: Any) -> Any:
    import copy

    model = copy.deepcopy(model).double()
    for name, part in list(model.named_modules()):
        if type(part).__name__.endswith("RMSNorm"):
            exact = torch.nn.RMSNorm(part.weight.shape[0], part.variance_epsilon)
            exact.weight = part.weight
            model.set_submodule(name, exact)
    return model


def ids_of(rows: int, n: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, n), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, folders: Any) -> None:
    theirs, folder = folders(family)
    ours, ids = Decoder.from_pretrained(folder), ids_of(2, 40)
    cache = ours.make_cache(2)
    with torch.no_grad():
        truth = in_float64(theirs)(ids).logits
        plain, found = theirs(ids).logits, ours(ids)
        steps = [ours(ids[:, :24], cache=cache), *(ours(ids[:, t : t + 1], cache=cache) for t in range(24, 40))]
        exact = ours.double()(ids)
    assert truth.std() > 0.3
    largest = float(truth.abs().max())
    assert (exact - truth).abs().max() < 1e-12 * largest
    allowed = 2 * float((plain - truth).abs().max()) + 4 * torch.finfo(torch.float32).eps * largest
    assert (found - truth).abs().max() < allowed
    assert (torch.cat(steps, 1) - truth).abs().max() < allowed, "with a cache"


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tokens_are_those_of_transformers(family: str, folders: Any) -> None:
    theirs, folder = folders(family)
    ours, ids = Decoder.from_pretrained(folder), ids_of(1, 9)
    # In float64 no tie is broken by rounding, so the tokens must be the same ones.
    theirs, ours = in_float64(theirs), ours.double()
    with torch.no_grad():
        expected = theirs.generate(ids, do_sample=False, max_new_tokens=16, eos_token_id=-1, pad_token_id=0)[0, 9:]
    assert list(lowtri.generate(ours, ids[0].tolist(), 16, stop=())) == expected.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_changes_nothing(family: str, folders: Any) -> None:
    ours = Decoder.from_pretrained(folders(family)[1])
    ids = ids_of(1, 12)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.int64), ids], 1)
    places = torch.tensor([[-1] * 4 + list(range(12))])
    with torch.no_grad():
        expected, limit = with_rounding(lambda: ours(ids), ours.parameters(), 64)
        assert (ours(padded, positions=places)[:, 4:] - expected).abs().max() <= limit


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_lowtri_saves(family: str, folders: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs, folder = folders(family)
    ours = Decoder.from_pretrained(folder)
    save(ours, tmp_path)
    again, _ = load(tmp_path)
    assert again.config == ours.config
    back = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    same = {"mistral without a window": "llama"}  # which is what it is
    assert back.config.model_type == same.get(family, theirs.config.model_type)
    ids = ids_of(1, 40)
    with torch.no_grad():
        expected, limit = with_rounding(lambda: theirs(ids).logits, theirs.parameters(), 1)  # the same program
        assert (back(ids).logits - expected).abs().max() <= limit


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["llama 3", "mistral", "qwen3", "smollm3", "gpt2"])
def test_the_audit_finds_no_leak(family: str, folders: Any) -> None:
    model = Decoder.from_pretrained(folders(family)[1])
    layers = model.config.num_hidden_layers
    report = lowtri.audit(model, ids_of(2, 16), mask=model.mask, layers=layers, progress=False)
    assert report.ok, report.message


def test_each_option_of_a_family_changes_the_logits(folders: Any) -> None:
    """Each option switched off gives other logits, so the comparison above can fail."""
    from dataclasses import replace

    changes: dict[str, list[dict[str, Any]]] = {
        "llama 3": [{"rope_scaling": None}],
        "mistral": [{"mask": "causal & window(6)"}, {"mask": "causal"}],
        "smollm3": [{"rope_layers": None}],
        "qwen3": [{"rms_norm_eps": 1.0}],
    }
    ids = ids_of(1, 40)
    for family, options in changes.items():
        ours = Decoder.from_pretrained(folders(family)[1])
        for option in options:
            other = Decoder(replace(ours.config, **option)).eval()
            other.load_state_dict(ours.state_dict())
            with torch.no_grad():
                assert (other(ids) - ours(ids)).abs().max() > 1e-2, (family, option)


def test_shards_are_loaded(folders: Any, tmp_path: Path) -> None:
    theirs, folder = folders("qwen2")
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2 and not (tmp_path / "model.safetensors").exists()
    ids = ids_of(1, 10)
    with torch.no_grad():
        assert torch.equal(Decoder.from_pretrained(tmp_path)(ids), Decoder.from_pretrained(folder)(ids))
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(
        DataError, match=r"has no model-00002-of-.*safetensors: training is not finished, or it is kept"
    ):
        Decoder.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(DataError, match=r"index\.json holds a list; expected an object"):
        Decoder.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(DataError, match="has no weight_map, which names the file of each weight"):
        Decoder.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["../{}", "{folder}/{}", "parts/../../{}", "..\\{}", "C:{}", "", ".", 3])
def test_an_index_names_no_file_outside_of_its_folder(folders: Any, tmp_path: Path, name: str | int) -> None:
    _, folder = folders("qwen2")
    inside = tmp_path / "inside"
    inside.mkdir()
    shutil.copy(folder / "model.safetensors", tmp_path / "all.safetensors")
    shutil.copy(folder / "config.json", inside)
    part = name.format("all.safetensors", folder=tmp_path) if isinstance(name, str) else name
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": part}}))
    words = re.escape(f"index.json names {part!r}, which is not a file of its folder. Fix: weights from another source")
    with pytest.raises(DataError, match=words):
        Decoder.from_pretrained(inside)


def test_an_index_may_name_a_folder_within(folders: Any, tmp_path: Path) -> None:
    _, folder = folders("qwen2")
    (tmp_path / "parts").mkdir()
    shutil.copy(folder / "model.safetensors", tmp_path / "parts" / "all.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    named = json.dumps({"weight_map": {"lm_head.weight": "parts/all.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(named)
    ids = ids_of(1, 10)
    with torch.no_grad():
        assert torch.equal(Decoder.from_pretrained(tmp_path)(ids), Decoder.from_pretrained(folder)(ids))


def test_old_gpt2_files_are_read(folders: Any, tmp_path: Path) -> None:
    """The first files had no prefix, and kept the causal table of each layer as a weight."""
    from safetensors.torch import load_file, save_file

    _, folder = folders("gpt2")
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(folder / "model.safetensors").items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    model, ids = Decoder.from_pretrained(tmp_path), ids_of(1, 10)
    assert isinstance(model.config, GPT2Config)
    with torch.no_grad():
        assert torch.equal(model(ids), Decoder.from_pretrained(folder)(ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "float64", None])
def test_the_dtype_of_the_weights(dtype: Any, folders: Any, tmp_path: Path) -> None:
    theirs, folder = folders("llama")
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.float32
    assert {x.dtype for x in Decoder.from_pretrained(folder, dtype=dtype).parameters()} == {wanted}
    theirs.half().save_pretrained(tmp_path)
    theirs.float()
    stored = {x.dtype for x in Decoder.from_pretrained(tmp_path, dtype=dtype).parameters()}
    assert stored == {torch.float16 if dtype is None else wanted}
    with pytest.raises(DataError, match=r"dtype is 'int8'. Fix: float32, bfloat16, float16 or float64"):
        Decoder.from_pretrained(folder, dtype="int8")


def test_end_tokens_of_generation_config_take_precedence(folders: Any, tmp_path: Path) -> None:
    """The config names one end; a generation_config beside it, written when the model was taught to chat, names others."""
    _, folder = folders("smollm3")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert Decoder.from_pretrained(tmp_path).config.eos_token_id == (5, 7)
    (tmp_path / "generation_config.json").unlink()
    model = Decoder.from_pretrained(tmp_path)
    assert model.config.eos_token_id == (2,)
    prompt = ids_of(1, 5)[0].tolist()
    free = list(lowtri.generate(model, prompt, 30, stop=()))
    ended = list(lowtri.generate(model, prompt, 30))
    assert ended == (free[: free.index(2)] if 2 in free else free)


def broken(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))


MIXED = {"layer_types": ["full_attention", "sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 5}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'; lowtri's Decoder has 'silu' or 'swish' only"),
        (
            "llama",
            {"model_type": "mixtral"},
            "model_type 'mixtral'; .* reads llama, mistral, qwen2, qwen3, smollm3",
        ),
        ("llama", {"num_local_experts": 8}, "num_local_experts 8; lowtri's Decoder has 0 only"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config {'bits': 4}; .* has none only"),
        ("llama", {"rope_parameters": YARN}, "rope_type 'yarn'; lowtri's Decoder has default, linear and llama3"),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": "gone"},
            "rope_type 'dynamic'",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5; lowtri's Decoder has 1.0 only"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved True; lowtri's Decoder has False only"),
        (
            "llama 3",
            {"rope_parameters": {**LLAMA3, "high_freq_factor": 0.5}},
            "the bounds are 1.0 and 0.5.\nFix: factor",
        ),
        ("qwen3", MIXED, "layer_types differ from layer to layer, lowtri's Decoder has one mask for all"),
        ("qwen2", {**MIXED, "layer_types": None, "max_window_layers": 2}, "layer_types differ from layer to layer"),
        ("smollm3", {**MIXED, "layer_types": None}, "layer_types differ from layer to layer"),
        (
            "gpt2",
            {"activation_function": "relu"},
            "activation_function 'relu'; .* has 'gelu_new' or 'gelu_pytorch",
        ),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights False; lowtri's Decoder has True only"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention True"),
        ("gpt2", {"n_layer": 2}, "do not fit together at model.layers.2"),
    ],
)
def test_unsupported_options_are_refused_by_name(
    family: str, changes: dict[str, Any], words: str, folders: Any, tmp_path: Path
) -> None:
    shutil.copytree(folders(family)[1], tmp_path, dirs_exist_ok=True)
    broken(tmp_path, **changes)
    with pytest.raises(DataError, match=words):
        Decoder.from_pretrained(tmp_path)


def test_configs_of_transformers_4_are_read(folders: Any, tmp_path: Path) -> None:
    """rope_theta and rope_scaling stood beside one another, and rope_type was called type."""
    _, folder = folders("llama 3")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    scaling = {("type" if key == "rope_type" else key): value for key, value in LLAMA3.items() if key != "rope_theta"}
    broken(tmp_path, rope_parameters="gone", rope_theta=500.0, rope_scaling=scaling)
    assert Decoder.from_pretrained(tmp_path).config == Decoder.from_pretrained(folder).config


def test_a_decoder_unknown_to_transformers_is_not_saved(tmp_path: Path) -> None:
    from lowtri.nn import DecoderConfig

    odd = DecoderConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, o_bias=True)
    with pytest.raises(
        DataError, match="no model_type of transformers has this decoder's biases, norms and mask together"
    ):
        save(Decoder(odd), tmp_path)


def test_files_of_other_formats_and_recurrent_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(DataError, match=r"is a file, but not a GGUF file. Fix: the folder of a model, or a GGUF file"):
        Decoder.from_pretrained(tmp_path / "weights.bin")
    save(lowtri.nn.RecurrentLM(9, 8), tmp_path / "rnn")
    with pytest.raises(DataError, match=r"holds a RecurrentLM, not a Decoder. Fix: lowtri.nn.checkpoint.load"):
        Decoder.from_pretrained(tmp_path / "rnn")


# Conversations

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    [{{ message.role }}] {{ message.content | trim }}\n{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
HELLO = [{"role": "user", "content": " hello "}]


def test_a_template_is_rendered_as_by_a_tokenizer_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from lowtri.training.corpus import learn

    save(
        lowtri.nn.Decoder(lowtri.nn.DecoderConfig(vocab_size=300, hidden_size=8, num_hidden_layers=1)),
        tmp_path,
        learn(["a"]),
    )
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert chat_text(tmp_path, HELLO) == expected
    assert "[user] hello" in expected and expected.endswith("[assistant]")


def test_a_template_may_use_what_transformers_provides(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% break %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    assert chat_text(tmp_path, [{"role": "user", "content": "<é>"}, *HELLO]) == '{"role": "user", "content": "<é>"}'


def test_a_template_without_transformers_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    monkeypatch.setattr("lowtri.nn.chat.is_installed", lambda name: False)
    with pytest.raises(
        DataError, match=r"not installed: transformers, jinja2\.\nFix: pip install 'lowtri\[transformers\]'"
    ):
        chat_text(tmp_path, HELLO)


def test_templates_are_read_from_two_files(tmp_path: Path) -> None:
    assert template_of(tmp_path) is None
    with pytest.raises(DataError, match=r"has no chat template: the model continues texts.\nFix: leave --chat out"):
        chat_text(tmp_path, HELLO)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "{{ bos_token }}", "bos_token": {"content": "<s>"}}))
    assert chat_text(tmp_path, HELLO) == "<s>"
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert chat_text(tmp_path, HELLO) == "yes"


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "the chat template refuses: roles must alternate"),
        (
            "{{ messages[0]['content'].__class__.__mro__ }}",
            "the chat template refuses: access to attribute '__class__'",
        ),
        ("{% for", "the chat template refuses: "),
    ],
)
def test_errors_of_a_template_are_reported(template: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(DataError, match=words):
        chat_text(tmp_path, HELLO)


@pytest.mark.parametrize("family", ["qwen3 with biases", "smollm3", "llama 3", "gpt2"])
def test_explain_reproduces_the_attention_of_a_layer(family: str, folders: Any) -> None:
    """explain computes anew what the model's attention did: normalised or not, turned or not."""
    import re

    model = Decoder.from_pretrained(folders(family)[1])
    for layer in (0, 3 if family != "gpt2" else 2):
        found = lowtri.explain(model, ids_of(1, 9), layer=layer, head=1)
        assert float(re.findall(r"differs by (\S+)\.$", found.note)[0]) < 1e-5
