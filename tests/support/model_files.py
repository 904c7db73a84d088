"""Tiny models in every form that the command line reads: folders of transformers and of lowtri, a GGUF file, the hub's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from lowtri.nn import Decoder, DecoderConfig, RecurrentLM

BEGIN = "<|begin|>"
END = "<|end|>"
CHAT = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
SIZES = {"vocab_size": 258, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}


def tokenizer() -> Any:
    """A token for each byte, one that begins a text and one that ends it, of the library tokenizers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {BEGIN: 0, END: 1, **{letter: 2 + index for index, letter in enumerate(letters)}}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.add_special_tokens([BEGIN, END])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    return made


def varied(model: Any) -> Any:
    """The model with weights whose logits say something."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn_like(weight)
    return model.eval()


def transformers_folder(path: Path, kind: str = "Llama", *, chat: bool = True, **options: Any) -> Path:
    """A causal language model of transformers, with a tokenizer and a chat template."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "bos_token_id": 0, "eos_token_id": 1, **options})
    varied(transformers.AutoModelForCausalLM.from_config(config)).save_pretrained(path)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(), bos_token=BEGIN, eos_token=END)
    fast.chat_template = CHAT if chat else None
    fast.save_pretrained(path)
    return path


def decoder_folder(path: Path, **options: Any) -> Path:
    """A Decoder with a tokenizer."""
    varied(Decoder(DecoderConfig(**{**SIZES, "eos_token_id": (1,), **options}))).save(path)
    tokenizer().save(str(path / "tokenizer.json"))
    return path


def recurrent_folder(path: Path) -> Path:
    """A RecurrentLM with a tokenizer."""
    varied(RecurrentLM(258, 16)).save(path)
    tokenizer().save(str(path / "tokenizer.json"))
    return path


def gguf_file(path: Path) -> Path:
    """A Llama of one layer as a GGUF file, with a byte-level tokenizer and a chat template."""
    import gguf

    vocabulary = [*sorted(tokenizer().get_vocab(), key=tokenizer().token_to_id), "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3, 3] + [1] * (len(vocabulary) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(CHAT)
    n = len(vocabulary)
    shapes = {"token_embd": (n, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,)}
    shapes |= {"blk.0.attn_q": (8, 8), "blk.0.attn_k": (4, 8), "blk.0.attn_v": (4, 8), "blk.0.attn_output": (8, 8)}
    shapes |= {"blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8), "blk.0.ffn_down": (8, 16), "output": (n, 8)}
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def hub_cache(home: Path, folder: Path, name: str = "some-org/a.model_1") -> Path:
    """A folder's files laid out as the hub's cache keeps them, in ``home/hub``: links to blobs, under a commit."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for made in (snapshot, repository / "blobs", repository / "refs"):
        made.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for number, file in enumerate(sorted(folder.iterdir())):
        (repository / "blobs" / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(number)))
    return home / "hub"
