"""Trains a model on text files, and writes a folder that transformers loads."""

from lowtri.extras import require

require("training", "torch", "safetensors", "tokenizers")
