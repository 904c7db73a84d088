"""Modules of torch: attention, and a decoder made of it.

self_attention  MaskedSelfAttention: one head, three maps, nothing else
multi_head      MultiHeadAttention: MHA, GQA, MQA; rotary, cache, cross-attention
rotary          rotary position embedding
positions       sinusoidal: the position encodings of the original Transformer
config          DecoderConfig: the sizes of a decoder
decoder         Decoder: a language model in Llama's shape
gpt2            GPT2: a Decoder with another body
fixed           attributes that are set once, when a module is built
recurrent       RecurrentLM: autoregressive without attention
cache           the interface of a key/value cache
layout          config.json, of Llama and its relatives, read
layout_written  the same, written
checkpoint      a Decoder as a folder that transformers can load, and back
files           the files of such a folder, checked before they are read
tokenizer       its tokenizer
gguf_header     where the parts of a GGUF file lie
gguf_names      the names of a GGUF file, in the words of such a folder
gguf_tokenizer  the tokenizer that a GGUF file carries
gguf            a GGUF file as such a folder, converted once
glassllm        the weights of the package glassllm
packaged        weights that packages ship, by name
pretrained      Decoder.from_pretrained
chat            a conversation as the text that a model was taught to read
chat_render     the process that fills in its template
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
