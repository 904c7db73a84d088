"""torch.nn modules: attention, language models, and their checkpoints.

config       DecoderConfig, GPT2Config, RecurrentConfig: the sizes of a model
positions    position encodings: sinusoidal and rotary
attention    MaskedSelfAttention, as it is taught; MultiHeadAttention: MHA, GQA, MQA; rotary, cache, cross-attention; a Decoder's layers
quantized    linear layers with weights stored for generating, and the choice among products by measurement; few tokens
files        the files of a checkpoint folder and its tokenizer: written, and checked before they are read
hf_config    reads and writes config.json of Llama and related models
gguf         converts a GGUF file to a checkpoint folder, once
names        a model's name (path, package, hub) to its checkpoint folder, and the configuration and weights in it
decoder      Decoder: a decoder-only language model
recurrent    RecurrentLM: LSTM, GRU or plain RNN
checkpoint   saves and loads checkpoint folders in transformers' format, by path or by name
chat         chat templates
chat_render  the process that renders a chat template
"""

from lowtri.extras import require

require("lowtri.nn", "torch")

from lowtri.nn.attention import MaskedSelfAttention, MultiHeadAttention
from lowtri.nn.config import DecoderConfig, GPT2Config, RecurrentConfig
from lowtri.nn.decoder import Decoder
from lowtri.nn.positions import sinusoidal
from lowtri.nn.recurrent import RecurrentLM

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
