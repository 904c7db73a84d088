"""torch.nn modules: attention, language models, and their checkpoints.

self_attention  MaskedSelfAttention: one head, as it is taught
multi_head      MultiHeadAttention: MHA, GQA, MQA; rotary, cache, cross-attention
rotary          rotary position embedding
positions       sinusoidal: the position encodings of the original Transformer
config          DecoderConfig: the sizes of a decoder
decoder         Decoder: a Llama-style language model
gpt2            GPT2: a Decoder with GPT-2's layers
fixed           attributes that are set once, when a module is built
recurrent       RecurrentLM: LSTM, GRU or plain RNN
cache           the interface of a key/value cache
layout          reads config.json of Llama and related models
layout_written  writes it
checkpoint      saves and loads checkpoint folders in transformers' format
files           the files of such a folder, checked before they are read
tokenizer       loads its tokenizer
gguf_header     parses a GGUF header
gguf_names      GGUF metadata and tensor names as config.json and model.safetensors
gguf_tokenizer  the tokenizer of a GGUF file
gguf            converts a GGUF file to a checkpoint folder, once
glassllm        the weights of the package glassllm
packaged        weights shipped in packages, by name
pretrained      Decoder.from_pretrained
chat            chat templates
chat_render     the sandboxed process that renders one
"""

from lowtri.nn.config import DecoderConfig
from lowtri.nn.decoder import Decoder
from lowtri.nn.multi_head import MultiHeadAttention
from lowtri.nn.positions import sinusoidal
from lowtri.nn.recurrent import RecurrentConfig, RecurrentLM
from lowtri.nn.self_attention import MaskedSelfAttention

__all__ = [
    "Decoder",
    "DecoderConfig",
    "MaskedSelfAttention",
    "MultiHeadAttention",
    "RecurrentConfig",
    "RecurrentLM",
    "sinusoidal",
]
