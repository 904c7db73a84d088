"""torch.nn modules: attention, language models, and their checkpoints.

self_attention     MaskedSelfAttention: one head, as it is taught
multi_head         MultiHeadAttention: MHA, GQA, MQA; rotary, cache, cross-attention
rotary             rotary position embedding
positions          sinusoidal: the position encodings of the original Transformer
config             DecoderConfig, GPT2Config, RecurrentConfig: the sizes of a model
llama, gpt2        the layers of a Decoder
decoder            Decoder: a decoder-only language model
recurrent          RecurrentLM: LSTM, GRU or plain RNN
joined             several linear layers with the same input as one
products           products with stored weights, and the choice among them by measurement
quantized          linear layers with weights stored for generating
fixed              attributes that are set only once, when a module is built
cache              the interface of a key/value cache
files              the files of a checkpoint folder, checked before they are read
tokenizer          loads and runs tokenizers
layout             reads config.json of Llama and related models
layout_written     writes config.json
checkpoint_reader  reads configuration and weights of a checkpoint folder
checkpoint         saves and loads checkpoint folders in transformers' format
gguf_header        parses and checks a GGUF header
gguf_names         GGUF metadata and tensor names as config.json and model.safetensors
gguf_tokenizer     the tokenizer of a GGUF file
gguf               converts a GGUF file to a checkpoint folder, once
packaged           weights that are shipped in Python packages
hub                models of the Hugging Face hub
names              a model's name to its checkpoint folder
pretrained         a model with its tokenizer and folder, by name
chat               chat templates
chat_render        the process that renders a chat template
"""

from lowtri.extras import require

require("lowtri.nn", "torch")

from lowtri.nn.config import DecoderConfig, GPT2Config
from lowtri.nn.decoder import Decoder
from lowtri.nn.multi_head import MultiHeadAttention
from lowtri.nn.positions import sinusoidal
from lowtri.nn.recurrent import RecurrentConfig, RecurrentLM
from lowtri.nn.self_attention import MaskedSelfAttention

__all__ = [
    "Decoder",
    "DecoderConfig",
    "GPT2Config",
    "MaskedSelfAttention",
    "MultiHeadAttention",
    "RecurrentConfig",
    "RecurrentLM",
    "sinusoidal",
]
