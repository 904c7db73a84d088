"""torch.nn modules: attention, and language models with or without it.

config       DecoderConfig, GPT2Config, RecurrentConfig: the sizes of a model
positions    position encodings: sinusoidal and rotary
attention    MaskedSelfAttention, as it is taught; MultiHeadAttention: MHA, GQA, MQA; rotary, cache, cross-attention; a Decoder's layers
folders      the folder of a saved model: written, and checked before it is read
decoder      Decoder: a decoder-only language model
recurrent    RecurrentLM: LSTM, GRU or plain RNN
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
